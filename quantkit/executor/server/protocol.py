"""OpenAI's chat and completions requests, as far as this engine answers them.

A request may hold the fields declared here and, of all others, those that change no answer
(HARMLESS) or ask for nothing (null, or their NEUTRAL value). Whatever else it holds is refused by
name: an answer that ignores a field is a wrong answer.

The form of an answer is asked for by response_format as OpenAI has it, structured_outputs and
guided_* as vLLM has them.
"""

import json
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.executor.sampling import grammar
from quantkit.executor.sampling.grammar import MAX_GRAMMAR
from quantkit.executor.sampling.params import (
    MAX_BIAS,
    MAX_BIASED,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_SEED,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MIN_REPETITION,
)
from quantkit.executor.server.tools.formats import MAX_TOOLS, ToolUse, declared_tools

_ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_CHOICES = 64
MAX_OPTIONS = 1024
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
"""A stop string is looked for after every token: so many of them, of so many characters."""

_MAX_TOKENS = (1 << 31) - 1

Text = Annotated[str, Field(max_length=MAX_GRAMMAR)]
Schema = JsonObject | Text
Options = Annotated[list[Text], Field(min_length=1, max_length=MAX_OPTIONS, fail_fast=True)]

_ANY_OBJECT: JsonObject = {"type": "object"}

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
    }
    | {"request_id", "priority", "cache_salt"}
)
"""Bookkeeping, routing and hints of speed."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "length_penalty": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    "documents": ([],),
}
"""Fields that clients send and this engine does not have, with the values at which they ask for
nothing. null does so everywhere."""

RESERVED_VARIABLES = ("messages", "bos_token", "eos_token")
"""Of a chat template's variables those that are the request's and the model's own."""


def first_unsupported(
    extra: JsonObject | None, harmless: Collection[str], neutral: dict[str, tuple[Any, ...]]
) -> str | None:
    """The first of a request's undeclared fields that asks for something."""
    for name, value in (extra or {}).items():
        if name not in harmless and value not in neutral.get(name, ()):
            return name
    return None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


class Exact(BaseModel):
    """What holds nothing but its fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


Messages = Annotated[list[JsonObject], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class NamedSchema(Exact):
    """strict is not asked for: an answer always fits."""

    name: str | None = None
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Exact):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Exact):
    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Options | None = None
    grammar: Text | None = None


class Structured(BaseModel):
    """The fields of a request; at most one of them asks for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Options | None = None
    guided_grammar: Text | None = None

    @property
    def answer_schema(self) -> JsonObject | None:
        """The schema that the answer fits, if JSON is asked for. Raises QuantkitError where two
        forms are."""
        kind, value = self._form
        return value if kind == "schema" else None

    @property
    def answer_grammar(self) -> str | None:
        """What the answer matches, as `SamplingParams.grammar`. Raises QuantkitError."""
        kind, value = self._form
        if kind is None:
            return None
        makers: JsonObject = {
            "schema": grammar.json_schema,
            "regex": grammar.regex,
            "choice": grammar.choice,
            "grammar": grammar.lark,
        }
        made: str = makers[kind](value)
        return made

    @property
    def _form(self) -> tuple[str | None, Any]:
        guided = StructuredOutputs.model_construct(
            json_=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        forms = [
            *_response_format(self.response_format),
            *_outputs(self.structured_outputs),
            *_outputs(guided),
        ]
        if len(forms) > 1:
            raise QuantkitError(
                "the request asks for its answer in two forms",
                "send one of response_format, structured_outputs and guided_*",
            )
        return forms[0] if forms else (None, None)


Stop = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]


class Request(Structured):
    """What both kinds of request share.

    temperature, top_p, top_k, min_p and repetition_penalty default to the model's
    generation_config.json.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION, le=MAX_REPETITION)
    logit_bias: dict[str, Bias] = Field(default_factory=dict, max_length=MAX_BIASED)
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: list[int] = Field(default_factory=list, max_length=MAX_STOP_TOKENS)
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=_MAX_TOKENS)

    @property
    def unsupported(self) -> str | None:
        """The first field that would have to be ignored to its sender's surprise."""
        return first_unsupported(self.model_extra, HARMLESS, NEUTRAL)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """logit_bias by token id. Raises QuantkitError for a key that is none."""
        for name in self.logit_bias:
            if not (name.isascii() and name.isdigit() and len(name) < 10):
                raise QuantkitError(
                    f"logit_bias has the key {name[:100]!r}", "use token ids, as texts"
                )
        return tuple((int(name), bias) for name, bias in self.logit_bias.items())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(Request):
    """/v1/chat/completions. separate_reasoning: whether thinking goes to `reasoning_content` (else
    everything is `content`)."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    separate_reasoning: bool = True
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )
    tool_choice: Any = None
    parallel_tool_calls: bool = True

    @property
    def tool_use(self) -> ToolUse:
        """Raises QuantkitError for tools that are none."""
        return declared_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def num_choices(self) -> int:
        return self.n

    def check(self) -> None:
        """Refuse values that contradict each other."""
        if (
            self.max_tokens
            and self.max_completion_tokens
            and self.max_tokens != self.max_completion_tokens
        ):
            raise QuantkitError("max_tokens and max_completion_tokens differ", "send one of them")
        if self.top_logprobs and not self.logprobs:
            raise QuantkitError(
                "top_logprobs asks for what logprobs does not",
                'send "logprobs": true, or leave top_logprobs out',
            )
        for name in RESERVED_VARIABLES:
            if name in self.chat_template_kwargs:
                raise QuantkitError(
                    f"chat_template_kwargs holds {name}, which the server fills in", "leave it out"
                )


class CompletionRequest(Request):
    """/v1/completions. prompt: text or token ids, one or several. echo: whether an answer begins
    with its prompt; then it may have no tokens of its own."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    max_tokens: int | None = Field(16, ge=0, le=_MAX_TOKENS)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def limit(self) -> int | None:
        """With max_tokens 0 one token is computed, and not shown."""
        return 1 if self.max_tokens == 0 else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        several = isinstance(self.prompt, list) and not (
            self.prompt and isinstance(self.prompt[0], int)
        )
        return self.prompt if several else [self.prompt]  # type: ignore[return-value, list-item]

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    def check(self) -> None:
        if not self.prompts:
            raise QuantkitError("prompt is an empty list", "give at least one prompt")
        if self.max_tokens == 0 and not self.echo:
            raise QuantkitError(
                "max_tokens is 0",
                'ask for at least one token, or for the prompt itself with "echo": true',
            )
        if (
            self.echo
            and None not in (self.logprobs, self.prompt_logprobs)
            and self.logprobs != self.prompt_logprobs
        ):
            raise QuantkitError(
                "logprobs and prompt_logprobs differ, and echo shows both", "send one of them"
            )


