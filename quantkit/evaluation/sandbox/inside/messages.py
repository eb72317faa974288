"""Messages over a pipe: eight bytes of length, then the data."""

import os
import select
import time

LIMIT = 64 << 20  # bytes of one message


class Closed(Exception):
    """The other side closed the pipe."""


def send(descriptor: int, data: bytes) -> None:
    view = memoryview(len(data).to_bytes(8, "big") + data)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(descriptor: int, timeout_s: float | None = None) -> bytes:
    """One message. Raises Closed at the end of the pipe, TimeoutError after `timeout_s`,
    ValueError for more than LIMIT bytes."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    length = int.from_bytes(_exactly(descriptor, 8, deadline), "big")
    if length > LIMIT:
        raise ValueError(f"a message of {length} bytes (the limit is {LIMIT})")
    return _exactly(descriptor, length, deadline)


def _exactly(descriptor: int, count: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        if (
            deadline is not None
            and not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
        ):
            raise TimeoutError
        chunk = os.read(descriptor, min(1 << 20, count - len(data)))
        if not chunk:
            raise Closed
        data += chunk
    return bytes(data)
