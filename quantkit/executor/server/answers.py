"""What goes over the wire: a request's pieces as one JSON object, or as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from quantkit.executor.sequence import Completion, TokenLogprob
from quantkit.executor.server.protocol import ChatRequest, CompletionRequest, Envelope, chat_logprobs, completion_logprobs, usage
from quantkit.executor.server.reasoning import Parts, ReasoningSplitter, split_reasoning
from quantkit.executor.server.service import AnswerStream, EngineFault, Piece, RequestFault
from quantkit.tokenizer.chat import ChatTokenizer


class Answer:
    """The choices of one request, in the shape its kind asks for. `inside`: the prompt already opened <think>."""

    def __init__(
        self, request: ChatRequest | CompletionRequest, tokenizer: ChatTokenizer, model: str, *, num_prompts: int, inside: bool
    ) -> None:
        self.request, self.tokenizer, self.num_prompts, self.inside = request, tokenizer, num_prompts, inside
        self.chat = isinstance(request, ChatRequest)
        self.envelope = Envelope("chat.completion" if self.chat else "text_completion", model)
        self.separates = isinstance(request, ChatRequest) and request.separate_reasoning and tokenizer.end_think is not None
        self._splitters: dict[int, ReasoningSplitter] = {}

    async def whole(self, stream: AnswerStream) -> dict[str, Any]:
        done: dict[int, Completion] = {}
        async for piece in stream:
            if piece.completion is not None:
                done[piece.choice] = piece.completion
        completions = [done[choice] for choice in sorted(done)]
        return self.envelope.whole([self._choice(one) for one in completions], self._usage(completions))

    async def events(self, stream: AnswerStream) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed answer; with include_usage a last one without choices."""
        if self.chat:
            roles = [{"role": "assistant", "content": ""} for _ in stream.sequences]
            yield self.envelope.chunk([{"index": i, "delta": role, "finish_reason": None} for i, role in enumerate(roles)])
        done: list[Completion] = []
        async for piece in stream:
            if piece.completion is not None:
                done.append(piece.completion)
            choice = self._delta(piece)
            if choice is not None:
                yield self.envelope.chunk([choice])
        if self.request.include_usage:
            done.sort(key=lambda completion: completion.index)
            yield self.envelope.chunk([], usage=self._usage(done))

    def _choice(self, one: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": one.index, "finish_reason": one.finish_reason, "logprobs": self._logprobs(one.logprobs)}
        if not self.chat:
            return {**choice, "text": one.text}
        parts = split_reasoning(one.text, self.inside) if self.separates else Parts("", one.text)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content}
        if self.separates:
            message["reasoning_content"] = parts.reasoning
        return {**choice, "message": message}

    def _delta(self, piece: Piece) -> dict[str, Any] | None:
        """A chunk's choice; None where the piece holds nothing to send yet."""
        reason = piece.completion.finish_reason if piece.completion else None
        choice: dict[str, Any] = {"index": piece.choice, "finish_reason": reason}
        if piece.logprobs:
            choice["logprobs"] = self._logprobs(piece.logprobs)
        if not self.chat:
            return {**choice, "text": piece.text} if piece.text or piece.logprobs or reason else None
        parts = self._split(piece)
        delta = {}
        if parts.reasoning:
            delta["reasoning_content"] = parts.reasoning
        if parts.content:
            delta["content"] = parts.content
        return {**choice, "delta": delta} if delta or piece.logprobs or reason else None

    def _split(self, piece: Piece) -> Parts:
        if not self.separates:
            return Parts("", piece.text)
        splitter = self._splitters.setdefault(piece.choice, ReasoningSplitter(self.inside))
        parts = splitter.push(piece.text)
        if piece.completion is None:
            return parts
        last = splitter.finish()
        return Parts(parts.reasoning + last.reasoning, parts.content + last.content)

    def _logprobs(self, found: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return chat_logprobs(found, self.tokenizer) if self.chat else completion_logprobs(found, self.tokenizer)

    def _usage(self, completions: list[Completion]) -> dict[str, Any]:
        return usage(completions, self.num_prompts, self.tokenizer.end_think)


class WireJson(JSONResponse):
    """JSON that can always be sent: text that is no UTF-8, such as that of a strange file name, shows question marks."""

    def render(self, content: Any) -> bytes:
        return _json(content)


def error_body(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class EventStream(Response):
    """Server-sent events. Ends, and closes `stream`, when the events do or the client goes. Where they are cut, the last says why."""

    def __init__(self, events: AsyncIterator[dict[str, Any]], stream: AnswerStream) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._stream = events, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(self._send(send), receive)
        except ClientDisconnect:
            return  # nobody is there to be told
        except asyncio.CancelledError:
            await self._end(send, error_body(503, "the server is stopping", "engine_fault"))
        finally:
            self._stream.close()

    async def _send(self, send: Callable[[Message], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send(_event(_json(event)))
        except (RequestFault, EngineFault) as fault:
            code = "request_fault" if isinstance(fault, RequestFault) else "engine_fault"
            return await self._end(send, error_body(500, str(fault), code))
        await self._end(send)

    async def _end(self, send: Callable[[Message], Awaitable[None]], error: dict[str, Any] | None = None) -> None:
        if error is not None:
            await send(_event(_json(error)))
        await send(_event(b"[DONE]"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(work: Coroutine[Any, Any, Any], receive: Receive) -> Any:
    """The result of `work`; it is cancelled and ClientDisconnect raised where the client goes first. The body must have been read."""

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


def _event(data: bytes) -> Message:
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")
