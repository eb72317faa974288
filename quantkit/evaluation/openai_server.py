"""An OpenAI-compatible server as its clients here reach it: address, key, model, the events of a streamed reply, what went wrong.

Streaming keeps a half-hour reply alive through proxies and makes the read timeout mean "no token for that long". An error sent inside the
stream after HTTP 200 counts as an error.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from quantkit.errors import QuantkitError


class StreamError(Exception):
    """The server failed after it had answered HTTP 200."""


FAULTS = (httpx.HTTPError, StreamError)
"""What a request may raise."""


class OpenAIServer:
    """`url` is the address, with or without /v1 or a method behind it. Timeouts are in seconds, the one of reading between two pieces."""

    def __init__(self, url: str, *, api_key: str | None = None, connect_timeout_s: float = 10.0, read_timeout_s: float = 600.0) -> None:
        self.base = base_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx.Timeout(read_timeout_s, connect=connect_timeout_s)

    def only_model(self) -> str:
        """The name of the model that it serves. Raises QuantkitError where it does not answer or serves several."""
        try:
            answer = httpx.get(f"{self.base}/models", headers=self._headers, timeout=self._timeout)
            answer.raise_for_status()
            names = [entry["id"] for entry in answer.json()["data"]]
        except (httpx.HTTPError, KeyError, ValueError, TypeError) as error:
            raise QuantkitError(
                f"{self.base}/models does not answer ({type(error).__name__}: {error})",
                "check the address and that an OpenAI-compatible server is up",
            ) from error
        if len(names) != 1:
            raise QuantkitError(f"{self.base} serves {len(names)} models: {', '.join(names)}", "say which one with --served-model")
        return str(names[0])

    def client(self, connections: int) -> httpx.AsyncClient:
        """What requests are sent with, at most `connections` at a time."""
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        return httpx.AsyncClient(headers=self._headers, timeout=self._timeout, limits=limits)

    async def stream(self, client: httpx.AsyncClient, method: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of the reply to `body`, as they come. method: such as "/chat/completions". Raises FAULTS."""
        async with client.stream("POST", self.base + method, json=body) as response:
            if response.is_error:
                await response.aread()
                response.raise_for_status()
            async for event in _events(response):
                if "error" in event:
                    raise StreamError(json.dumps(event["error"])[:500])
                yield event


def base_url(url: str) -> str:
    """The address up to and including /v1."""
    url = url.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/models"):
        url = url.removesuffix(ending)
    return url if url.endswith(("/v1", "/v2", "/v3")) else f"{url}/v1"


def fault(error: Exception) -> str:
    """In words, with what the server said."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}: {_message(error.response)}"
    return f"{type(error).__name__}: {error}"


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, read to its end so that its connection serves the next request.

    A plain JSON body (a server that ignores `stream`) is one event.
    """
    if "event-stream" not in response.headers.get("content-type", ""):
        await response.aread()
        yield _parsed(response.text, "the answer")
        return
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data and data != "[DONE]":
            yield _parsed(data, "an event")


def _parsed(text: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StreamError(f"{what} is not JSON: {text[:200]!r}") from error
    if not isinstance(value, dict):
        raise StreamError(f"{what} is not a JSON object: {text[:200]!r}")
    return value


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message") if isinstance(error, dict) else error
    except ValueError:
        text = response.text
    return " ".join(str(text).split())[:300]
