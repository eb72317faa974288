"""One request to a server of HTTP/1.1, and its answer as it comes: h11 on asyncio's streams.

A proxy passes every token on by itself, so that an answer of 64 tokens is 64 pieces. A client with
a pool of connections costs several times as much processor time for each piece as this does; here
every request has a connection of its own, which ends with it.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from functools import cache
from urllib.parse import urlsplit

import h11

SECONDS_TO_REACH = 10.0
_PIECE = 2**16


def is_address(url: str) -> bool:
    """Whether `ask` can ask there: http or https, a host that can be looked up, and a port that
    there is or none; nothing behind a path."""
    try:
        place = urlsplit(url)
        host = place.hostname or ""
        host.encode("idna")
        whole = place.scheme in ("http", "https") and bool(host) and place.port != 0
        return (
            whole
            and not (place.query or place.fragment or place.username)
            and not any(letter.isspace() for letter in url)
        )
    except ValueError:
        return False


class Answer:
    """Status, kind of content, and a body that is read once, by `whole` or by `pieces`. Both raise
    ConnectionError where the server stops before its end."""

    def __init__(
        self,
        url: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        parser: h11.Connection,
    ) -> None:
        self.url, self._reader, self._writer, self._parser = url, reader, writer, parser
        self.status = 0
        self.content_type: str | None = None

    async def begin(self) -> None:
        """Reads the head."""
        while not isinstance(event := self._next(), h11.Response):
            if event is h11.NEED_DATA:
                await self._read()
        self.status = event.status_code
        self.content_type = next(
            (value.decode("latin-1") for name, value in event.headers if name == b"content-type"),
            None,
        )

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        """What came at once goes on at once."""
        held = list[bytes]()
        while not isinstance(event := self._next(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                held.append(bytes(event.data))
                continue
            if held:
                yield b"".join(held)
                held = []
            await self._read()
        if held:
            yield b"".join(held)

    def close(self) -> None:
        """At once: what the server was not sent yet, it need not read."""
        self._writer.transport.abort()

    def _next(self) -> object:
        try:
            return self._parser.next_event()
        except h11.RemoteProtocolError as problem:
            raise ConnectionError(str(problem)) from problem

    async def _read(self) -> None:
        self._parser.receive_data(await self._reader.read(_PIECE))


async def ask(method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> Answer:
    """The answer, its body not read yet; whoever gets it closes it.

    Raises OSError where the server cannot be reached or ends without one, and ValueError for a
    header that HTTP does not have.
    """
    place = urlsplit(url)
    assert place.hostname is not None, url
    secure = place.scheme == "https"
    opening = asyncio.open_connection(
        place.hostname,
        place.port or (443 if secure else 80),
        ssl=_trusted() if secure else None,
        limit=_PIECE,
    )
    reader, writer = await asyncio.wait_for(opening, SECONDS_TO_REACH)
    parser = h11.Connection(h11.CLIENT)
    told = {
        "Host": place.netloc.rpartition("@")[2],
        "Connection": "close",
        "Content-Length": str(len(body)),
        **headers,
    }
    target = (place.path or "/") + (f"?{place.query}" if place.query else "")
    answer = Answer(f"{place.scheme}://{place.netloc}", reader, writer, parser)
    try:
        try:
            lines = [(name.encode(), value.encode("latin-1")) for name, value in told.items()]
            head = parser.send(h11.Request(method=method, target=target, headers=lines))
        except h11.LocalProtocolError as problem:
            raise ValueError(str(problem)) from problem
        rest = parser.send(h11.Data(body)), parser.send(h11.EndOfMessage())
        writer.write(b"".join(part for part in (head, *rest) if part))
        await (
            answer.begin()
        )  # a server may answer, and why it refuses, before it has read everything
    except BaseException:
        answer.close()
        raise
    return answer


@cache
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()
