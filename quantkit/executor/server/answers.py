"""Answers to chat and completions requests in the JSON of OpenAI, at once or as streamed chunks."""

import time
import uuid
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

from quantkit.common.result import JsonObject
from quantkit.executor.scheduler.sequence import Completion, TokenLogprob
from quantkit.executor.server.intake import Prepared
from quantkit.executor.server.protocol import ChatRequest, CompletionRequest
from quantkit.executor.server.service import AnswerStream, Piece
from quantkit.executor.server.stream_parser import (
    AnswerParts,
    CallDelta,
    PartsReader,
    ReasoningSplitter,
    ToolCallSplitter,
    joined,
)
from quantkit.tokenizer.chat import ChatTokenizer
from quantkit.tokenizer.reasoning_tags import THINK

Choice = JsonObject
"""In the JSON of OpenAI."""


def usage(
    completions: list[Completion],
    num_prompts: int,
    end_think: int | None,
    *,
    inside: bool = False,
    silent: bool = False,
) -> JsonObject:
    """Tokens read and written. A prompt is counted once whatever n; reasoning_tokens are those up
    to </think>, or all where an answer ends before it; cached_tokens those of prompts that the
    prefix cache held. inside: the prompt opened <think>. silent: what was written is not shown."""
    per_prompt = len(completions) // num_prompts
    prompt = sum(completion.prompt_tokens for completion in completions[::per_prompt])
    generated = 0 if silent else sum(len(completion.token_ids) for completion in completions)
    thought = (
        0 if end_think is None else sum(_thought(one, end_think, inside) for one in completions)
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(
                completion.cached_tokens for completion in completions[::per_prompt]
            )
        },
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def _thought(one: Completion, end_think: int, inside: bool) -> int:
    if end_think in one.token_ids:
        return one.token_ids.index(end_think) + 1
    return len(one.token_ids) if inside or one.text.lstrip().startswith(THINK) else 0


def chat_logprobs(found: list[TokenLogprob], tokenizer: ChatTokenizer) -> JsonObject:
    def entry(token_id: int, logprob: float) -> JsonObject:
        own = list(tokenizer.token_bytes(token_id))
        return {"token": tokenizer.token_text(token_id), "logprob": _finite(logprob), "bytes": own}

    return {
        "content": [
            {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*top) for top in one.top]}
            for one in found
        ]
    }


class TextOffsets:
    """Where each token begins in one choice's text, in characters. Of a character that several
    tokens make together the text has nothing before the last of them."""

    def __init__(self) -> None:
        self._characters = getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, piece: bytes) -> int:
        """Of the next token, whose bytes are `piece`."""
        begin = self._length
        self._length += len(self._characters.decode(piece))
        return begin


def completion_logprobs(
    found: list[TokenLogprob],
    tokenizer: ChatTokenizer,
    offsets: TextOffsets,
    first: int | None = None,
) -> JsonObject:
    """offsets: of the choice, whose tokens before these it has seen. first: a prompt's first token,
    which has no predecessor: it has no log-probability."""
    begin = [] if first is None else [first]
    tokens = [*begin, *(one.token_id for one in found)]
    nothing = [None] * len(begin)
    return {
        "tokens": [tokenizer.token_text(token) for token in tokens],
        "token_logprobs": [*nothing, *(_finite(one.logprob) for one in found)],
        "top_logprobs": [*nothing, *(_by_text(one, tokenizer) for one in found)],
        "text_offset": [offsets.next(tokenizer.token_bytes(token)) for token in tokens],
    }


def _by_text(one: TokenLogprob, tokenizer: ChatTokenizer) -> dict[str, float]:
    """The alternatives. Of tokens with one text, as parts of characters have, it names the chosen
    one, else the likeliest, and `token_id:N`, as vLLM writes it, the others."""
    found, chosen = dict[str, float](), tokenizer.token_text(one.token_id)
    for token, logprob in one.top:
        text = tokenizer.token_text(token)
        shared = text in found or (text == chosen and token != one.token_id)
        found[f"token_id:{token}" if shared else text] = _finite(logprob)
    return found


def prompt_logprobs(found: list[TokenLogprob], tokenizer: ChatTokenizer) -> list[JsonObject | None]:
    """For every token of a prompt the likeliest tokens and itself, by id; nothing for the first. As
    vLLM writes them."""

    def entry(token: int, logprob: float, rank: int) -> JsonObject:
        return {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token),
        }

    def entries(one: TokenLogprob) -> JsonObject:
        likeliest = {
            str(token): entry(token, logprob, place)
            for place, (token, logprob) in enumerate(one.top, 1)
        }
        return {**likeliest, str(one.token_id): entry(one.token_id, one.logprob, one.rank)}

    return [None, *(entries(one) for one in found)]


def tool_call(call: CallDelta) -> JsonObject:
    """A whole call of a message."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def call_delta(call: CallDelta) -> JsonObject:
    """A piece of a call in a chunk."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **tool_call(call)}


def _finite(logprob: float) -> float:
    """JSON has no infinity: a token that could not be chosen shows as OpenAI shows it."""
    return max(logprob, -9999.0)


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


