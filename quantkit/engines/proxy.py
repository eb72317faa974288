"""In front of servers for prefill and servers for decode: a request goes to one of the first, then to one of the second.

The protocol is that of vLLM's connectors NIXL and Mooncake. The first server computes one token with `do_remote_decode` and answers
`kv_transfer_params`; the second gets the whole request with these, fetches the cache from the first, and answers the client. Source:
vllm-project/vllm, tests/v1/kv_connector/nixl_integration/toy_proxy_server.py. Servers of a role take turns. One that cannot be reached is
passed over, and one that stops while it answers ends the answer with an error that names it.
"""

import json
from collections.abc import AsyncIterator, Sequence
from itertools import cycle
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from quantkit.engines.relay import Answer, ask

REMOTE = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
NOT_OF_PREFILL = ("stream_options", "min_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "n", "best_of")


class NoServer(Exception):
    """No server of a role could be reached, or the last one stopped: its text is for the client."""


class RoleServers:
    """Servers of one role, which take turns."""

    def __init__(self, name: str, urls: Sequence[str]) -> None:
        self.name, self.urls = name, [url.rstrip("/") for url in urls]
        self._starts = cycle(range(len(self.urls)))

    def in_turn(self) -> list[str]:
        start = next(self._starts)
        return self.urls[start:] + self.urls[:start]

    async def ask(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        """The answer, its body not read yet, of the first server that takes the request.

        Raises NoServer where none does: a server that has begun is not asked again, for its cache and answer are lost.
        """
        said, content = [], json.dumps(body).encode()
        for url in self.in_turn():
            try:
                return await ask("POST", url + path, headers | {"Content-Type": "application/json"}, content)
            except OSError as problem:
                said.append(f"{url}: {problem or type(problem).__name__}")
        raise NoServer(f"no {self.name} server answers ({'; '.join(said)})")

    async def look(self, path: str, headers: dict[str, str]) -> Response:
        """What the first server that can be reached has at `path`, or status 503."""
        for url in self.in_turn():
            try:
                answer = await ask("GET", url + path, headers)
                return Response(await _whole(answer), answer.status, media_type=answer.content_type)
            except OSError:
                continue
        return _error(503, f"no {self.name} server answers")


def prefill_request(body: dict[str, Any]) -> dict[str, Any]:
    """What the first server is asked: one token, and to keep the cache for another."""
    kept = {key: value for key, value in body.items() if key not in NOT_OF_PREFILL}
    return kept | {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE}


def proxy(prefill: Sequence[str], decode: Sequence[str]) -> Starlette:
    """prefill, decode: addresses of servers, such as http://10.0.0.1:8100."""
    first, second = RoleServers("prefill", prefill), RoleServers("decode", decode)

    async def generate(request: Request) -> Response:
        headers = _headers(request)
        try:
            body = await request.json()
            begun = await first.ask(request.url.path, prefill_request(body), headers)
            told = await _whole(begun)
            if begun.status != 200:
                return Response(told, begun.status, media_type="application/json")
            body["kv_transfer_params"] = json.loads(told).get("kv_transfer_params")
            answer = await second.ask(request.url.path, body, headers)
        except (json.JSONDecodeError, TypeError, AttributeError):
            return _error(400, "the body of the request is no JSON object")
        except (NoServer, OSError) as problem:
            return _error(503, str(problem) or type(problem).__name__)
        return StreamingResponse(_passed(answer), answer.status, media_type=answer.content_type)

    async def models(request: Request) -> Response:
        return await second.look("/v1/models", _headers(request))

    async def health(request: Request) -> Response:
        for role in (first, second):
            answer = await role.look("/health", {})
            if answer.status_code != 200:
                return answer
        return Response()

    paths = ("/v1/completions", "/v1/chat/completions")
    routes = [Route(path, generate, methods=["POST"]) for path in paths]
    return Starlette(routes=[*routes, Route("/v1/models", models), Route("/health", health)])


async def _whole(answer: Answer) -> bytes:
    try:
        return await answer.whole()
    finally:
        answer.close()


async def _passed(answer: Answer) -> AsyncIterator[bytes]:
    """The body as it comes. Where the server stops meanwhile, an event of a stream says so, and the connection is broken off."""
    try:
        async for piece in answer.pieces():
            yield piece
    except OSError as problem:
        said = f"{answer.url} stopped while it answered ({problem or type(problem).__name__})"
        yield b"data: " + json.dumps({"error": {"message": said, "type": "server_error", "code": 503}}).encode() + b"\n\n"
        raise
    finally:
        answer.close()


def _headers(request: Request) -> dict[str, str]:
    """The client's key goes on, and both servers know the request by one name."""
    kept = {"X-Request-Id": request.headers.get("x-request-id", uuid4().hex)}
    return kept | ({"Authorization": request.headers["authorization"]} if "authorization" in request.headers else {})


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "server_error", "code": status}}, status)