def _response_format(request: ResponseFormat | None) -> list[tuple[str, Any]]:
    if request is None or request.type == "text":
        return []
    if request.type == "json_object":
        return [("schema", _ANY_OBJECT)]
    if request.json_schema is None:
        raise QuantkitError(
            "response_format.json_schema is missing",
            'send {"name", "schema"}, or the type json_object',
        )
    return [("schema", request.json_schema.schema_)]


def _outputs(request: StructuredOutputs | None) -> list[tuple[str, Any]]:
    if request is None:
        return []
    given: JsonObject = {"schema": None if request.json_ is None else _schema(request.json_)}
    given |= {"regex": request.regex, "choice": request.choice, "grammar": request.grammar}
    found: list[tuple[str, Any]] = [
        (kind, value) for kind, value in given.items() if value is not None
    ]
    return [*found, ("schema", _ANY_OBJECT)] if request.json_object else found


def _schema(given: Schema) -> JsonObject:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as fault:
            raise QuantkitError("the schema is no JSON", "send an object") from fault
    if not isinstance(given, dict):
        raise QuantkitError("the schema is no object", "send a JSON schema")
    return given


def chat_messages(messages: list[JsonObject]) -> list[JsonObject]:
    """Messages with text contents: parts of type text are joined, everything else refused. Only the
    assistant, who may call tools, may
    say nothing: a message of another role without content has it under another name, and would
    be answered as an empty one."""
    checked = []
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise QuantkitError(
                "a message has no role", f"use {', '.join(_ROLES[:-1])} or {_ROLES[-1]}"
            )
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_text(part) for part in content)
        elif not isinstance(content, str | None):
            raise QuantkitError(
                "a message's content is neither text nor a list of parts", "send text"
            )
        elif content is None and message["role"] != "assistant":
            raise QuantkitError(
                f"a message of role {message['role'][:100]} has no content", "send text"
            )
        calls = message.get("tool_calls") or []
        _check_calls(calls)
        shown = {key: value for key, value in message.items() if key != "tool_calls" or value}
        role = {"developer": "system"}.get(
            message["role"], message["role"]
        )  # OpenAI's newer name, which templates would pass over
        checked.append(
            {**shown, "role": role, "content": (content or None) if calls else content or ""}
        )
    return checked


def check_roles(messages: list[JsonObject], text: str) -> None:
    """Raises QuantkitError where the rendered conversation lacks the content of an unusual role
    said, whom most templates pass over."""
    for message in messages:
        if message["role"] not in _ROLES and str(message["content"] or "").strip() not in text:
            reason = (
                f"the model's chat template leaves out messages of role {message['role'][:100]}"
            )
            raise QuantkitError(reason, f"use {', '.join(_ROLES[:-1])} or {_ROLES[-1]}")


def _check_calls(calls: Any) -> None:
    """Of a message of the conversation so far."""
    if not isinstance(calls, list) or len(calls) > MAX_TOOLS:
        raise QuantkitError(
            "a message's tool_calls is no list of calls", f"send at most {MAX_TOOLS}"
        )
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise QuantkitError(
                "a message's tool_calls holds what is no call of a function",
                "send the calls as they came",
            )
        if not isinstance(function.get("arguments", ""), str | dict):
            raise QuantkitError(
                "the arguments of a call are neither text nor an object",
                "send the calls as they came",
            )


def _text(part: Any) -> str:
    """A content part's text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise QuantkitError(
            f"content parts of type {str(kind)[:100]} are not supported", "send text only"
        )
    text = part.get("text", "")
    if not isinstance(text, str):
        raise QuantkitError("the text of a content part is no text", "send a string")
    return text
