"""From the bytes of a request to prompts that can run: parsed, checked and tokenised on threads of
their own.

A request passes the cheap limits first: the size of its body before it is parsed, the number of its
choices and the length of its texts before they are tokenised. Short requests have threads that no
long one can hold.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import parse_json
from quantkit.common.result import JsonObject
from quantkit.executor.sampling.grammar import Grammars
from quantkit.executor.sampling.params import SamplingParams, signed64
from quantkit.executor.server.protocol import (
    ChatRequest,
    CompletionRequest,
    chat_messages,
    check_roles,
)
from quantkit.executor.server.service import QueueFull
from quantkit.executor.server.tools.formats import ToolFormat, ToolTemplate, ToolUse
from quantkit.executor.server.tools.tool_choice import calls_grammar
from quantkit.tokenizer.chat import ChatTokenizer

Body = TypeVar("Body", ChatRequest, CompletionRequest)
Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")

_SHORT_BYTES = 32 << 10
"""Bodies up to this size never wait for longer ones."""
_SHORT_THREADS, _LONG_THREADS = 2, 1

_IN_JSON = {"dict_type": "Input should be an object", "list_type": "Input should be an array"}
"""What pydantic calls by Python's names."""

_HEAD = 8
"""Characters a token of the beginning that is tokenised first, where a text is longer: few texts
have as many."""


class ApiError(Exception):
    """A refusal; param: the field that is wrong."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        self.status, self.code, self.param = status, code, param
        super().__init__(message)


@dataclass(frozen=True)
class Limits:
    """max_input: prompt tokens; max_output: tokens of one answer (None: what the context leaves);
    max_body: bytes of a request; body_s: seconds in which they come; max_bodies: bytes of all
    requests that are being read."""

    max_input: int | None = None
    max_output: int | None = None
    max_body: int = 8 << 20
    body_s: float = 120.0
    max_bodies: int = 128 << 20


@dataclass(frozen=True)
class Prepared:
    """A request that can run: a prompt's token ids and how to continue it, for each choice.

    texts: of the prompts, where the answer begins with them. `inside`: the prompt already opened
    <think>. tool_format: how calls are looked for in the answer; None where they are not.
    """

    body: ChatRequest | CompletionRequest
    choices: list[tuple[list[int], SamplingParams]]
    texts: list[str] = field(default_factory=list)
    inside: bool = False
    tool_use: ToolUse = field(default_factory=ToolUse)
    tool_format: ToolFormat | None = None


class Lanes:
    """Threads for short requests and for long ones. capacity: requests that may be on them or wait
    for them."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._open = capacity, 0
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "quantkit-short")
        self._long = ThreadPoolExecutor(_LONG_THREADS, "quantkit-long")

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """The result of `work` for a request of `size` bytes. Given up before it began where the
        caller is cancelled. Raises QueueFull."""
        if self._open >= self._capacity:
            raise QueueFull(f"{self._open} requests wait to be read, more do not fit")
        self._open += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._short if size <= _SHORT_BYTES else self._long, work
            )
        finally:
            self._open -= 1

    def close(self) -> None:
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


