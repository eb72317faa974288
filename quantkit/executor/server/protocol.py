"""OpenAI's chat and completions requests, as far as this engine answers them, and the JSON it answers with.

A request may hold the fields declared here and, of all others, those that change no answer (HARMLESS) or ask for nothing (null, or
their NEUTRAL value). Whatever else it holds is refused by name: an answer that ignores a field is a wrong answer.
"""

import time
import uuid
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quantkit.errors import QuantkitError
from quantkit.executor.sampling import MAX_LOGPROBS, MAX_SEED, MAX_TEMPERATURE, MAX_TOP_K, SamplingParams
from quantkit.executor.sequence import Completion, TokenLogprob
from quantkit.tokenizer.chat import ChatTokenizer

MAX_MESSAGES = 4096
MAX_CHOICES = 64
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
"""A stop string is looked for behind every token: so many of them, of so many characters."""

_MAX_TOKENS = (1 << 31) - 1

HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction"}
    | {"request_id", "priority", "cache_salt", "parallel_tool_calls"}
)
"""Bookkeeping, routing and hints of speed."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    "documents": ([],),
}
"""Fields that clients send and this engine does not have, with the values at which they ask for nothing. null does so everywhere."""

RESERVED_VARIABLES = ("messages", "bos_token", "eos_token")
"""Of a chat template's variables those that are the request's and the model's own."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


Stop = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]


class Request(BaseModel):
    """What both kinds of request share. temperature, top_p and top_k default to the model's generation_config.json."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K)
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=_MAX_TOKENS)

    @property
    def unsupported(self) -> str | None:
        """The first field that would have to be ignored to its sender's surprise."""
        extra = self.model_extra or {}
        return next((name for name, value in extra.items() if name not in HARMLESS and value not in NEUTRAL.get(name, ())), None)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(Request):
    """/v1/chat/completions. separate_reasoning: whether thinking goes to `reasoning_content` (else everything is `content`)."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    separate_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def num_choices(self) -> int:
        return self.n

    def check(self) -> None:
        """Refuse values that contradict each other."""
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise QuantkitError("max_tokens and max_completion_tokens differ", "send one of them")
        if self.top_logprobs and not self.logprobs:
            raise QuantkitError("top_logprobs asks for what logprobs does not", 'send "logprobs": true, or leave top_logprobs out')
        for name in RESERVED_VARIABLES:
            if name in self.chat_template_kwargs:
                raise QuantkitError(f"chat_template_kwargs holds {name}, which the server fills in", "leave it out")


class CompletionRequest(Request):
    """/v1/completions. prompt: text or token ids, one or several."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    max_tokens: int | None = Field(16, ge=1, le=_MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        several = isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int))
        return self.prompt if several else [self.prompt]  # type: ignore[return-value, list-item]

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    def check(self) -> None:
        if not self.prompts:
            raise QuantkitError("prompt is an empty list", "give at least one prompt")


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text contents: parts of type text are joined, everything else refused."""
    checked = []
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise QuantkitError("a message has no role", "use system, user or assistant")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_text(part) for part in content)
        elif not isinstance(content, str | None):
            raise QuantkitError("a message's content is neither text nor a list of parts", "send text")
        checked.append({**message, "content": content or ""})
    return checked


def _text(part: Any) -> str:
    """A content part's text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise QuantkitError(f"content parts of type {str(kind)[:100]} are not supported", "send text only")
    text = part.get("text", "")
    if not isinstance(text, str):
        raise QuantkitError("the text of a content part is no text", "send a string")
    return text


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
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    return {"content": [{**entry(one.token_id, one.logprob), "top_logprobs": [entry(*top) for top in one.top]} for one in found]}


def completion_logprobs(found: list[TokenLogprob], tokenizer: ChatTokenizer) -> dict[str, Any]:
    texts = [tokenizer.token_text(one.token_id) for one in found]
    return {
        "tokens": texts,
        "token_logprobs": [_finite(one.logprob) for one in found],
        "top_logprobs": [{tokenizer.token_text(token_id): _finite(logprob) for token_id, logprob in one.top} for one in found],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity: a token that could not be chosen shows as OpenAI shows it."""
    return max(logprob, -9999.0)
