"""The playground's page and its one request, for a browser on this machine.

    GET /, /page.css, /page.js, /models        POST /play: a question -> JSON lines, as they come

The page loads nothing from elsewhere and runs no script but its own (its Content-Security-Policy
says so); what models write reaches it as text. Requests for another host's name, or from another
site's page, are refused: a site must not talk to what listens on loopback.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import JSONResponse, Response, StreamingResponse

from quantkit.common.errors import QuantkitError
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
_NAMES = ("127.0.0.1", "localhost", "[::1]")


class Question(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(min_length=1, max_length=200_000)
    raw: bool = False
    max_new_tokens: int = Field(256, ge=1, le=MAX_NEW_TOKENS)


def create_app(playground: Playground) -> FastAPI:
    """One question at a time is answered; who comes meanwhile waits."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    worker = ThreadPoolExecutor(1, "quantkit-playground")

    @app.middleware("http")
    async def guarded(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        response = (
            await call_next(request)
            if _is_ours(request)
            else _refused(403, "this address is for the playground's own page")
        )
        response.headers.update(_HEADERS)
        return response

    def add_file(path: str, name: str, kind: str) -> None:
        text = resources.files("quantkit.playground").joinpath("page", name).read_text()

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
            return _refused(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        except ValueError as fault:
            return _refused(400, str(fault))
        return StreamingResponse(
            _lines(playground, worker, question), media_type="application/x-ndjson"
        )

    app.add_api_route("/models", models, methods=["GET"], response_model=None)
    app.add_api_route("/play", play, methods=["POST"], response_model=None)
    return app


def _is_ours(request: Request) -> bool:
    """Whether a request is for this machine's own name, and from no other site's page."""
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    return host.rpartition(":")[0] in _NAMES and origin in (None, f"http://{host}")


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
    """What the playground tells, as it comes; where the reader goes, it stops."""
    loop, told, gone = (
        asyncio.get_running_loop(),
        asyncio.Queue[dict[str, Any] | None](),
        threading.Event(),
    )

    def tell(event: dict[str, Any] | None) -> None:
        loop.call_soon_threadsafe(told.put_nowait, event)

    def work() -> None:
        try:
            if not gone.is_set():
                most = question.max_new_tokens
                playground.play(
                    question.prompt,
                    raw=question.raw,
                    max_new_tokens=most,
                    tell=tell,
                    stopped=gone.is_set,
                )
        except QuantkitError as fault:
            tell({"kind": "error", "message": str(fault)})
        except Exception as fault:  # whoever waits must hear of it
            tell({"kind": "error", "message": f"{type(fault).__name__}: {str(fault)[:300]}"})
            raise
        finally:
            tell(None)

    worker.submit(work)
    try:
        while (event := await told.get()) is not None:
            yield json.dumps(event, ensure_ascii=False).encode(errors="replace") + b"\n"
    finally:
        gone.set()


def _refused(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status_code=status)
