"""Answers to chat and completions requests in the JSON of OpenAI, at once or as streamed chunks."""

import time
import uuid
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, Literal

from quantkit.executor.scheduler.sequence import Completion, TokenLogprob
from quantkit.executor.server.intake import Prepared
from quantkit.executor.server.protocol import ChatRequest, CompletionRequest
from quantkit.executor.server.reasoning import AnswerParts, PartsReader, ReasoningSplitter, joined
from quantkit.executor.server.service import AnswerStream, Piece
from quantkit.executor.server.tools.stream_parser import CallDelta, ToolCallSplitter
from quantkit.tokenizer.chat import ChatTokenizer
from quantkit.tokenizer.reasoning_tags import THINK


class Envelope:
    """The fields that all parts of one answer share."""

    def __init__(self, kind: Literal["chat.completion", "text_completion"], model: str) -> None:
        self.kind, self.model = kind, model
        self.id = f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def usage(
    completions: list[Completion],
    num_prompts: int,
    end_think: int | None,
    *,
    inside: bool = False,
    silent: bool = False,
) -> dict[str, Any]:
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


def chat_logprobs(found: list[TokenLogprob], tokenizer: ChatTokenizer) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
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
) -> dict[str, Any]:
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


def prompt_logprobs(
    found: list[TokenLogprob], tokenizer: ChatTokenizer
) -> list[dict[str, Any] | None]:
    """For every token of a prompt the likeliest tokens and itself, by id; nothing for the first. As
    vLLM writes them."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token),
        }

    def entries(one: TokenLogprob) -> dict[str, Any]:
        likeliest = {
            str(token): entry(token, logprob, place)
            for place, (token, logprob) in enumerate(one.top, 1)
        }
        return {**likeliest, str(one.token_id): entry(one.token_id, one.logprob, one.rank)}

    return [None, *(entries(one) for one in found)]


def tool_call(call: CallDelta) -> dict[str, Any]:
    """A whole call of a message."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def call_delta(call: CallDelta) -> dict[str, Any]:
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
