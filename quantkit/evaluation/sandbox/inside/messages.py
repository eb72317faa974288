"""Messages over a pipe: eight bytes of length, then the data."""

import os
import select
import time

LIMIT = 64 << 20  # bytes of one message
_FOREVER_S = 1e9


class Closed(Exception):
    """The other side closed the pipe."""


def send(descriptor: int, data: bytes) -> None:
    view = memoryview(len(data).to_bytes(8, "big") + data)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(descriptor: int, timeout_s: float = _FOREVER_S) -> bytes:
    """One message. Raises Closed at the end of the pipe, TimeoutError after `timeout_s`,
    ValueError for more than LIMIT bytes."""
    deadline = time.monotonic() + timeout_s
    data, count = bytearray(), 8
    while len(data) < count:
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        chunk = os.read(descriptor, min(1 << 20, count - len(data)))
        if not chunk:
            raise Closed
        data += chunk
        if len(data) == 8:
            count += int.from_bytes(data, "big")
            if count > LIMIT:
                raise ValueError(f"a message of {count} bytes (the limit is {LIMIT})")
    return bytes(data[8:])
