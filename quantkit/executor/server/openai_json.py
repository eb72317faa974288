"""The JSON that answers are made of, in OpenAI's shapes."""

import time
import uuid
from codecs import getincrementaldecoder
from typing import Any, Literal

from quantkit.executor.scheduler.sequence import Completion, TokenLogprob
from quantkit.executor.server.tools.stream_parser import CallDelta
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
    """The alternatives; of several that are the same text (parts of a character) the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in one.top:
        found.setdefault(tokenizer.token_text(token), _finite(logprob))
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
