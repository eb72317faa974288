"""The answers to chat and completions requests, of a request's pieces: whole, or in chunks."""

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from quantkit.executor.scheduler.sequence import Completion, TokenLogprob
from quantkit.executor.server.intake import Prepared
from quantkit.executor.server.openai_json import (
    Envelope,
    TextOffsets,
    call_delta,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    tool_call,
    usage,
)
from quantkit.executor.server.protocol import ChatRequest, CompletionRequest
from quantkit.executor.server.reasoning import AnswerParts, PartsReader, ReasoningSplitter, joined
from quantkit.executor.server.service import AnswerStream, Piece
from quantkit.executor.server.tools.stream_parser import ToolCallSplitter
from quantkit.tokenizer.chat import ChatTokenizer


class AnswerReader:
    """Reads the answers of a request in parts, a reader for each choice; what the request wants of
    thoughts and tools decides."""

    def __init__(self, prepared: Prepared, *, separates: bool) -> None:
        self._prepared, self._separates = prepared, separates
        self._readers: dict[int, PartsReader] = {}

    def push(self, choice: int, text: str, *, last: bool) -> AnswerParts:
        return self._reader(choice).push(text, last=last)

    def reason(self, one: Completion) -> str:
        """Why an answer ended, for who may have to call a tool."""
        called = self._reader(one.index).num_calls
        return "tool_calls" if called and one.finish_reason == "stop" else one.finish_reason

    def _reader(self, choice: int) -> PartsReader:
        if choice not in self._readers:
            prepared = self._prepared
            calling = (
                ToolCallSplitter(prepared.tool_format, prepared.tool_use)
                if prepared.tool_format
                else None
            )
            self._readers[choice] = PartsReader(
                ReasoningSplitter(prepared.inside) if self._separates else None, calling
            )
        return self._readers[choice]


class ChatAnswer:
    """The choices of a chat request."""

    def __init__(
        self, prepared: Prepared, body: ChatRequest, tokenizer: ChatTokenizer, model: str
    ) -> None:
        self.body, self.tokenizer = body, tokenizer
        self.envelope = Envelope("chat.completion", model)
        self.id = self.envelope.id
        self._separates = body.separate_reasoning and tokenizer.end_think is not None
        self._reading, self._inside = (
            AnswerReader(prepared, separates=self._separates),
            prepared.inside,
        )

    async def whole(self, stream: AnswerStream) -> dict[str, Any]:
        completions = await collected(stream)
        whole = self.envelope.whole(
            [self._choice(one) for one in completions], self._usage(completions)
        )
        scored = completions[0].prompt_logprobs
        return (
            whole
            if scored is None
            else {**whole, "prompt_logprobs": prompt_logprobs(scored, self.tokenizer)}
        )

    async def events(self, stream: AnswerStream) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed answer; with include_usage a last one without choices."""
        roles = [{"role": "assistant", "content": ""} for _ in stream.sequences]
        yield self.envelope.chunk(
            [{"index": i, "delta": role, "finish_reason": None} for i, role in enumerate(roles)]
        )
        done: list[Completion] = []
        async for piece in stream:
            if piece.completion is not None:
                done.append(piece.completion)
            choice = self._delta(piece)
            if choice is not None:
                yield self.envelope.chunk([choice])
        if self.body.include_usage:
            yield self.envelope.chunk(
                [], usage=self._usage(sorted(done, key=lambda one: one.index))
            )

    def _choice(self, one: Completion) -> dict[str, Any]:
        parts = self._reading.push(one.index, one.text, last=True)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content}
        if self._separates:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["content"] = parts.content or None
            message["tool_calls"] = [tool_call(call) for call in joined(parts.calls)]
        logprobs = None if one.logprobs is None else chat_logprobs(one.logprobs, self.tokenizer)
        return {
            "index": one.index,
            "finish_reason": self._reading.reason(one),
            "logprobs": logprobs,
            "message": message,
        }

    def _delta(self, piece: Piece) -> dict[str, Any] | None:
        """A chunk's choice; None where the piece holds nothing to send yet."""
        parts = self._reading.push(piece.choice, piece.text, last=piece.completion is not None)
        if not (parts or piece.logprobs or piece.completion):
            return None
        delta: dict[str, Any] = {}
        if parts.reasoning:
            delta["reasoning_content"] = parts.reasoning
        if parts.content:
            delta["content"] = parts.content
        if parts.calls:
            delta["tool_calls"] = [call_delta(call) for call in parts.calls]
        reason = self._reading.reason(piece.completion) if piece.completion else None
        choice: dict[str, Any] = {"index": piece.choice, "finish_reason": reason, "delta": delta}
        return (
            {**choice, "logprobs": chat_logprobs(piece.logprobs, self.tokenizer)}
            if piece.logprobs
            else choice
        )

    def _usage(self, completions: list[Completion]) -> dict[str, Any]:
        return usage(completions, 1, self.tokenizer.end_think, inside=self._inside)


