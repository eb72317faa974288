"""What a model's chat template does with tools, found by rendering a small conversation."""

import json
from functools import cached_property
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.executor.server.tools.formats import ToolFormat, named_format, template_format
from quantkit.tokenizer.chat import ChatTokenizer

_PROBE = "quantkit_probe"
_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
_QUESTION = {"role": "user", "content": "?"}


class ToolTemplate:
    """named: the format that the server was started with; `auto` asks the template. Raises
    QuantkitError for a name that is none."""

    def __init__(self, tokenizer: ChatTokenizer, named: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._named = None if named == "auto" else named_format(named)

    @cached_property
    def form(self) -> ToolFormat:
        """How the model writes calls. Raises QuantkitError where it is shown no tools, or its
        format is not known."""
        if _PROBE not in self._render([_QUESTION]):
            raise QuantkitError(
                "the model's chat template shows it no tools",
                "leave tools out, or serve with --chat-template FILE, one that has them",
            )
        templates = self._tokenizer.templates
        form = self._named or template_format(
            templates.get("tool_use", templates["default"]).source
        )
        if form is None:
            raise QuantkitError(
                "the chat template writes tool calls in a format that is not known",
                "serve with --tool-parser",
            )
        return form

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with the arguments of earlier calls as the template wants them: objects, or
        JSON text."""
        if not any(message.get("tool_calls") for message in messages):
            return messages
        return [_with_arguments(message, self._takes_objects) for message in messages]

    @cached_property
    def _takes_objects(self) -> bool:
        call = {
            "id": "call_0",
            "type": "function",
            "function": {"name": _PROBE, "arguments": {"key": "value"}},
        }
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        try:
            text = self._render(
                [
                    _QUESTION,
                    said,
                    {"role": "tool", "tool_call_id": "call_0", "name": _PROBE, "content": "1"},
                ]
            )
        except QuantkitError:
            return False
        return "key" in text and "{'key'" not in text

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return self._tokenizer.render(messages, tools=[_TOOL])


def _with_arguments(message: dict[str, Any], as_objects: bool) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {
        **message,
        "tool_calls": [
            {**call, "function": _function(call["function"], as_objects)} for call in calls
        ],
    }


def _function(function: dict[str, Any], as_objects: bool) -> dict[str, Any]:
    arguments = function.get("arguments") or "{}"
    if as_objects and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as fault:
            raise QuantkitError(
                f"the arguments of a call of {function['name']} are no JSON",
                "send them as they came",
            ) from fault
    if not as_objects and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": arguments}
