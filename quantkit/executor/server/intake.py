"""From the bytes of a request to prompts that can run: parsed, checked and tokenised on threads of their own.

A request passes the cheap limits first: the size of its body before it is parsed, the number of its choices and the length of its texts
before they are tokenised. Short requests have threads that no long one can hold.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from quantkit.errors import QuantkitError
from quantkit.executor.sampling import SamplingParams, signed64
from quantkit.executor.server.protocol import ChatRequest, CompletionRequest, chat_messages, sampling_params
from quantkit.executor.server.service import QueueFull
from quantkit.tokenizer.chat import ChatTokenizer

Body = TypeVar("Body", ChatRequest, CompletionRequest)
Result = TypeVar("Result")

_SHORT_BYTES = 32 << 10
"""Bodies up to this size never wait behind longer ones."""
_SHORT_THREADS, _LONG_THREADS = 2, 1

_HEAD = 8
"""Characters a token of the beginning that is tokenised first, where a text is longer: few texts have as many."""


class ApiError(Exception):
    """A refusal; param: the field that is wrong."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        self.status, self.code, self.param = status, code, param
        super().__init__(message)


@dataclass(frozen=True)
class Limits:
    """max_input: prompt tokens; max_output: tokens of one answer (None: what the context leaves); max_body: bytes of a request."""

    max_input: int | None = None
    max_output: int | None = None
    max_body: int = 8 << 20


@dataclass(frozen=True)
class Prepared:
    """A request that can run: a prompt's token ids and how to continue it, for each choice. `inside`: the prompt already opened <think>."""

    body: ChatRequest | CompletionRequest
    choices: list[tuple[list[int], SamplingParams]]
    num_prompts: int
    inside: bool


