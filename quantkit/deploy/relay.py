"""One HTTP/1.1 request to a server and its streamed answer: h11 on asyncio streams.

A proxy forwards every token by itself, so an answer of 64 tokens has 64 pieces. A client with a
connection pool needs several times the CPU time per piece; here every request has its own
connection.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from functools import cache
from urllib.parse import urlsplit

import h11

CONNECT_SECONDS = 10.0
_CHUNK_BYTES = 2**16


def is_address(url: str) -> bool:
    """Whether it is a valid URL for `ask`: http or https, a resolvable host, a valid port or none;
    nothing after a path."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host.encode("idna")
        whole = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
        return (
            whole
            and not (parts.query or parts.fragment or parts.username)
            and not any(letter.isspace() for letter in url)
        )
    except ValueError:
        return False


class Answer:
    """Status, content type, and a body that is read once, by `whole` or by `pieces`. Both raise
    ConnectionError if the server stops before its end."""

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
        """Read the response head."""
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
        """The body in pieces as they arrive."""
        buffered = list[bytes]()
        while not isinstance(event := self._next(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                buffered.append(bytes(event.data))
                continue
            if buffered:
                yield b"".join(buffered)
                buffered = []
            await self._read()
        if buffered:
            yield b"".join(buffered)

    def close(self) -> None:
        """Close at once, discarding unsent data."""
        self._writer.transport.abort()

    def _next(self) -> object:
        try:
            return self._parser.next_event()
        except h11.RemoteProtocolError as problem:
            raise ConnectionError(str(problem)) from problem

    async def _read(self) -> None:
        self._parser.receive_data(await self._reader.read(_CHUNK_BYTES))


async def ask(method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> Answer:
    """The answer, its body not read yet; the caller closes it.

    Raises OSError if the server cannot be reached or closes without an answer, and ValueError for
    an invalid header.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None, url
    secure = parts.scheme == "https"
    opening = asyncio.open_connection(
        parts.hostname,
        parts.port or (443 if secure else 80),
        ssl=_ssl_context() if secure else None,
        limit=_CHUNK_BYTES,
    )
    reader, writer = await asyncio.wait_for(opening, CONNECT_SECONDS)
    parser = h11.Connection(h11.CLIENT)
    fields = {
        "Host": parts.netloc.rpartition("@")[2],
        "Connection": "close",
        "Content-Length": str(len(body)),
        **headers,
    }
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    answer = Answer(f"{parts.scheme}://{parts.netloc}", reader, writer, parser)
    try:
        try:
            lines = [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]
            head = parser.send(h11.Request(method=method, target=target, headers=lines))
        except h11.LocalProtocolError as problem:
            raise ValueError(str(problem)) from problem
        rest = parser.send(h11.Data(body)), parser.send(h11.EndOfMessage())
        writer.write(b"".join(part for part in (head, *rest) if part))
        await answer.begin()  # a server may reject a request before it has read all of it
    except BaseException:
        answer.close()
        raise
    return answer


@cache
def _ssl_context() -> ssl.SSLContext:
    return ssl.create_default_context()
