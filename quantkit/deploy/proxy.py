"""Proxy for disaggregated prefill and decode servers: a request goes to a prefill server, then to a
decode server.

The protocol is that of vLLM's connectors NIXL and Mooncake. The prefill server computes one token
with `do_remote_decode` and answers `kv_transfer_params`; the decode server gets the whole request
with these, fetches the cache from the first, and answers the client. Source: vllm-project/vllm,
tests/v1/kv_connector/nixl_integration/toy_proxy_server.py. Servers of a role are used in turn. An
unreachable one is skipped, and one that stops while it answers ends the answer with an error that
names it. Requests of clients that disconnect are cancelled.

A transferred cache belongs to one prompt, is freed after it was read, and has no log-probabilities
of the prompt. So a request with several prompts or completions, or for prompt log-probabilities,
goes to a decode server only, which computes the prompt itself.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from math import inf
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quantkit.common.disconnect import until_disconnect
from quantkit.deploy.relay import Answer, ask

REMOTE = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
DECODE_FIELDS = (
    "stream_options",
    "min_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "n",
    "best_of",
)
LARGEST_BODY = 64 << 20
"""Limit of a request in bytes: it may contain images, and a million token ids are 8 MB."""
BODY_SECONDS = 120.0
"""Seconds within which the request body must be complete."""
STATUS_SECONDS = 5.0
"""Seconds that a server may take to answer /health or /v1/models."""
RETRY_SECONDS = 10.0
"""Seconds for which an unreachable server is tried after the others: if packets are dropped, every
attempt takes until the timeout."""


class NoServer(Exception):
    """No server of a role could be reached, or the last one stopped: the text is for the client."""


class RoleServers:
    """Servers of one role, used in turn."""

    def __init__(self, name: str, urls: Sequence[str]) -> None:
        self.name, self.urls = name, [url.rstrip("/") for url in urls]
        self._starts = cycle(range(len(self.urls)))
        self._lost: dict[str, float] = {}

    def in_turn(self) -> list[str]:
        start, now = next(self._starts), time.monotonic()
        turn = self.urls[start:] + self.urls[:start]
        return sorted(turn, key=lambda url: now - self._lost.get(url, -inf) < RETRY_SECONDS)

    async def ask(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        """The answer, its body not read yet, of the first server that accepts the request.

        Raises NoServer if none does. A server that has begun is not retried, because its cache and
        answer are lost.
        """
        problems, content = [], json.dumps(body).encode()
        for url in self.in_turn():
            try:
                answer = await ask(
                    "POST", url + path, headers | {"Content-Type": "application/json"}, content
                )
            except OSError as problem:
                self._lost[url] = time.monotonic()
                problems.append(f"{url}: {problem or type(problem).__name__}")
            else:
                self._lost.pop(url, None)
                return answer
        raise NoServer(f"no {self.name} server answers ({'; '.join(problems)})")

    async def look(self, path: str, headers: dict[str, str]) -> dict[str, Response | str]:
        """The response of each server at `path`, or why there is none. Does not advance the
        turn."""

        async def one(url: str) -> Response | str:
            try:
                async with asyncio.timeout(STATUS_SECONDS):
                    answer = await ask("GET", url + path, headers)
                    return Response(
                        await _whole(answer), answer.status, media_type=answer.content_type
                    )
            except TimeoutError:
                return f"no answer within {STATUS_SECONDS:g} s"
            except OSError as problem:
                return str(problem) or type(problem).__name__

        return dict(zip(self.urls, await asyncio.gather(*map(one, self.urls))))


class ForwardedResponse(Response):
    """A server's answer, whose body is streamed on as it arrives. If the server stops, an event of
    a stream says so and the connection is closed; if the client disconnects, the server's
    connection is closed."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(status_code=answer.status, media_type=answer.content_type)
        del self.headers["content-length"]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):  # the client is gone
                await until_disconnect(self._send(send), receive)
        finally:
            self._answer.close()

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async for piece in self._answer.pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except OSError as problem:
            if (self._answer.content_type or "").startswith("text/event-stream"):
                event = (
                    b"data: "
                    + json.dumps(_error_body(503, _stopped(self._answer, problem))).encode()
                    + b"\n\n"
                )
                await send({"type": "http.response.body", "body": event, "more_body": True})
            return  # without the end of the body the connection is closed
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def prefill_request(body: dict[str, Any]) -> dict[str, Any]:
    """The request for the prefill server: one token, and to keep the cache for a decode server."""
    fields = {key: value for key, value in body.items() if key not in DECODE_FIELDS}
    return fields | {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE}