class Lanes:
    """Threads for short requests and for long ones. capacity: requests that may be on them or wait for them."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._open = capacity, 0
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "quantkit-short")
        self._long = ThreadPoolExecutor(_LONG_THREADS, "quantkit-long")

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """The result of `work` for a request of `size` bytes. Given up before it began where the caller is cancelled. Raises QueueFull."""
        if self._open >= self._capacity:
            raise QueueFull(f"{self._open} requests wait to be read, more do not fit")
        self._open += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._short if size <= _SHORT_BYTES else self._long, work)
        finally:
            self._open -= 1

    def close(self) -> None:
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


class Intake:
    """context: tokens that prompt and answer share; max_choices: answers that the server can ever hold at once."""

    def __init__(self, tokenizer: ChatTokenizer, model_name: str, limits: Limits, *, context: int, max_choices: int) -> None:
        self.tokenizer, self.model_name, self.limits = tokenizer, model_name, limits
        self.context, self.max_choices = context, max_choices
        self.max_input = min(limits.max_input or context, context - 1)
        self._longest_token = max(map(len, tokenizer.tokenizer.get_vocab()), default=1)

    def chat(self, raw: bytes) -> Prepared:
        """Raises ApiError, or QuantkitError, for what cannot be answered."""
        body = self._body(raw, ChatRequest)
        messages = chat_messages(body.messages)
        text = _told(partial(self.tokenizer.render, messages, **body.chat_template_kwargs), "the chat template fails on this request")
        prompt = self._encoded(text, self.tokenizer.encode_rendered)
        return self._prepared(body, [prompt], inside=self.tokenizer.opens_think(text))

    def completions(self, raw: bytes) -> Prepared:
        """Raises ApiError, or QuantkitError, for what cannot be answered."""
        body = self._body(raw, CompletionRequest)
        prompts = [self._encoded(one, self.tokenizer.encode) if isinstance(one, str) else one for one in body.prompts]
        return self._prepared(body, prompts, inside=False)

    def _body(self, raw: bytes, kind: type[Body]) -> Body:
        try:
            body = kind.model_validate(parse(raw))
        except ValidationError as fault:
            first = fault.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(str(part)[:100] for part in first["loc"])
            raise ApiError(400, f"{place}: {first['msg']}" if place else first["msg"], "invalid_request", place or None) from fault
        if body.model not in (None, self.model_name):
            raise ApiError(404, f"model {str(body.model)[:100]!r} is not served here, {self.model_name!r} is", "model_not_found", "model")
        if body.unsupported is not None:
            name = body.unsupported[:100]
            raise ApiError(400, f"{name} is not supported; leave it out", "unsupported_field", name)
        body.check()
        if body.num_choices > self.max_choices:
            said = f"the request asks for {body.num_choices} answers, the server holds at most {self.max_choices} at once"
            raise ApiError(400, said, "too_many_choices")
        return body

    def _encoded(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Token ids; of a text that is far too long only the beginning is tokenised, or nothing."""
        if len(text) > self.max_input * self._longest_token:
            raise self._too_long(f"{len(text)} characters")
        head = text[: _HEAD * self.max_input]
        if len(head) < len(text):
            count = len(_told(partial(encode, head), "the prompt cannot be tokenised"))
            if count > self.max_input + self.max_input // 4 + 16:  # the cut itself may add a few
                raise self._too_long(f"more than {self.max_input} tokens")
        return _told(partial(encode, text), "the prompt cannot be tokenised")

    def _prepared(self, body: ChatRequest | CompletionRequest, prompts: list[list[int]], inside: bool) -> Prepared:
        choices = [(prompt, params) for prompt in prompts for params in self._params(body, len(prompt))]
        return Prepared(body, choices, len(prompts), inside)

    def _params(self, body: ChatRequest | CompletionRequest, length: int) -> list[SamplingParams]:
        """For each choice of a prompt of `length` tokens, checked against the limits; their seeds follow each other."""
        if length > self.max_input:
            raise self._too_long(f"{length} tokens")
        room, limit = self.context - length, body.limit or 0
        if limit > room:
            said = f"the prompt has {length} tokens and max_tokens is {limit}; the context holds {self.context}"
            raise ApiError(400, said, "context_length_exceeded")
        most = self.limits.max_output
        if most is not None and limit > most:
            raise ApiError(400, f"max_tokens is {limit}, at most {most} are accepted", "max_tokens_exceeded", "max_tokens")
        first = sampling_params(body, self.tokenizer.sampling_defaults, min(room, most or room))
        return [replace(first, seed=None if first.seed is None else signed64(first.seed + choice)) for choice in range(body.n)]

    def _too_long(self, length: str) -> ApiError:
        return ApiError(400, f"the prompt has {length}, at most {self.max_input} tokens are accepted", "context_length_exceeded")


def parse(raw: bytes) -> dict[str, Any]:
    """A JSON object without the keys whose value is null, which ask for nothing. ApiError for anything else.

    Refused too is what readers of JSON disagree about: a key given twice, NaN, and halves of a surrogate pair.
    """
    try:
        text = raw.decode()
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        if re.search(r"\\u[dD]", text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as fault:
        raise ApiError(400, "the request holds a lone surrogate, which is no text", "invalid_json") from fault
    except UnicodeDecodeError as fault:
        raise ApiError(400, "the request is not UTF-8", "invalid_json") from fault
    except RecursionError as fault:
        raise ApiError(400, "the request is nested too deeply", "invalid_json") from fault
    except ValueError as fault:  # json's own, and integers of thousands of digits
        raise ApiError(400, f"the request is not JSON: {str(fault)[:200]}", "invalid_json") from fault
    if not isinstance(value, dict):
        raise ApiError(400, "the request is not a JSON object", "invalid_json")
    return {key: item for key, item in value.items() if item is not None}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ApiError(400, f"{twice[:100]} is given twice", "invalid_json")
    return value


def _no_constant(name: str) -> None:
    raise ApiError(400, f"{name} is not JSON", "invalid_json")


def _told(work: Callable[[], Result], what: str) -> Result:
    """The result of `work`, which runs what came with the model on what came with the request: whatever goes wrong refuses the request."""
    try:
        return work()
    except QuantkitError:
        raise
    except BaseException as fault:  # a panic of the tokenizer is no Exception
        raise ApiError(400, f"{what}: {type(fault).__name__}: {str(fault)[:200]}", "invalid_request") from fault
