"""The playground's page, its API and server, for a browser on this machine.

    GET /, /page.css, /page.js, /models        POST /play: a question -> JSON lines, streamed

The page loads nothing from other hosts and runs only its own script (see its
Content-Security-Policy); text of models is inserted as text. Requests with another Host name or
Origin are rejected (executor/server/asgi.py).
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from socket import socket

import uvicorn
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantkit.common.errors import QuantkitError
from quantkit.common.pages import style_sheet
from quantkit.common.result import JsonObject
from quantkit.executor.server.asgi import Faults, LoopbackOnly
from quantkit.executor.server.serve import HttpServer
from quantkit.playground.play import MAX_NEW_TOKENS, Playground

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_MAX_BODY = 1 << 20


class Question(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(min_length=1, max_length=200_000)
    raw: bool = False
    max_new_tokens: int = Field(256, ge=1, le=MAX_NEW_TOKENS)


def create_app(playground: Playground) -> FastAPI:
    """The application; it answers one question at a time, and later ones wait."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    worker = ThreadPoolExecutor(1, "quantkit-playground")

    def not_local() -> Response:
        return _error(403, "this address is for the playground's own page")

    def unforeseen(fault: Exception) -> Response:
        return _error(500, f"internal error: {type(fault).__name__}")

    app.add_middleware(Faults, answer=unforeseen)
    app.add_middleware(LoopbackOnly, refusal=not_local)
    app.add_middleware(_PageHeaders)

    def add_file(path: str, name: str, kind: str) -> None:
        text = resources.files("quantkit.playground").joinpath("page", name).read_text()
        if name.endswith(".css"):
            text = style_sheet() + text

        async def answer() -> Response:
            return Response(text, media_type=kind)

        app.add_api_route(path, answer, methods=["GET"], response_model=None)

    for path, (name, kind) in _FILES.items():
        add_file(path, name, kind)

    async def models() -> Response:
        return JSONResponse(
            {"models": [one.name for one in playground.models], "chat": playground.has_template}
        )

    async def play(request: Request) -> Response:
        try:
            question = Question.model_validate_json(await _body(request))
        except ValidationError as fault:
            first = fault.errors(include_url=False, include_context=False, include_input=False)[0]
            return _error(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        except ValueError as fault:
            return _error(400, str(fault))
        return StreamingResponse(
            _lines(playground, worker, question), media_type="application/x-ndjson"
        )

    app.add_api_route("/models", models, methods=["GET"], response_model=None)
    app.add_api_route("/play", play, methods=["POST"], response_model=None)
    return app


class _PageHeaders:
    """The application, whose every answer has the headers of the page."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)


async def _body(request: Request) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ValueError("the request is not sent as Content-Type: application/json")
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > _MAX_BODY:
            raise ValueError(f"the request is larger than {_MAX_BODY} bytes")
    return bytes(raw)


async def _lines(
    playground: Playground, worker: ThreadPoolExecutor, question: Question
) -> AsyncIterator[bytes]:
    """The playground's events as JSON lines; it stops if the client disconnects."""
    loop, events, disconnected = (
        asyncio.get_running_loop(),
        asyncio.Queue[JsonObject | None](),
        threading.Event(),
    )

    def send(event: JsonObject | None) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    def work() -> None:
        try:
            if not disconnected.is_set():
                max_new_tokens = question.max_new_tokens
                playground.play(
                    question.prompt,
                    raw=question.raw,
                    max_new_tokens=max_new_tokens,
                    send=send,
                    stopped=disconnected.is_set,
                )
        except QuantkitError as fault:
            send({"kind": "error", "message": str(fault)})
        except Exception as fault:  # the client must be notified
            send({"kind": "error", "message": f"{type(fault).__name__}: {str(fault)[:300]}"})
            raise
        finally:
            send(None)

    worker.submit(work)
    try:
        while (event := await events.get()) is not None:
            yield json.dumps(event, ensure_ascii=False).encode(errors="replace") + b"\n"
    finally:
        disconnected.set()


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status_code=status)


HOST = "127.0.0.1"


def serve(playground: Playground, port: int, sockets: Sequence[socket]) -> None:
    """Serve until interrupted. sockets: from `bind`, at HOST and `port`. Raises QuantkitError if
    the address is in use."""
    config = uvicorn.Config(create_app(playground), log_level="warning", access_log=False)
    config.timeout_graceful_shutdown = 2
    HttpServer(config).run_at(HOST, port, sockets)