class Answer(ABC):
    """The choices of one request, at once or as streamed chunks."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(
        self,
        prepared: Prepared,
        body: ChatRequest | CompletionRequest,
        tokenizer: ChatTokenizer,
        model: str,
    ) -> None:
        self._prepared, self._include_usage, self.tokenizer = (
            prepared,
            body.include_usage,
            tokenizer,
        )
        self.model, self.created = model, int(time.time())
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    async def whole(self, stream: AnswerStream) -> JsonObject:
        done: dict[int, Completion] = {}
        async for piece in stream:
            if piece.completion is not None:
                done[piece.choice] = piece.completion
        completions = [done[choice] for choice in sorted(done)]
        choices = [self._choice(one) for one in completions]
        return self._part(self.kind, choices, usage=self._usage(completions))

    async def events(self, stream: AnswerStream) -> AsyncIterator[JsonObject]:
        """The chunks of a streamed answer; with include_usage a last one without choices."""
        if first := self._first(len(stream.sequences)):
            yield self._part(self.chunk_kind, first)
        done: list[Completion] = []
        async for piece in stream:
            if piece.completion is not None:
                done.append(piece.completion)
            for choice in self._deltas(piece, stream):
                yield self._part(self.chunk_kind, [choice])
        if self._include_usage:
            done.sort(key=lambda one: one.index)
            yield self._part(self.chunk_kind, [], usage=self._usage(done))

    def _part(self, kind: str, choices: list[Choice], **more: Any) -> JsonObject:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def _first(self, count: int) -> list[Choice]:
        """Of the chunk before the first token."""
        return []

    @abstractmethod
    def _choice(self, one: Completion) -> Choice:
        """A whole choice."""

    @abstractmethod
    def _deltas(self, piece: Piece, stream: AnswerStream) -> Iterator[Choice]:
        """Choices of the chunks that a piece makes."""

    @abstractmethod
    def _usage(self, completions: list[Completion]) -> JsonObject:
        """See `usage`."""


class ChatAnswer(Answer):
    """The choices of a chat request."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, prepared: Prepared, body: ChatRequest, tokenizer: ChatTokenizer, model: str
    ) -> None:
        super().__init__(prepared, body, tokenizer, model)
        self._separates = body.separate_reasoning and tokenizer.end_think is not None
        self._reading = AnswerReader(prepared, separates=self._separates)

    async def whole(self, stream: AnswerStream) -> JsonObject:
        whole, scored = await super().whole(stream), stream.sequences[0].prompt_logprobs
        if self._prepared.body.prompt_logprobs is None:
            return whole
        return {**whole, "prompt_logprobs": prompt_logprobs(scored or [], self.tokenizer)}

    def _first(self, count: int) -> list[Choice]:
        roles = [{"role": "assistant", "content": ""} for _ in range(count)]
        return [{"index": i, "delta": role, "finish_reason": None} for i, role in enumerate(roles)]

    def _choice(self, one: Completion) -> Choice:
        parts = self._reading.push(one.index, one.text, last=True)
        message: JsonObject = {"role": "assistant", "content": parts.content}
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

    def _deltas(self, piece: Piece, stream: AnswerStream) -> Iterator[Choice]:
        """None where the piece holds nothing to send yet."""
        parts = self._reading.push(piece.choice, piece.text, last=piece.completion is not None)
        if not (parts or piece.logprobs or piece.completion):
            return
        delta: JsonObject = {}
        if parts.reasoning:
            delta["reasoning_content"] = parts.reasoning
        if parts.content:
            delta["content"] = parts.content
        if parts.calls:
            delta["tool_calls"] = [call_delta(call) for call in parts.calls]
        reason = self._reading.reason(piece.completion) if piece.completion else None
        choice: Choice = {"index": piece.choice, "finish_reason": reason, "delta": delta}
        if piece.logprobs:
            choice["logprobs"] = chat_logprobs(piece.logprobs, self.tokenizer)
        yield choice

    def _usage(self, completions: list[Completion]) -> JsonObject:
        return usage(completions, 1, self.tokenizer.end_think, inside=self._prepared.inside)


class CompletionAnswer(Answer):
    """The choices of a completions request; with echo a stream begins with the prompt's chunk."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, prepared: Prepared, body: CompletionRequest, tokenizer: ChatTokenizer, model: str
    ) -> None:
        super().__init__(prepared, body, tokenizer, model)
        self.body = body
        self._silent = body.max_tokens == 0
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)
        self._echoed: set[int] = set()

    def _choice(self, one: Completion) -> Choice:
        text = "" if self._silent else one.text
        scored = one.prompt_logprobs if self.body.echo else None
        choice: Choice = {
            "index": one.index,
            "finish_reason": self._reason(one),
            "logprobs": self._logprobs(one.index, one.logprobs, scored),
            "text": self._prompt(one.index) + text if self.body.echo else text,
        }
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(one.prompt_logprobs or [], self.tokenizer)
        return choice

    def _deltas(self, piece: Piece, stream: AnswerStream) -> Iterator[Choice]:
        if self.body.echo and piece.choice not in self._echoed:
            self._echoed.add(piece.choice)
            shown = self.body.logprobs is not None
            scored = stream.sequences[piece.choice].prompt_logprobs if shown else None
            yield {
                "index": piece.choice,
                "finish_reason": None,
                "text": self._prompt(piece.choice),
                "logprobs": self._logprobs(piece.choice, [], scored),
            }
        reason = self._reason(piece.completion) if piece.completion else None
        text, found = ("", []) if self._silent else (piece.text, piece.logprobs)
        if text or found or reason:
            choice: Choice = {"index": piece.choice, "finish_reason": reason, "text": text}
            if found:
                offsets = self._offsets[piece.choice]
                choice["logprobs"] = completion_logprobs(found, self.tokenizer, offsets)
            yield choice

    def _logprobs(
        self, choice: int, found: list[TokenLogprob] | None, scored: list[TokenLogprob] | None
    ) -> JsonObject | None:
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

    def _usage(self, completions: list[Completion]) -> JsonObject:
        count, end_think = len(self.body.prompts), self.tokenizer.end_think
        return usage(completions, count, end_think, silent=self._silent)
