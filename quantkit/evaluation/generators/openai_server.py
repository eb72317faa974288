"""Client of an OpenAI-compatible server: address, key, models, events of a streamed reply, errors.

Streaming keeps a long reply alive through proxies and lets the timeout apply to the time between
events. An error sent inside the stream after HTTP 200 counts as an error.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

import httpx

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.evaluation.generators.generator import whole_text

CONNECT_TIMEOUT_S = 10.0
TIMEOUT_S = 600.0
LONGEST_TIMEOUT_S = 1e6  # event loop clocks accept no infinite timeout
LONGEST_LINE = 64 * 2**20  # bytes; a longer event is a server error
_MODEL_FACTS = ("root", "revision", "owned_by", "max_model_len")  # kept from an entry of /models
_DRAIN_S = 1.0
_FIELD = re.compile(r"(?:data|event|id|retry)?:")  # a field of an event, or a comment
_KEEP_ALIVE = re.compile(
    r"(?i)(?:ping|pong|keep-?_?alive|heartbeat)"
)  # keep-alive events of some servers


class StreamError(Exception):
    """The server failed after it had answered HTTP 200."""


REQUEST_ERRORS = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, StreamError, TimeoutError)
"""Exceptions of a request."""
ABORT_REASONS = {"abort", "error", "cancelled"}
"""Finish reasons of an aborted reply."""


class OpenAIServer:
    """`url` is the address, with or without /v1 or a method.

    timeout_s: longest wait for the next event of a reply, or for the whole reply of a server that
    does not stream. Raises QuantkitError for an invalid timeout or key.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
            raise QuantkitError(
                f"--timeout is {timeout_s}", f"give seconds, {LONGEST_TIMEOUT_S:,.0f} at most"
            )
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise QuantkitError(
                "--api-key contains a character that is not valid in an HTTP header",
                "give the key alone, without line breaks",
            )
        self.base = base_url(url)
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))

    def models(self) -> list[JsonObject]:
        """The served models, one entry each. Raises QuantkitError where the server does not
        answer."""
        try:
            answer = httpx.get(f"{self.base}/models", headers=self._headers, timeout=self._timeout)
            if answer.status_code in (404, 405, 501):
                return []  # a server without this method
            answer.raise_for_status()
            entries = answer.json()["data"]
            return [
                {
                    name: value if type(value) is int else whole_text(str(value))
                    for name in ("id", *_MODEL_FACTS)
                    if (value := entry.get(name)) or name == "id"
                }
                for entry in entries
                if entry["id"] is not None
            ]
        except Exception as error:  # of the connection, or an answer of another shape
            refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (
                401,
                403,
            )
            remedy = (
                "give the server's key with --api-key"
                if refused
                else "check the address and that an OpenAI-compatible server is up"
            )
            raise QuantkitError(
                f"{self.base}/models does not answer ({describe_error(error)})", remedy
            ) from error

    def metrics(self) -> dict[str, float]:
        """The counters of /metrics in Prometheus' format, summed over labels; empty where the
        server has none."""
        found: dict[str, float] = {}
        with suppress(httpx.HTTPError, ValueError):
            answer = httpx.get(
                f"{self.base.removesuffix('/v1')}/metrics",
                headers=self._headers,
                timeout=CONNECT_TIMEOUT_S,
            )
            for line in answer.text.split("\n") if answer.is_success else ():
                name, _, value = line.rpartition(" ")
                if name and not line.startswith("#"):
                    name = name.partition("{")[0]
                    found[name] = found.get(name, 0.0) + float(value)
        return found

    def find_model(self, name: str | None) -> JsonObject:
        """The entry of the model `name`, or of the only model where None. A name that is not
        listed is accepted. Raises QuantkitError where the server does not answer, or serves
        several models and none is named."""
        entries = self.models()
        if name is not None:
            return next((entry for entry in entries if entry["id"] == name), {"id": name})
        if len(entries) != 1:
            names = ", ".join(entry["id"] for entry in entries)
            raise QuantkitError(
                f"{self.base} serves {len(entries)} models: {names}",
                "choose one with --served-model",
            )
        return entries[0]

    def client(self, connections: int) -> httpx.AsyncClient:
        """An HTTP client with at most `connections` connections."""
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        return httpx.AsyncClient(headers=self._headers, timeout=self._timeout, limits=limits)

    async def stream(
        self, client: httpx.AsyncClient, method: str, body: JsonObject
    ) -> AsyncGenerator[JsonObject]:
        """Events of the reply to `body` as they arrive. method: such as "/chat/completions". Raises
        REQUEST_ERRORS.

        Bytes that do not form an event (comments, partial lines) do not extend the timeout.
        """
        async with (
            asyncio.timeout(self.timeout_s) as deadline,
            client.stream("POST", self.base + method, json=body) as response,
        ):
            if not response.is_success:
                await response.aread()
                response.raise_for_status()
            async for event in _events(response):
                if event.get("error"):
                    raise StreamError(json.dumps(event["error"])[:500])
                deadline.reschedule(asyncio.get_running_loop().time() + self.timeout_s)
                yield event


