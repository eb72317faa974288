"""The HTTP side: routes, the API key, and errors in OpenAI's shape.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /tokenize, /detokenize
    GET /v1/models, /v1/models/NAME, /health, /version, /metrics

Bodies are read and checked here rather than by FastAPI, so that a key is asked for before a body is
read, a body has a largest size and a type, and every refusal has one shape: {"error": {"message",
"type", "param", "code"}}.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

from quantkit import __version__
from quantkit.common.errors import QuantkitError
from quantkit.executor.server.answers import ChatAnswer, CompletionAnswer
from quantkit.executor.server.asgi import (
    EventStream,
    Faults,
    LoopbackOnly,
    RequestLog,
    WireJson,
    error_body,
    internal_error,
    note_of,
    until_disconnect,
)
from quantkit.executor.server.intake import (
    ApiError,
    Intake,
    Lanes,
    Limits,
    Prepared,
    check_supported,
    parse,
    valid,
)
from quantkit.executor.server.protocol import ChatRequest
from quantkit.executor.server.responses import ResponseAnswer, ResponsesRequest
from quantkit.executor.server.service import (
    EngineFault,
    QueueFull,
    RequestFault,
    Service,
    exposition,
)
from quantkit.executor.server.tokenize import detokenize, tokenize

Answer = ChatAnswer | CompletionAnswer | ResponseAnswer
Result = TypeVar("Result")


class Api:
    """The handlers. model_name: what /v1/models lists. tool_parser: the format of tool calls, or
    auto."""

    def __init__(
        self,
        service: Service,
        model_name: str,
        *,
        api_key: str | None,
        limits: Limits,
        tool_parser: str,
    ) -> None:
        self.service, self.model_name, self.limits = service, model_name, limits
        self.engine, self.tokenizer = service.engine, service.engine.tokenizer
        context = self.engine.max_model_len
        self.intake = Intake(
            self.tokenizer,
            model_name,
            limits,
            context=context,
            max_choices=service.limit,
            tool_parser=tool_parser,
            grammars=self.engine.grammars,
        )
        self.lanes = Lanes(service.limit)
        self._held = 0
        self._api_key = api_key
        self.started = int(time.time())

    async def chat(self, request: Request) -> Response:
        prepared = await self._prepared(request, self.intake.chat)
        assert isinstance(prepared.body, ChatRequest)
        answer = ChatAnswer(prepared, prepared.body, self.tokenizer, self.model_name)
        return await self._answered(request, prepared, answer)

    async def completions(self, request: Request) -> Response:
        prepared = await self._prepared(request, self.intake.completions)
        assert not isinstance(prepared.body, ChatRequest)
        answer = CompletionAnswer(prepared, prepared.body, self.tokenizer, self.model_name)
        return await self._answered(request, prepared, answer)

    async def responses(self, request: Request) -> Response:
        def prepare(raw: bytes) -> tuple[ResponsesRequest, Prepared]:
            body = valid(parse(raw), ResponsesRequest)
            check_supported(body.unsupported)
            return body, self.intake.prepare_chat(self.intake.checked(body.as_chat(), ChatRequest))

        body, prepared = await self._prepared(request, prepare)
        return await self._answered(
            request, prepared, ResponseAnswer(prepared, body, self.tokenizer, self.model_name)
        )

    async def tokenize(self, request: Request) -> Response:
        return WireJson(await self._prepared(request, lambda raw: tokenize(self.intake, raw)))

    async def detokenize(self, request: Request) -> Response:
        return WireJson(await self._prepared(request, lambda raw: detokenize(self.intake, raw)))

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        return WireJson({"object": "list", "data": [self._model]})

    async def model(self, request: Request, name: str) -> Response:
        self._check_key(request)
        self.intake.check_model(name)
        return WireJson(self._model)

    @property
    def _model(self) -> dict[str, Any]:
        entry = {
            "id": self.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "quantkit",
        }
        return {**entry, "max_model_len": self.engine.max_model_len}

    async def version(self) -> Response:
        return WireJson({"version": __version__})

    async def health(self) -> Response:
        if self.service.fault is not None:
            return WireJson(
                {"status": "failed", "reason": str(self.service.fault)}, status_code=503
            )
        return WireJson({"status": "ok"})

    async def metrics(self) -> Response:
        return PlainTextResponse(
            exposition(self.service.metrics()), media_type="text/plain; version=0.0.4"
        )

    async def _prepared(self, request: Request, prepare: Callable[[bytes], Result]) -> Result:
        """What `prepare` makes of the body, on a thread of its own."""
        raw = bytearray()
        try:
            await self._read(request, raw)
            found: Result = await until_disconnect(
                self.lanes.run(len(raw), lambda: prepare(bytes(raw))), request.receive
            )
            return found
        except asyncio.CancelledError as cut:
            raise EngineFault("the server is stopping") from cut
        finally:
            self._held -= len(raw)

    async def _answered(self, request: Request, prepared: Prepared, answer: Answer) -> Response:
        stream = self.service.submit(prepared.choices)
        note = note_of(request.scope)
        note.id, note.stream = answer.id, stream
        if prepared.body.stream:
            return EventStream(
                answer.events(stream), stream, named=isinstance(answer, ResponseAnswer)
            )
        try:
            return WireJson(await until_disconnect(answer.whole(stream), request.receive))
        except asyncio.CancelledError as cut:
            raise EngineFault("the server is stopping") from cut
        finally:
            stream.close()

    async def _read(self, request: Request, raw: bytearray) -> None:
        """Add the body to `raw`. Raises ApiError, and QueueFull where the bodies of all requests
        together are too large."""
        self._check_key(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                415,
                "the request is not sent as Content-Type: application/json",
                "unsupported_media_type",
            )
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            raise ApiError(
                415,
                f"the request is sent as Content-Encoding: {encoding[:50]}; send it as it is",
                "unsupported_media_type",
            )
        try:
            async with asyncio.timeout(self.limits.body_s):
                async for part in request.stream():
                    raw += part
                    self._held += len(part)
                    if self._held > self.limits.max_bodies:
                        raise QueueFull(
                            f"the requests being read have more than {self.limits.max_bodies} bytes"
                        )
                    if len(raw) > self.limits.max_body:
                        raise ApiError(
                            413,
                            f"the request is larger than {self.limits.max_body} bytes",
                            "request_too_large",
                        )
        except TimeoutError as late:
            raise ApiError(
                408, f"the request was not whole after {self.limits.body_s:g} s", "request_timeout"
            ) from late

    def _check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        given = request.headers.getlist("authorization")
        if len(given) != 1 or not hmac.compare_digest(
            given[0].removeprefix("Bearer ").encode(), self._api_key.encode()
        ):
            raise ApiError(401, "the API key is missing or wrong", "invalid_api_key")


def create_app(
    service: Service,
    model_name: str,
    *,
    api_key: str | None = None,
    limits: Limits | None = None,
    tool_parser: str = "auto",
    log: Callable[[str], None] | None = None,
    local: bool = False,
) -> FastAPI:
    """The application; its lifespan starts and stops the engine's thread. log: takes a line for
    every request. local: it listens on loopback alone."""
    api = Api(
        service, model_name, api_key=api_key, limits=limits or Limits(), tool_parser=tool_parser
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        api.lanes.close()
        await asyncio.to_thread(service.stop)

    app = FastAPI(
        lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    for method, path, answer in (
        ("POST", "/v1/chat/completions", api.chat),
        ("POST", "/v1/completions", api.completions),
        ("POST", "/v1/responses", api.responses),
        ("POST", "/tokenize", api.tokenize),
        ("POST", "/detokenize", api.detokenize),
        ("GET", "/v1/models", api.models),
        ("GET", "/v1/models/{name:path}", api.model),
        ("GET", "/version", api.version),
        ("GET", "/health", api.health),
        ("GET", "/metrics", api.metrics),
    ):
        app.add_api_route(path, answer, methods=[method], response_model=None)

    async def on_error(request: Request, fault: Exception) -> Response:
        refusal = _refusal(request, fault)
        service.refused.add(1, str(refusal.status_code))
        return refusal

    for kind in _FAULTS:
        app.add_exception_handler(kind, on_error)

    def unforeseen(fault: Exception) -> Response:
        service.refused.add(1, "500")
        return WireJson(internal_error(fault), status_code=500)

    def not_local() -> Response:
        service.refused.add(1, "403")
        message = "without an API key this server answers localhost alone; start it with --api-key"
        return WireJson(error_body(403, message, "not_local"), status_code=403)

    app.add_middleware(Faults, answer=unforeseen)
    if local and api_key is None:
        app.add_middleware(LoopbackOnly, refusal=not_local)
    if log is not None:
        app.add_middleware(RequestLog, log=log)
    return app


_FAULTS = (
    ApiError,
    QuantkitError,
    QueueFull,
    RequestFault,
    EngineFault,
    HTTPException,
    ClientDisconnect,
)


def _refusal(request: Request, fault: Exception) -> Response:
    """What answers a fault of each kind, in OpenAI's shape."""
    said, param = str(fault), None
    headers: Mapping[str, str] | None = None
    match fault:
        case ApiError():
            status, code, param = fault.status, fault.code, fault.param
        case QuantkitError():
            status, code = 400, "invalid_request"
        case QueueFull():
            status, code, headers = 429, "queue_full", {"Retry-After": "1"}
        case RequestFault():
            status, code = fault.status, "request_fault"
        case EngineFault():
            status, code = 503, "engine_fault"
        case HTTPException():
            said = f"{fault.detail}: {request.method} {request.url.path[:200]}"
            status, code, headers = fault.status_code, "http_error", fault.headers
        case ClientDisconnect():
            status, code, said = 499, "client_closed", "the client closed the request"
        case _:
            raise fault
    return WireJson(error_body(status, said, code, param), status_code=status, headers=headers)