def is_decode_only(body: dict[str, Any]) -> bool:
    """Whether a single transferred cache is not enough for the answer.

    In vLLM 0.22.1: only the location of the first prompt's cache is returned
    (entrypoints/openai/completion/serving.py); a cache is read for every completion, and freed
    after the first (kv_connector/v1/nixl/worker.py); log-probabilities are returned only for prompt
    tokens that the server computes itself.
    """
    prompt = body.get("prompt")
    many_prompts = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    many_completions = any(body.get(name) not in (None, 1) for name in ("n", "best_of"))
    prompt_logprobs = body.get("prompt_logprobs") is not None or bool(body.get("echo"))
    return many_prompts or many_completions or prompt_logprobs or bool(body.get("use_beam_search"))


def proxy(prefill: Sequence[str], decode: Sequence[str]) -> Starlette:
    """prefill, decode: addresses of servers, such as http://10.0.0.1:8100."""
    first, second = RoleServers("prefill", prefill), RoleServers("decode", decode)

    async def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
        if is_decode_only(body):
            request_body = {
                key: value for key, value in body.items() if key != "kv_transfer_params"
            }  # clients must not name a cache
            return ForwardedResponse(await second.ask(path, request_body, headers))
        prefilled = await first.ask(path, prefill_request(body), headers)
        try:
            content = await _whole(prefilled)
        except OSError as problem:
            raise NoServer(_stopped(prefilled, problem)) from problem
        if prefilled.status != 200:
            return Response(content, prefilled.status, media_type=prefilled.content_type)
        problems = _read_object(content)
        if problems is None:
            return _error(
                502, (f"{prefilled.url} does not answer with a JSON object, as servers of vLLM do")
            )
        return ForwardedResponse(
            await second.ask(
                path, body | {"kv_transfer_params": problems.get("kv_transfer_params")}, headers
            )
        )

    async def generate(request: Request) -> Response:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                raw = await _body(request)
        except TimeoutError:
            return _error(408, f"the request was not complete after {BODY_SECONDS:g} s")
        if raw is None:
            return _error(413, f"the request is larger than {LARGEST_BODY} bytes")
        body = _read_object(raw)
        if body is None:
            return _error(400, "the body of the request is not a JSON object")
        try:
            found: Response = await until_disconnect(
                answer(request.url.path, body, _headers(request)), request.receive
            )
            return found
        except NoServer as problem:
            return _error(503, str(problem))
        except ValueError as problem:
            return _error(400, f"a header of the request cannot be forwarded: {problem}")

    async def models(request: Request) -> Response:
        responses = await second.look("/v1/models", _headers(request))
        many_completions = [found for found in responses.values() if isinstance(found, Response)]
        return (
            min(many_completions, key=lambda found: found.status_code)
            if many_completions
            else _error(503, f"no decode server answers ({_format_problems(responses)})")
        )

    async def health(request: Request) -> Response:
        """200 if a server of each role is healthy; the body has every server's status, or the
        reason for none."""
        roles = await asyncio.gather(*(role.look("/health", {}) for role in (first, second)))
        statuses = [
            {
                url: found.status_code if isinstance(found, Response) else found
                for url, found in responses.items()
            }
            for responses in roles
        ]
        serves = all(200 in responses.values() for responses in statuses)
        return JSONResponse(
            {first.name: statuses[0], second.name: statuses[1]}, 200 if serves else 503
        )

    async def refuse(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        return _error(
            fault.status_code,
            f"{fault.detail}: {request.method} {request.url.path[:200]}",
            fault.headers,
        )

    async def client_closed(request: Request, fault: Exception) -> Response:
        return _error(499, "the client closed the request")

    paths = ("/v1/completions", "/v1/chat/completions")
    routes = [
        *(Route(path, generate, methods=["POST"]) for path in paths),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: refuse, ClientDisconnect: client_closed}
    )
    app.router.redirect_slashes = False
    return app


async def _body(request: Request) -> bytes | None:
    """None if it is larger than LARGEST_BODY."""
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > LARGEST_BODY:
            return None
    return bytes(raw)


def _read_object(raw: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


async def _whole(answer: Answer) -> bytes:
    try:
        return await answer.whole()
    finally:
        answer.close()


def _headers(request: Request) -> dict[str, str]:
    """The client's API key, and one request id for both servers."""
    fields = {"X-Request-Id": request.headers.get("x-request-id", uuid4().hex)}
    return fields | (
        {"Authorization": request.headers["authorization"]}
        if "authorization" in request.headers
        else {}
    )


def _stopped(answer: Answer, problem: OSError) -> str:
    return f"{answer.url} stopped while it answered ({problem or type(problem).__name__})"


def _format_problems(responses: dict[str, Response | str]) -> str:
    return "; ".join(f"{url}: {why}" for url, why in responses.items())


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": status}}


def _error(status: int, message: str, headers: Any = None) -> Response:
    return JSONResponse(_error_body(status, message), status, headers)