class Intake:
    """context: tokens that prompt and answer share; max_choices: answers that the server can ever
    hold at once.

    tool_parser: the format of tool calls, or auto. grammars: where grammars are compiled, so that
    its result is dropped later.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        model_name: str,
        limits: Limits,
        *,
        context: int,
        max_choices: int,
        tool_parser: str = "auto",
        grammars: Grammars | None = None,
    ) -> None:
        self.tokenizer, self.model_name, self.limits = tokenizer, model_name, limits
        self.tools, self._grammars = ToolTemplate(tokenizer, tool_parser), grammars
        self.context, self.max_choices = context, max_choices
        self.max_input = min(limits.max_input or context, context - 1)
        self._longest_token = max(map(len, tokenizer.tokenizer.get_vocab()), default=1)

    def chat(self, raw: bytes) -> Prepared:
        """Raises ApiError, or QuantkitError, for what cannot be answered."""
        return self.prepare_chat(self.checked(parse(raw), ChatRequest))

    def prepare_chat(self, body: ChatRequest) -> Prepared:
        """Raises ApiError, or QuantkitError, for what cannot be answered."""
        use, messages = body.tool_use, chat_messages(body.messages)
        form = self.tools.form if use else None
        shown: JsonObject = {"tools": list(use.shown)} if use else {}
        shown |= body.chat_template_kwargs
        text = self.rendered(messages, shown)
        check_roles(messages, text)
        prompt = self.encoded(text, self.tokenizer.encode_rendered)
        inside = self.tokenizer.opens_think(text)
        guided = self._guided(body, use, form, inside)
        params = [replace(one, **guided) for one in self._params(body, len(prompt))]
        return Prepared(
            body, [(prompt, one) for one in params], inside=inside, tool_use=use, tool_format=form
        )

    def rendered(self, messages: list[JsonObject], variables: JsonObject) -> str:
        """The chat template's text of checked messages."""
        render = partial(self.tokenizer.render, self.tools.messages(messages), **variables)
        return or_refuse(render, "the chat template fails on this request")

    def completions(self, raw: bytes) -> Prepared:
        """Raises ApiError, or QuantkitError, for what cannot be answered."""
        body = self.checked(parse(raw), CompletionRequest)
        prompts = [
            self.encoded(one, self.tokenizer.encode) if isinstance(one, str) else one
            for one in body.prompts
        ]
        grammar = self._compiled(body.answer_grammar)
        choices = [
            (prompt, replace(one, grammar=grammar))
            for prompt in prompts
            for one in self._params(body, len(prompt))
        ]
        return Prepared(body, choices, self._texts(body) if body.echo else [])

    def _texts(self, body: CompletionRequest) -> list[str]:
        shown = [
            one if isinstance(one, str) else partial(self.tokenizer.decode, one)
            for one in body.prompts
        ]
        return [
            one if isinstance(one, str) else or_refuse(one, "the prompt cannot be shown")
            for one in shown
        ]

    def _guided(
        self, body: ChatRequest, use: ToolUse, form: ToolFormat | None, inside: bool
    ) -> JsonObject:
        """The sampling parameters that make the answer as the request wants it, and its calls
        readable."""
        if form is None:
            grammar = body.answer_grammar
        elif body.answer_grammar is not None and body.answer_schema is None:
            raise QuantkitError(
                "tools do not go together with a grammar of one's own",
                "leave one of them out, or send a JSON schema",
            )
        else:
            grammar = calls_grammar(form, use, self.tokenizer.tokenizer, body.answer_schema)
        self._compiled(grammar)
        if grammar is not None and inside and self.tokenizer.end_think is None:
            raise QuantkitError(
                "the model's </think> is no token of its own, so no grammar can begin after it",
                "send no grammar",
            )
        after = self.tokenizer.end_think if grammar is not None and inside else None
        marks = {"skip_special_tokens": False} if form is not None else {}
        return {"grammar": grammar, "grammar_after": after, **marks}

    def _compiled(self, grammar: str | None) -> str | None:
        """The grammar, which can be used."""
        if grammar is not None and self._grammars is not None:
            self._grammars.guide(grammar, None)
        return grammar

    def checked(self, fields: JsonObject, kind: type[Body]) -> Body:
        """A request of these fields. Raises ApiError, or QuantkitError, for what it may not
        hold."""
        body = valid(fields, kind)
        self.check_model(body.model)
        check_supported(body.unsupported)
        body.check()
        if body.num_choices > self.max_choices:
            said = (
                f"the request asks for {body.num_choices} answers, the server holds at most "
                f"{self.max_choices} at once"
            )
            raise ApiError(400, said, "too_many_choices")
        return body

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model_name):
            raise ApiError(
                404,
                f"model {str(name)[:100]!r} is not served here, {self.model_name!r} is",
                "model_not_found",
                "model",
            )

    def encoded(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Token ids; of a text that is far too long only the beginning is tokenised, or nothing."""
        if len(text) > self.max_input * self._longest_token:
            raise self._too_long(f"{len(text)} characters")
        head = text[: _HEAD * self.max_input]
        if len(head) < len(text):
            count = len(or_refuse(partial(encode, head), "the prompt cannot be tokenised"))
            if count > self.max_input + self.max_input // 4 + 16:  # the cut itself may add a few
                raise self._too_long(f"more than {self.max_input} tokens")
        return or_refuse(partial(encode, text), "the prompt cannot be tokenised")

    def _params(self, body: ChatRequest | CompletionRequest, length: int) -> list[SamplingParams]:
        """For each choice of a prompt of `length` tokens, checked against the limits; their seeds
        follow each other."""
        if length > self.max_input:
            raise self._too_long(f"{length} tokens")
        room, limit = self.context - length, body.limit or 0
        if limit > room:
            said = (
                f"the prompt has {length} tokens and max_tokens is {limit}; the context holds "
                f"{self.context}"
            )
            raise ApiError(400, said, "context_length_exceeded")
        most = self.limits.max_output
        if most is not None and limit > most:
            raise ApiError(
                400,
                f"max_tokens is {limit}, at most {most} are accepted",
                "max_tokens_exceeded",
                "max_tokens",
            )
        first = sampling_params(body, self.tokenizer.sampling_defaults, min(room, most or room))
        return [
            replace(first, seed=None if first.seed is None else signed64(first.seed + choice))
            for choice in range(body.n)
        ]

    def _too_long(self, length: str) -> ApiError:
        return ApiError(
            400,
            f"the prompt has {length}, at most {self.max_input} tokens are accepted",
            "context_length_exceeded",
        )


def sampling_params(
    request: ChatRequest | CompletionRequest, defaults: JsonObject, room: int
) -> SamplingParams:
    """Without a grammar. room: tokens that the answer may have at most."""

    def value(name: str, otherwise: Any) -> Any:
        given = getattr(request, name)
        return given if given is not None else defaults.get(name, otherwise)

    return SamplingParams(
        max_new_tokens=request.limit or room,
        temperature=value("temperature", 1.0),
        top_p=value("top_p", 1.0),
        top_k=max(value("top_k", 0), 0),
        min_p=value("min_p", 0.0),
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=value("repetition_penalty", 1.0),
        logit_bias=request.biases,
        stop=request.stops,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        min_new_tokens=request.min_tokens,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=request.num_logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
    )


def valid(fields: JsonObject, kind: type[Model]) -> Model:
    """Fields of a request in their types and bounds. ApiError names the first that is not."""
    try:
        return kind.model_validate(fields)
    except ValidationError as fault:
        first = _clearest(fault)
        place = ".".join(str(part)[:100] for part in _place(first, fields))
        if first["type"] == "extra_forbidden":
            check_supported(place)
        said = _IN_JSON.get(first["type"], first["msg"])
        raise ApiError(
            400, f"{place}: {said}" if place else said, "invalid_request", place or None
        ) from fault


def _clearest(fault: ValidationError) -> Mapping[str, Any]:
    """The first error; of a field that may be of several types that of the type which it is, not of
    one which it is not."""
    errors = fault.errors(include_url=False, include_context=False, include_input=False)
    of_field = [one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
    return next((one for one in of_field if not one["type"].endswith("_type")), errors[0])


def _place(error: Mapping[str, Any], fields: JsonObject) -> list[str | int]:
    """Where in the request it is, without pydantic's own names for the types that a field may
    have."""
    place: list[str | int] = []
    value: Any = fields
    for part in error["loc"]:
        inner = (
            value.get(part)
            if isinstance(value, dict)
            else value[part]
            if isinstance(value, list) and isinstance(part, int)
            else None
        )
        if inner is not None:
            place, value = [*place, part], inner
        elif error["type"] == "missing" and part == error["loc"][-1]:
            place = [*place, part]
    return place


def check_supported(unsupported: str | None) -> None:
    """ApiError where there is such a field."""
    if unsupported is not None:
        name = unsupported[:100]
        raise ApiError(400, f"{name} is not supported; leave it out", "unsupported_field", name)


def parse(raw: bytes) -> JsonObject:
    """A JSON object without the keys whose value is null, which ask for nothing. ApiError for
    anything else.

    Refused too is what readers of JSON disagree about (`parse_json`): a key given twice, NaN and
    infinity, deep nesting, and halves of a surrogate pair.
    """
    try:
        value = parse_json(raw.decode(), strict=True)
    except UnicodeDecodeError as fault:
        raise ApiError(400, "the request is not UTF-8", "invalid_json") from fault
    except ValueError as fault:
        raise ApiError(
            400, f"the request is not JSON: {str(fault)[:200]}", "invalid_json"
        ) from fault
    if not isinstance(value, dict):
        raise ApiError(400, "the request is not a JSON object", "invalid_json")
    return {key: item for key, item in value.items() if item is not None}


def or_refuse(work: Callable[[], Result], what: str) -> Result:
    """The result of `work`, which runs what came with the model on what came with the request:
    whatever goes wrong refuses the request."""
    try:
        return work()
    except QuantkitError:
        raise
    except BaseException as fault:  # a panic of the tokenizer is no Exception
        raise ApiError(
            400, f"{what}: {type(fault).__name__}: {str(fault)[:200]}", "invalid_request"
        ) from fault
