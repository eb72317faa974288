"""HTTP messages: JSON responses, server-sent events, and one log line for each request.
Cancellation of work whose client disconnects.

What stands in front of every server's application: who may ask at all, and unforeseen faults. A
server on loopback without a key answers any page that a browser on this machine shows, unless it
looks at the names that the browser sends: a page may resolve its own name to 127.0.0.1, and is then
of the same origin.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantkit.common.bind import is_loopback
from quantkit.common.result import JsonObject
from quantkit.executor.server.service import (
    LONGEST_MESSAGE,
    AnswerStream,
    EngineFault,
    RequestFault,
    log_fault,
)


async def until_disconnect(work: Coroutine[Any, Any, Any], receive: Receive) -> Any:
    """The result of `work`. If the client disconnects first, `work` is cancelled and
    ClientDisconnect raised. The request body must have been read."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class WireJson(JSONResponse):
    """JSON that can always be sent: text that is no UTF-8, such as that of a strange file name,
    shows question marks."""

    def render(self, content: Any) -> bytes:
        return _json(content)


def error_body(status: int, message: str, code: str, param: str | None = None) -> JsonObject:
    """An error in OpenAI's shape."""
    kind = (
        "server_error"
        if status >= 500
        else "rate_limit_error"
        if status == 429
        else "invalid_request_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def internal_error(fault: Exception) -> JsonObject:
    return error_body(500, f"internal error: {type(fault).__name__}", "internal_error")


class EventStream(Response):
    """Server-sent events. Ends, and closes `stream`, when the events do or the client goes. Where
    they are cut, the last says why.

    named: whether events carry their `type` as a name and none says [DONE], as those of
    /v1/responses.
    """

    def __init__(
        self, events: AsyncIterator[JsonObject], stream: AnswerStream, *, named: bool = False
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._events, self._stream, self._named = events, stream, named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(self._send(send), receive)
        except ClientDisconnect:
            return  # the client is gone
        except asyncio.CancelledError:
            await self._end(send, error_body(503, "the server is stopping", "engine_fault"))
        finally:
            self._stream.close()

    async def _send(self, send: Callable[[Message], Awaitable[None]]) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async for event in self._events:
                await send(_event(_json(event), event["type"] if self._named else None))
        except RequestFault as fault:
            return await self._end(send, error_body(fault.status, str(fault), "request_fault"))
        except EngineFault as fault:
            return await self._end(send, error_body(500, str(fault), "engine_fault"))
        except Exception as fault:
            log_fault("a stream", fault)
            return await self._end(send, internal_error(fault))
        await self._end(send)

    async def _end(
        self, send: Callable[[Message], Awaitable[None]], error: JsonObject | None = None
    ) -> None:
        if error is not None:
            body = {"type": "error", **error["error"]} if self._named else error
            await send(_event(_json(body), "error" if self._named else None))
        if not self._named:
            await send(_event(b"[DONE]"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: bytes, name: str | None = None) -> Message:
    body = (b"" if name is None else f"event: {name}\n".encode()) + b"data: " + data + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": True}


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        errors="replace"
    )


_NOTE = "quantkit.note"
_LONGEST = 200
"""Characters of a path that are shown."""


@dataclass
class RequestNote:
    """What is known of a request besides its status: the id of its answer, and who makes it."""

    id: str = "-"
    stream: AnswerStream | None = None

    def tokens(self) -> str:
        sequences = self.stream.sequences if self.stream is not None else []
        return (
            f"{sum(one.prompt_len for one in sequences)} in "
            f"{sum(len(one.generated) for one in sequences)} out"
        )


def note_of(scope: Scope) -> RequestNote:
    """Where a handler notes what the line says; unused where nothing is logged."""
    found: Any = scope.setdefault(_NOTE, RequestNote())
    assert isinstance(found, RequestNote)
    return found


class RequestLog:
    """The application, with a line a request: id, method, path, status, tokens, seconds. log:
    takes a line."""

    def __init__(self, app: ASGIApp, log: Callable[[str], None]) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, status, note = time.perf_counter(), ["-"], note_of(scope)

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            seconds = time.perf_counter() - started
            path = str(scope["path"])[:_LONGEST]
            self._log(
                f"{note.id} {scope['method']} {path} {status[0]} {note.tokens()} {seconds:.3f} s"
            )


class LoopbackOnly:
    """The application for requests that are addressed to this machine by name, from no page of
    another. refusal: the answer to others."""

    def __init__(self, app: ASGIApp, refusal: Callable[[], Response]) -> None:
        self._app, self._refusal = app, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_local(Headers(scope=scope)):
            return await self._refusal()(scope, receive, send)
        await self._app(scope, receive, send)


def is_local(headers: Headers) -> bool:
    """Whether Host is a loopback name and Origin, if any, a page of such a name."""
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    return (
        len(hosts) == 1
        and _is_local(_HOST, hosts[0])
        and all(_is_local(_ORIGIN, one) for one in origins)
    )


_HOST = re.compile(r"(\[[\da-f:.]+\]|[^\[\]:/@]+)(:\d*)?", re.ASCII | re.IGNORECASE)
_ORIGIN = re.compile(f"https?://{_HOST.pattern}", _HOST.flags)


def _is_local(form: re.Pattern[str], text: str) -> bool:
    found = form.fullmatch(text)
    return found is not None and is_loopback(found[1])


class Faults:
    """The application, whose unforeseen faults are one line of the log instead of a traceback. They
    are answered by `answer`, if no answer began."""

    def __init__(self, app: ASGIApp, answer: Callable[[Exception], Response]) -> None:
        self._app, self._answer = app, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as fault:
            if scope["type"] != "http":
                raise
            log_fault(f"{scope['method']} {scope['path'][:LONGEST_MESSAGE]}", fault)
            if not began:
                await self._answer(fault)(scope, receive, send)
