"""In front of servers for prefill and servers for decode: a request goes to one of the first, then
to one of the second.

The protocol is that of vLLM's connectors NIXL and Mooncake. The first server computes one token
with `do_remote_decode` and answers `kv_transfer_params`; the second gets the whole request with
these, fetches the cache from the first, and answers the client. Source: vllm-project/vllm,
tests/v1/kv_connector/nixl_integration/toy_proxy_server.py. Servers of a role take turns. One that
cannot be reached is passed over, and one that stops while it answers ends the answer with an error
that names it. What a client that goes had asked is dropped.

A cache that is handed over is of one prompt, is given up once it was read, and holds no
log-probabilities of the prompt. So a request with several prompts, or answers, or that asks for
those goes to a server for decode alone, which computes the prompt itself.
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
NOT_OF_PREFILL = (
    "stream_options",
    "min_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "n",
    "best_of",
)
LARGEST_BODY = 64 << 20
"""Bytes of a request: images come in it, a million tokens as numbers are 8 MB."""
BODY_SECONDS = 120.0
"""Within which a request must be whole."""
SECONDS_TO_LOOK = 5.0
"""That a server may take to answer /health or /v1/models."""
LOST_SECONDS = 10.0
"""For which a server that could not be reached is asked after the others: where packets get lost,
reaching takes that long each time."""


class NoServer(Exception):
    """No server of a role could be reached, or the last one stopped: its text is for the client."""


class RoleServers:
    """Servers of one role, which take turns."""

    def __init__(self, name: str, urls: Sequence[str]) -> None:
        self.name, self.urls = name, [url.rstrip("/") for url in urls]
        self._starts = cycle(range(len(self.urls)))
        self._lost: dict[str, float] = {}

    def in_turn(self) -> list[str]:
        start, now = next(self._starts), time.monotonic()
        turn = self.urls[start:] + self.urls[:start]
        return sorted(turn, key=lambda url: now - self._lost.get(url, -inf) < LOST_SECONDS)

    async def ask(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        """The answer, its body not read yet, of the first server that takes the request.

        Raises NoServer where none does: a server that has begun is not asked again, for its cache
        and answer are lost.
        """
        said, content = [], json.dumps(body).encode()
        for url in self.in_turn():
            try:
                answer = await ask(
                    "POST", url + path, headers | {"Content-Type": "application/json"}, content
                )
            except OSError as problem:
                self._lost[url] = time.monotonic()
                said.append(f"{url}: {problem or type(problem).__name__}")
            else:
                self._lost.pop(url, None)
                return answer
        raise NoServer(f"no {self.name} server answers ({'; '.join(said)})")

    async def look(self, path: str, headers: dict[str, str]) -> dict[str, Response | str]:
        """What each server has at `path`, or why it says nothing. Takes nobody's turn."""

        async def one(url: str) -> Response | str:
            try:
                async with asyncio.timeout(SECONDS_TO_LOOK):
                    answer = await ask("GET", url + path, headers)
                    return Response(
                        await _whole(answer), answer.status, media_type=answer.content_type
                    )
            except TimeoutError:
                return f"no answer within {SECONDS_TO_LOOK:g} s"
            except OSError as problem:
                return str(problem) or type(problem).__name__

        return dict(zip(self.urls, await asyncio.gather(*map(one, self.urls))))


