"""OpenAI's chat and completions requests, as far as this engine answers them, and the JSON it answers with.

A field this engine cannot honour is refused where its value would change the answer; fields nobody here knows are ignored.
"""

import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quantkit.errors import QuantkitError
from quantkit.executor.chat import ChatTokenizer
from quantkit.executor.sampling import SamplingParams
from quantkit.executor.sequence import Completion, TokenLogprob

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
}
"""Fields that clients send, with the values at which they ask for nothing."""


class StreamOptions(BaseModel):
    include_usage: bool = False


class Request(BaseModel):
    """What both kinds of request share. temperature, top_p and top_k default to the model's generation_config.json."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=64)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)

    def check(self) -> None:
        """Refuse what would be ignored to the caller's surprise."""
        for name, neutral in _UNSUPPORTED.items():
            if (self.model_extra or {}).get(name) not in neutral:
                raise QuantkitError(f"{name} is not supported", "leave it out")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Request):
    """/v1/chat/completions. separate_reasoning: whether thinking goes to `reasoning_content` (else everything is `content`)."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    separate_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(Request):
    """/v1/completions. prompt: text or token ids, one or several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self, tokenizer: ChatTokenizer) -> list[list[int]]:
        each: list[Any] = self.prompt if isinstance(self.prompt, list) and not _is_ids(self.prompt) else [self.prompt]
        if not each:
            raise QuantkitError("prompt is an empty list", "give at least one prompt")
        return [tokenizer.encode(one) if isinstance(one, str) else list(one) for one in each]


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text contents: parts of type text are joined, others refused."""
    checked = []
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise QuantkitError("a message has no role", "use system, user or assistant")
        content = message.get("content")
        if isinstance(content, list):
            kinds = {part.get("type") if isinstance(part, dict) else None for part in content}
            if kinds - {"text"}:
                raise QuantkitError(f"content parts of type {', '.join(map(str, kinds - {'text'}))} are not supported", "send text only")
            content = "".join(str(part.get("text", "")) for part in content)
        checked.append({**message, "content": "" if content is None else content})
    return checked


def sampling_params(request: ChatRequest | CompletionRequest, defaults: dict[str, Any], room: int) -> SamplingParams:
    """room: tokens that the answer may have at most."""

    def value(name: str, otherwise: Any) -> Any:
        given = getattr(request, name)
        return given if given is not None else defaults.get(name, otherwise)

    return SamplingParams(
        max_new_tokens=request.limit or room,
        temperature=value("temperature", 1.0),
        top_p=value("top_p", 1.0),
        top_k=max(value("top_k", 0), 0),
        seed=request.seed,
        stop=request.stops,
        ignore_eos=request.ignore_eos,
        min_new_tokens=request.min_tokens,
        logprobs=request.num_logprobs,
    )


class Envelope:
    """The fields that all parts of one answer share."""

    def __init__(self, kind: Literal["chat.completion", "text_completion"], model: str) -> None:
        self.kind, self.model = kind, model
        self.id = f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}


def usage(completions: list[Completion], num_prompts: int, end_think: int | None) -> dict[str, Any]:
    """Tokens read and written. A prompt is counted once whatever n; reasoning_tokens are those up to </think>, cached_tokens those of
    prompts that the prefix cache held."""
    per_prompt = len(completions) // num_prompts
    prompt = sum(completion.prompt_tokens for completion in completions[::per_prompt])
    generated = sum(len(completion.token_ids) for completion in completions)
    thought = sum(one.token_ids.index(end_think) + 1 for one in completions if end_think in one.token_ids) if end_think is not None else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(completion.cached_tokens for completion in completions[::per_prompt])},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def chat_logprobs(found: list[TokenLogprob], tokenizer: ChatTokenizer) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {"content": [{**entry(one.token_id, one.logprob), "top_logprobs": [entry(*top) for top in one.top]} for one in found]}


def completion_logprobs(found: list[TokenLogprob], tokenizer: ChatTokenizer) -> dict[str, Any]:
    texts = [tokenizer.token_text(one.token_id) for one in found]
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": [{tokenizer.token_text(token_id): logprob for token_id, logprob in one.top} for one in found],
        "text_offset": [sum(map(len, texts[:index])) for index in range(len(texts))],
    }


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], int)
