"""The address of a server: taken before a model is loaded, listened on afterwards."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from quantkit.common.errors import QuantkitError


@contextmanager
def bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets at every address of `host`, which nobody can connect to until somebody listens on
    them; closed at the end.

    Raises QuantkitError where the address is another's, or none of this machine's.
    """
    with ExitStack() as opened:
        try:
            sockets = [
                opened.enter_context(_socket_at(family, address))
                for family, address in _addresses(host, port)
            ]
        except OSError as error:
            raise not_free(host, port, error) from error
        yield sockets


def address(host: str, port: int) -> str:
    """As it stands in a URL."""
    return f"{in_url(host)}:{port}"


def in_url(host: str) -> str:
    """A host as it stands in a URL, or before a port: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def not_free(host: str, port: int, error: OSError) -> QuantkitError:
    """What to say where `port` cannot be had at `host`."""
    told = f"cannot serve on {address(host, port)}: {error.strerror}"
    return QuantkitError(told, "choose another --port, or another --host where there is one")


def _addresses(host: str, port: int) -> Sequence[tuple[socket.AddressFamily, tuple[object, ...]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _socket_at(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # one that ended a moment ago does not hold its port
        if family == socket.AF_INET6:
            made.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1
            )  # IPv4 has a socket of its own
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