class PassedOn(Response):
    """A server's answer, whose body goes on as it comes. Where the server stops meanwhile, an event
    of a stream says so, and the connection is broken off; where the client goes, the server's
    is."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(status_code=answer.status, media_type=answer.content_type)
        del self.headers["content-length"]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):  # nobody is there to be told
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
            return  # without the end of the body: the connection is closed
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def prefill_request(body: dict[str, Any]) -> dict[str, Any]:
    """What the first server is asked: one token, and to keep the cache for another."""
    kept = {key: value for key, value in body.items() if key not in NOT_OF_PREFILL}
    return kept | {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE}


def is_for_decode_alone(body: dict[str, Any]) -> bool:
    """Whether one cache that is read once is not enough for the answer.

    Of vLLM 0.22.1: it tells where the cache of the first prompt lies
    (entrypoints/openai/completion/serving.py); it reads a cache for every answer, and frees it
    after the first (kv_connector/v1/nixl/worker.py); log-probabilities are of prompt tokens that it
    computes itself.
    """
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    answers = any(body.get(name) not in (None, 1) for name in ("n", "best_of"))
    of_the_prompt = body.get("prompt_logprobs") is not None or bool(body.get("echo"))
    return several or answers or of_the_prompt or bool(body.get("use_beam_search"))


def proxy(prefill: Sequence[str], decode: Sequence[str]) -> Starlette:
    """prefill, decode: addresses of servers, such as http://10.0.0.1:8100."""
    first, second = RoleServers("prefill", prefill), RoleServers("decode", decode)

    async def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
        if is_for_decode_alone(body):
            asked = {
                key: value for key, value in body.items() if key != "kv_transfer_params"
            }  # a cache is never the client's to name
            return PassedOn(await second.ask(path, asked, headers))
        begun = await first.ask(path, prefill_request(body), headers)
        try:
            told = await _whole(begun)
        except OSError as problem:
            raise NoServer(_stopped(begun, problem)) from problem
        if begun.status != 200:
            return Response(told, begun.status, media_type=begun.content_type)
        said = _read_object(told)
        if said is None:
            return _error(502, f"{begun.url} answers with no JSON object, as servers of vLLM do")
        return PassedOn(
            await second.ask(
                path, body | {"kv_transfer_params": said.get("kv_transfer_params")}, headers
            )
        )

    async def generate(request: Request) -> Response:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                raw = await _body(request)
        except TimeoutError:
            return _error(408, f"the request was not whole after {BODY_SECONDS:g} s")
        if raw is None:
            return _error(413, f"the request is larger than {LARGEST_BODY} bytes")
        body = _read_object(raw)
        if body is None:
            return _error(400, "the body of the request is no JSON object")
        try:
            found: Response = await until_disconnect(
                answer(request.url.path, body, _headers(request)), request.receive
            )
            return found
        except NoServer as problem:
            return _error(503, str(problem))
        except ValueError as problem:
            return _error(400, f"a header of the request cannot be passed on: {problem}")

    async def models(request: Request) -> Response:
        seen = await second.look("/v1/models", _headers(request))
        answers = [found for found in seen.values() if isinstance(found, Response)]
        return (
            min(answers, key=lambda found: found.status_code)
            if answers
            else _error(503, f"no decode server answers ({_told(seen)})")
        )

    async def health(request: Request) -> Response:
        """200 where of each role a server says so; the body tells every server's status, or why it
        has none."""
        roles = await asyncio.gather(*(role.look("/health", {}) for role in (first, second)))
        statuses = [
            {
                url: found.status_code if isinstance(found, Response) else found
                for url, found in seen.items()
            }
            for seen in roles
        ]
        serves = all(200 in seen.values() for seen in statuses)
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

    async def gone(request: Request, fault: Exception) -> Response:
        return _error(499, "the client closed the request")

    paths = ("/v1/completions", "/v1/chat/completions")
    routes = [
        *(Route(path, generate, methods=["POST"]) for path in paths),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    made = Starlette(
        routes=routes, exception_handlers={HTTPException: refuse, ClientDisconnect: gone}
    )
    made.router.redirect_slashes = False
    return made


async def _body(request: Request) -> bytes | None:
    """None for one larger than LARGEST_BODY."""
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
    """The client's key goes on, and both servers know the request by one name."""
    kept = {"X-Request-Id": request.headers.get("x-request-id", uuid4().hex)}
    return kept | (
        {"Authorization": request.headers["authorization"]}
        if "authorization" in request.headers
        else {}
    )


def _stopped(answer: Answer, problem: OSError) -> str:
    return f"{answer.url} stopped while it answered ({problem or type(problem).__name__})"


def _told(seen: dict[str, Response | str]) -> str:
    return "; ".join(f"{url}: {why}" for url, why in seen.items())


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": status}}


def _error(status: int, message: str, headers: Any = None) -> Response:
    return JSONResponse(_error_body(status, message), status, headers)