def is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def base_url(url: str) -> str:
    """The address up to and including /v1."""
    url = url.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/models"):
        url = url.removesuffix(ending)
    return url if url.endswith(("/v1", "/v2", "/v3")) else f"{url}/v1"


def describe_error(error: BaseException) -> str:
    """The error in words, with the server's message."""
    if isinstance(error, httpx.HTTPStatusError):
        moved = error.response.headers.get("location", "") if error.response.is_redirect else ""
        return (
            f"HTTP {error.response.status_code}: "
            f"{f'moved to {moved}' if moved else _message(error.response)}"
        )
    if isinstance(error, StreamError):
        return str(error)
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return f"no answer in time ({type(error).__name__})"
    return f"{type(error).__name__}: {error}"


async def _events(response: httpx.Response) -> AsyncGenerator[JsonObject]:
    """The JSON objects of a server-sent event stream, up to [DONE].

    A plain JSON body (a server that ignores `stream`) is one event, and so is every line of a
    JSON-lines body; the first line distinguishes these from a stream where the content type, which
    proxies change, does not. Servers send an event as one `data:` line; one spread over several, as
    the standard allows, is joined at the empty line that ends it. In a stream a line without a field
    name is an error: it may have contained text.
    """
    kind = response.headers.get("content-type", "")
    is_stream, is_empty = "event-stream" in kind, True
    pieces, held = response.aiter_bytes(), list[str]()

    def event() -> JsonObject:
        what = "an event" if is_stream else f"the answer ({kind or 'no content type'})"
        value = _parse("\n".join(held), what)
        held.clear()
        return value

    async for line in read_lines(pieces):
        data = line.removeprefix("data:").strip(" ") if line.startswith("data:") else ""
        if _FIELD.match(line) is not None:
            is_stream = True
        elif line.strip():
            if is_stream:
                raise StreamError(f"a line that is not an event: {line[:200]!r}")
            data = line
        is_empty = is_empty and not line.strip()
        if data.upper() == "[DONE]":
            await _drain(pieces)
            return
        if data and (held or not _KEEP_ALIVE.fullmatch(data)):
            held.append(data)
        if held and (not line or _is_complete(held)):
            yield event()
    if held:
        yield event()
    if is_empty and not is_stream:
        raise StreamError(f"the answer ({kind or 'no content type'}) is empty")


def _is_complete(held: list[str]) -> bool:
    """Whether a one-line event is complete, without waiting for the empty line."""
    return len(held) == 1 and held[0].startswith("{") and held[0].endswith("}")


async def read_lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Lines of a byte stream without their LF or CRLF.

    A lone CR, U+0085, U+2028 and U+2029, at which str.splitlines breaks, stay inside a line. Text
    after the last LF is a line too. Raises StreamError for a line longer than LONGEST_LINE.
    """
    open_line: list[bytes] = []
    size = 0
    async for piece in pieces:
        *ended, rest = piece.split(b"\n")
        for part in ended:
            yield _decode(b"".join([*open_line, part]))
            open_line, size = [], 0
        open_line.append(rest)
        size += len(rest)
        if size > LONGEST_LINE:
            raise StreamError(f"a line of more than {LONGEST_LINE >> 20} MiB")
    if size:
        yield _decode(b"".join(open_line))


def _decode(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace").removeprefix("\ufeff")


async def _drain(pieces: AsyncIterator[bytes]) -> None:
    """Read what follows [DONE], usually nothing, so that the connection can be reused; a server
    that keeps the stream open is abandoned after a timeout."""
    with suppress(TimeoutError, httpx.HTTPError, httpx.StreamError):
        async with asyncio.timeout(_DRAIN_S):
            async for _ in pieces:
                pass


def _parse(text: str, what: str) -> JsonObject:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StreamError(f"{what} is not JSON: {text[:200]!r}") from error
    if not isinstance(value, dict):
        raise StreamError(f"{what} is not a JSON object: {text[:200]!r}")
    return value


def _message(response: httpx.Response) -> str:
    """The server's message, or the status phrase where there is none."""
    try:
        body = response.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        text = (
            error.get("message") or error.get("detail") or error
            if isinstance(error, dict)
            else error
        )
    except ValueError:
        text = response.text
    return " ".join(str(text or "").split())[:300] or response.reason_phrase or "an empty answer"
