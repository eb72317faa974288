"""Server sockets, bound before a model is loaded and listened on afterwards."""

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from quantkit.common.errors import QuantkitError


@contextmanager
def bind(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets bound to every address of `host`, refusing connections until a server listens on
    them; closed on exit.

    Raises QuantkitError if an address is in use or does not belong to this machine.
    """
    with ExitStack() as opened:
        try:
            sockets = [
                opened.enter_context(_socket_at(family, address))
                for family, address in _addresses(host, port)
            ]
        except OSError as error:
            raise bind_error(host, port, error) from error
        yield sockets


def url_address(host: str, port: int) -> str:
    """host:port as written in a URL."""
    return f"{host_in_url(host)}:{port}"


def host_in_url(host: str) -> str:
    """A host as written in a URL or before a port: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether a name or an address, also in brackets as in a URL, can only be of this machine."""
    name = host.removeprefix("[").removesuffix("]").lower()
    try:
        return name in ("localhost", "localhost.") or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def bind_error(host: str, port: int, error: OSError) -> QuantkitError:
    """The error for a `port` that cannot be bound at `host`."""
    return QuantkitError(
        f"cannot serve on {url_address(host, port)}: {error.strerror}",
        "choose another --port, or another --host",
    )


def _addresses(host: str, port: int) -> Sequence[tuple[socket.AddressFamily, tuple[object, ...]]]:
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in addresses))


def _socket_at(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    server_socket = socket.socket(family, socket.SOCK_STREAM)
    try:
        server_socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a server that just ended does not hold its port
        if family == socket.AF_INET6:
            server_socket.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1
            )  # IPv4 has a socket of its own
        server_socket.bind(address)
    except OSError:
        server_socket.close()
        raise
    return server_socket
