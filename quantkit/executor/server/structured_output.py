"""What a request says of its answer's form: response_format as OpenAI has it, structured_outputs
and guided_* as vLLM has them."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quantkit.common.errors import QuantkitError
from quantkit.executor.sampling import grammar
from quantkit.executor.sampling.grammar import MAX_GRAMMAR

MAX_OPTIONS = 1024

Text = Annotated[str, Field(max_length=MAX_GRAMMAR)]
Schema = dict[str, Any] | Text
Options = Annotated[list[Text], Field(min_length=1, max_length=MAX_OPTIONS, fail_fast=True)]

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class NamedSchema(BaseModel):
    """strict is not asked for: an answer always fits."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

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
    def answer_schema(self) -> dict[str, Any] | None:
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
        makers: dict[str, Any] = {
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
    given: dict[str, Any] = {"schema": None if request.json_ is None else _schema(request.json_)}
    given |= {"regex": request.regex, "choice": request.choice, "grammar": request.grammar}
    found: list[tuple[str, Any]] = [
        (kind, value) for kind, value in given.items() if value is not None
    ]
    return [*found, ("schema", _ANY_OBJECT)] if request.json_object else found


def _schema(given: Schema) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as fault:
            raise QuantkitError("the schema is no JSON", "send an object") from fault
    if not isinstance(given, dict):
        raise QuantkitError("the schema is no object", "send a JSON schema")
    return given
