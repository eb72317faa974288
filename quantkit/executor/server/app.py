"""The HTTP side: routes, the API key, limits, and errors in OpenAI's shape.

    POST /v1/chat/completions, /v1/completions    GET /v1/models    GET /health    GET /metrics

Bodies are read and checked here rather than by FastAPI, so that a key is asked for before a body is read, a body has a largest size,
and every refusal has one shape: {"error": {"message", "type", "code"}}.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response

from quantkit.errors import QuantkitError
from quantkit.executor.sampling import SamplingParams
from quantkit.executor.server.answers import Answer, EventStream, until_disconnect
from quantkit.executor.server.metrics import exposition
from quantkit.executor.server.protocol import ChatRequest, CompletionRequest, chat_messages, sampling_params
from quantkit.executor.server.service import EngineFault, QueueFull, Service

Body = TypeVar("Body", ChatRequest, CompletionRequest)


@dataclass(frozen=True)
class Limits:
    """max_input: prompt tokens; max_output: tokens of one answer (None: what the context leaves); max_body: bytes of a request."""

    max_input: int | None = None
    max_output: int | None = None
    max_body: int = 32 << 20


class ApiError(Exception):
    def __init__(self, status: int, message: str, code: str) -> None:
        self.status, self.code = status, code
        super().__init__(message)


class Api:
    """The handlers. model_name: what /v1/models lists; defaults: sampling defaults from generation_config.json."""

    def __init__(self, service: Service, model_name: str, *, api_key: str | None, limits: Limits) -> None:
        self.service, self.model_name, self.limits = service, model_name, limits
        self.engine, self.tokenizer = service.engine, service.engine.tokenizer
        self._api_key = api_key
        self.started = int(time.time())

    async def chat(self, request: Request) -> Response:
        body = await self._read(request, ChatRequest)
        messages = chat_messages(body.messages)
        text = await asyncio.to_thread(self.tokenizer.render, messages, **body.chat_template_kwargs)
        prompt = await asyncio.to_thread(self.tokenizer.encode_rendered, text)
        return await self._answer(request, body, [prompt], inside=self.tokenizer.opens_think(text))

    async def completions(self, request: Request) -> Response:
        body = await self._read(request, CompletionRequest)
        prompts = await asyncio.to_thread(body.prompts, self.tokenizer)
        return await self._answer(request, body, prompts, inside=False)

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        entry = {"id": self.model_name, "object": "model", "created": self.started, "owned_by": "quantkit"}
        return JSONResponse({"object": "list", "data": [{**entry, "max_model_len": self.engine.max_model_len}]})

    async def health(self) -> Response:
        if self.service.fault is not None:
            return JSONResponse({"status": "failed", "reason": str(self.service.fault)}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        return PlainTextResponse(exposition(self.service.metrics()), media_type="text/plain; version=0.0.4")

    async def _answer(self, request: Request, body: ChatRequest | CompletionRequest, prompts: list[list[int]], inside: bool) -> Response:
        choices = [(prompt, self._params(body, prompt, choice)) for prompt in prompts for choice in range(body.n)]
        stream = self.service.submit(choices)
        answer = Answer(body, self.tokenizer, self.model_name, num_prompts=len(prompts), inside=inside)
        if body.stream:
            return EventStream(answer.events(stream), stream)
        try:
            return JSONResponse(await until_disconnect(answer.whole(stream), request.receive))
        finally:
            stream.close()

    def _params(self, body: ChatRequest | CompletionRequest, prompt: list[int], choice: int) -> SamplingParams:
        """Checked against the limits; choices of one prompt draw from seeds that follow each other."""
        context, limits = self.engine.max_model_len, self.limits
        allowed = min(limits.max_input or context, context - 1)
        if len(prompt) > allowed:
            raise ApiError(400, f"the prompt has {len(prompt)} tokens, at most {allowed} are accepted", "context_length_exceeded")
        room = context - len(prompt)
        if body.limit is not None and body.limit > room:
            said = f"the prompt has {len(prompt)} tokens and max_tokens is {body.limit}; the context holds {context}"
            raise ApiError(400, said, "context_length_exceeded")
        if limits.max_output is not None and (body.limit or 0) > limits.max_output:
            raise ApiError(400, f"max_tokens is {body.limit}, at most {limits.max_output} are accepted", "max_tokens_exceeded")
        if body.seed is not None and choice:
            body = body.model_copy(update={"seed": body.seed + choice})
        return sampling_params(body, self.tokenizer.sampling_defaults, min(room, limits.max_output or room))

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        self._check_key(request)
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > self.limits.max_body:
                raise ApiError(413, f"the request is larger than {self.limits.max_body} bytes", "request_too_large")
        try:
            body = kind.model_validate_json(bytes(raw))
        except ValidationError as fault:
            first = fault.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ApiError(400, f"{place}: {first['msg']}" if place else first["msg"], "invalid_request") from fault
        if body.model not in (None, self.model_name):
            raise ApiError(404, f"model {body.model!r} is not served here, {self.model_name!r} is", "model_not_found")
        body.check()
        return body

    def _check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise ApiError(401, "the API key is missing or wrong", "invalid_api_key")


def create_app(service: Service, model_name: str, *, api_key: str | None = None, limits: Limits | None = None) -> FastAPI:
    """The application; its lifespan starts and stops the engine's thread."""
    api = Api(service, model_name, api_key=api_key, limits=limits or Limits())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await asyncio.to_thread(service.stop)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", api.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", api.models, methods=["GET"], response_model=None)
    app.add_api_route("/health", api.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", api.metrics, methods=["GET"], response_model=None)

    def refuse(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> Response:
        service.refused.add(1, str(status))
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        content: dict[str, Any] = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        return JSONResponse(content, status_code=status, headers=headers)

    async def on_error(request: Request, fault: Exception) -> Response:
        match fault:
            case ApiError():
                return refuse(fault.status, str(fault), fault.code)
            case QuantkitError():
                return refuse(400, str(fault), "invalid_request")
            case QueueFull():
                return refuse(429, str(fault), "queue_full", {"Retry-After": "1"})
            case EngineFault():
                return refuse(503, str(fault), "engine_fault")
            case HTTPException():
                return refuse(fault.status_code, str(fault.detail), "http_error")
            case _:
                return refuse(499, "the client closed the request", "client_closed")

    for kind in (ApiError, QuantkitError, QueueFull, EngineFault, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, on_error)
    return app
