"""The HTTP side: routes, the API key, and errors in OpenAI's shape.

    POST /v1/chat/completions, /v1/completions    GET /v1/models    GET /health    GET /metrics

Bodies are read and checked here rather than by FastAPI, so that a key is asked for before a body is read, a body has a largest size and
a type, and every refusal has one shape: {"error": {"message", "type", "param", "code"}}.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

from quantkit.errors import QuantkitError
from quantkit.executor.server.answers import Answer, EventStream, WireJson, error_body, until_disconnect
from quantkit.executor.server.intake import ApiError, Intake, Lanes, Limits, Prepared
from quantkit.executor.server.metrics import exposition
from quantkit.executor.server.service import EngineFault, QueueFull, RequestFault, Service


class Api:
    """The handlers. model_name: what /v1/models lists."""

    def __init__(self, service: Service, model_name: str, *, api_key: str | None, limits: Limits) -> None:
        self.service, self.model_name, self.limits = service, model_name, limits
        self.engine, self.tokenizer = service.engine, service.engine.tokenizer
        context = self.engine.max_model_len
        self.intake = Intake(self.tokenizer, model_name, limits, context=context, max_choices=service.limit)
        self.lanes = Lanes(service.limit)
        self._api_key = api_key
        self.started = int(time.time())

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, self.intake.chat)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, self.intake.completions)

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        entry = {"id": self.model_name, "object": "model", "created": self.started, "owned_by": "quantkit"}
        return WireJson({"object": "list", "data": [{**entry, "max_model_len": self.engine.max_model_len}]})

    async def health(self) -> Response:
        if self.service.fault is not None:
            return WireJson({"status": "failed", "reason": str(self.service.fault)}, status_code=503)
        return WireJson({"status": "ok"})

    async def metrics(self) -> Response:
        return PlainTextResponse(exposition(self.service.metrics()), media_type="text/plain; version=0.0.4")

    async def _answer(self, request: Request, prepare: Callable[[bytes], Prepared]) -> Response:
        raw = await self._read(request)
        try:
            prepared = await until_disconnect(self.lanes.run(len(raw), lambda: prepare(raw)), request.receive)
            return await self._answered(request, prepared)
        except asyncio.CancelledError as cut:
            raise EngineFault("the server is stopping") from cut

    async def _answered(self, request: Request, prepared: Prepared) -> Response:
        stream = self.service.submit(prepared.choices)
        body = prepared.body
        answer = Answer(body, self.tokenizer, self.model_name, num_prompts=prepared.num_prompts, inside=prepared.inside)
        if body.stream:
            return EventStream(answer.events(stream), stream)
        try:
            return WireJson(await until_disconnect(answer.whole(stream), request.receive))
        finally:
            stream.close()

    async def _read(self, request: Request) -> bytes:
        self._check_key(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" or request.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "the request is not sent as Content-Type: application/json", "unsupported_media_type")
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > self.limits.max_body:
                raise ApiError(413, f"the request is larger than {self.limits.max_body} bytes", "request_too_large")
        return bytes(raw)

    def _check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        given = request.headers.getlist("authorization")
        if len(given) != 1 or not hmac.compare_digest(given[0].removeprefix("Bearer ").encode(), self._api_key.encode()):
            raise ApiError(401, "the API key is missing or wrong", "invalid_api_key")


def create_app(service: Service, model_name: str, *, api_key: str | None = None, limits: Limits | None = None) -> FastAPI:
    """The application; its lifespan starts and stops the engine's thread."""
    api = Api(service, model_name, api_key=api_key, limits=limits or Limits())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        api.lanes.close()
        await asyncio.to_thread(service.stop)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", api.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", api.models, methods=["GET"], response_model=None)
    app.add_api_route("/health", api.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", api.metrics, methods=["GET"], response_model=None)

    def refuse(status: int, message: str, code: str, param: str | None = None, headers: Mapping[str, str] | None = None) -> Response:
        service.refused.add(1, str(status))
        return WireJson(error_body(status, message, code, param), status_code=status, headers=headers)

    async def on_error(request: Request, fault: Exception) -> Response:
        match fault:
            case ApiError():
                return refuse(fault.status, str(fault), fault.code, fault.param)
            case QuantkitError():
                return refuse(400, str(fault), "invalid_request")
            case QueueFull():
                return refuse(429, str(fault), "queue_full", headers={"Retry-After": "1"})
            case RequestFault():
                return refuse(500, str(fault), "request_fault")
            case EngineFault():
                return refuse(503, str(fault), "engine_fault")
            case HTTPException():
                return refuse(fault.status_code, str(fault.detail), "http_error", headers=fault.headers)
            case ClientDisconnect():
                return refuse(499, "the client closed the request", "client_closed")
            case _:
                return refuse(500, f"internal error: {type(fault).__name__}", "internal_error")

    for kind in (ApiError, QuantkitError, QueueFull, RequestFault, EngineFault, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)
    return app