class CompletionAnswer:
    """The choices of a completions request."""

    def __init__(
        self, prepared: Prepared, body: CompletionRequest, tokenizer: ChatTokenizer, model: str
    ) -> None:
        self.body, self.tokenizer, self._prepared = body, tokenizer, prepared
        self.envelope = Envelope("text_completion", model)
        self.id = self.envelope.id
        self._silent = body.max_tokens == 0
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)
        self._echoed: set[int] = set()

    async def whole(self, stream: AnswerStream) -> dict[str, Any]:
        completions = await collected(stream)
        return self.envelope.whole(
            [self._choice(one) for one in completions], self._usage(completions)
        )

    async def events(self, stream: AnswerStream) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed answer, with echo first the prompt's; with include_usage a last
        one without choices."""
        done: list[Completion] = []
        async for piece in stream:
            if piece.completion is not None:
                done.append(piece.completion)
            for choice in self._chunks(piece, stream):
                yield self.envelope.chunk([choice])
        if self.body.include_usage:
            yield self.envelope.chunk(
                [], usage=self._usage(sorted(done, key=lambda one: one.index))
            )

    def _choice(self, one: Completion) -> dict[str, Any]:
        text = "" if self._silent else one.text
        logprobs = self._logprobs(
            one.index, one.logprobs, one.prompt_logprobs if self.body.echo else None
        )
        scored = (
            None
            if self.body.prompt_logprobs is None
            else prompt_logprobs(one.prompt_logprobs or [], self.tokenizer)
        )
        shown = {} if scored is None else {"prompt_logprobs": scored}
        text = self._prompt(one.index) + text if self.body.echo else text
        return {
            "index": one.index,
            "finish_reason": self._reason(one),
            "logprobs": logprobs,
            "text": text,
            **shown,
        }

    def _chunks(self, piece: Piece, stream: AnswerStream) -> list[dict[str, Any]]:
        chunks = []
        if self.body.echo and piece.choice not in self._echoed:
            self._echoed.add(piece.choice)
            scored = (
                stream.sequences[piece.choice].prompt_logprobs
                if self.body.logprobs is not None
                else None
            )
            logprobs = self._logprobs(piece.choice, [], scored)
            chunks.append(
                {
                    "index": piece.choice,
                    "finish_reason": None,
                    "text": self._prompt(piece.choice),
                    "logprobs": logprobs,
                }
            )
        reason = self._reason(piece.completion) if piece.completion else None
        text, found = ("", []) if self._silent else (piece.text, piece.logprobs)
        if text or found or reason:
            logprobs = (
                {
                    "logprobs": completion_logprobs(
                        found, self.tokenizer, self._offsets[piece.choice]
                    )
                }
                if found
                else {}
            )
            chunks.append(
                {"index": piece.choice, "finish_reason": reason, "text": text, **logprobs}
            )
        return chunks

    def _logprobs(
        self, choice: int, found: list[TokenLogprob] | None, scored: list[TokenLogprob] | None
    ) -> dict[str, Any] | None:
        """Of the answer's tokens, after those of its prompt where they are shown."""
        if found is None or self.body.logprobs is None:
            return None
        shown = [] if self._silent else found
        first = None if scored is None else self._prepared.choices[choice][0][0]
        return completion_logprobs(
            [*(scored or []), *shown], self.tokenizer, self._offsets[choice], first
        )

    def _prompt(self, choice: int) -> str:
        return self._prepared.texts[choice // self.body.n]

    def _reason(self, one: Completion) -> str:
        return "length" if self._silent else one.finish_reason

    def _usage(self, completions: list[Completion]) -> dict[str, Any]:
        return usage(
            completions, len(self.body.prompts), self.tokenizer.end_think, silent=self._silent
        )


async def collected(stream: AnswerStream) -> list[Completion]:
    """Every choice, when all are done."""
    done: dict[int, Completion] = {}
    async for piece in stream:
        if piece.completion is not None:
            done[piece.choice] = piece.completion
    return [done[choice] for choice in sorted(done)]
