"""Messages between rank 0 and the others: JSON over TCP, for every decode step waits for one and a
process group's broadcast takes longer.

Each connection begins with a key that only the ranks know.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

_LENGTH_BYTES = 8
_CONNECT_SECONDS = 60

SPIN_SECONDS = 0.05
"""Longer than a decode step: while tokens are made, no rank is put to sleep between two
messages."""


class Channel:
    """exchange: a JSON value of each rank, in the order of ranks; every rank calls it. OSError
    where another rank is gone.

    spins: whether to look for a message again and again before sleeping, which takes a core and
    saves waking up.
    """

    def __init__(
        self, rank: int, size: int, exchange: Callable[[Any], list[Any]], *, spins: bool = False
    ) -> None:
        self._spins = spins
        self._rank, host = rank, os.environ["MASTER_ADDR"]
        if rank:
            port, key = exchange(None)[0]
            connection = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
            connection.sendall(bytes.fromhex(key))
            self._connections = [connection]
        else:
            key = secrets.token_hex(16)
            with socket.create_server((host, 0)) as server:
                server.settimeout(_CONNECT_SECONDS)
                exchange((server.getsockname()[1], key))
                self._connections = _accept(server, size - 1, bytes.fromhex(key))
        for connection in self._connections:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Any) -> None:
        """From rank 0 to all ranks, from another rank to rank 0."""
        text = json.dumps(message).encode()
        for connection in self._connections:
            connection.sendall(len(text).to_bytes(_LENGTH_BYTES, "little") + text)

    def receive(self) -> Any:
        """The next message of rank 0; waits for it."""
        if self._spins:
            _spin(self._connections[0])
        return _decoded(self._connections[0])

    def collect(self, message: Any) -> list[Any]:
        """A message of each rank, on rank 0 in the order of ranks; nothing on the others."""
        if self._rank:
            self.send([self._rank, message])
            return []
        messages = dict(map(_decoded, self._connections))  # they connected in any order
        return [message, *(messages[rank] for rank in sorted(messages))]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def _accept(server: socket.socket, count: int, key: bytes) -> list[socket.socket]:
    """`count` connections that know the key; others are closed."""
    known: list[socket.socket] = []
    while len(known) < count:
        connection, _ = server.accept()
        connection.settimeout(_CONNECT_SECONDS)
        try:
            matches = secrets.compare_digest(_read(connection, len(key)), key)
        except OSError:
            matches = False
        if matches:
            known.append(connection)
        else:
            connection.close()
    return known


def _spin(connection: socket.socket) -> None:
    """Until something can be read, or SPIN_SECONDS have passed."""
    until = time.monotonic() + SPIN_SECONDS
    while time.monotonic() < until:
        try:
            connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return
        except BlockingIOError:  # nothing has come yet
            continue


def _decoded(connection: socket.socket) -> Any:
    """The next message; waits for it."""
    return json.loads(_read(connection, int.from_bytes(_read(connection, _LENGTH_BYTES), "little")))


def _read(connection: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        part = connection.recv(min(count - len(content), 1 << 20))
        if not part:
            raise ConnectionError("the other rank closed the connection")
        content += part
    return bytes(content)
