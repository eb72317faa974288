"""How models write tool calls: marks around the calls, and their content.

| format | models | a call |
|---|---|---|
| hermes | Qwen2.5, Qwen3, Hermes | <tool_call>{"name": ..., "arguments": {...}}</tool_call> |
| qwen3_coder | Qwen3-Coder | <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call> |
| deepseek_v3 | DeepSeek-V3, R1 | a name and ```json between the marks of V3's template |
| deepseek_v31 | DeepSeek-V3.1 and later | a name and its arguments between the same marks |
| kimi_k2 | Kimi-K2 | functions.NAME:INDEX and its arguments between marks of its own |

The formats are those of the models' own chat templates; which one a model has is found by rendering
a small conversation.

The tools that a request offers a model, and whether it must call one.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quantkit.common.errors import QuantkitError, UsageError
from quantkit.common.result import JsonObject
from quantkit.executor.server.tools.parsers import CallReader, HeadedReader, JsonReader, XmlReader

if TYPE_CHECKING:  # `serve --help` asks for the formats' names
    from quantkit.tokenizer.chat import ChatTokenizer

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NOTHING: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Tool:
    """parameters: the JSON schema of the arguments. strict: whether arguments must fit it even
    where the model calls of itself."""

    name: str
    parameters: JsonObject
    strict: bool


@dataclass(frozen=True)
class ToolUse:
    """What a request says of tools. shown: the tools as the chat template gets them; forced: those
    of which one must be called.

    parallel: whether an answer may call more than once.
    """

    tools: tuple[Tool, ...] = ()
    shown: tuple[JsonObject, ...] = ()
    forced: tuple[Tool, ...] = ()
    parallel: bool = True

    def __bool__(self) -> bool:
        return bool(self.tools)


def declared_tools(tools: list[Any], choice: Any, parallel: bool) -> ToolUse:
    """A request's `tools`, `tool_choice` and `parallel_tool_calls`. Raises QuantkitError for what
    is none."""
    if len(tools) > MAX_TOOLS:
        raise QuantkitError(f"tools holds {len(tools)}", f"send at most {MAX_TOOLS}")
    known = [_tool(one, f"tools.{place}") for place, one in enumerate(tools)]
    names = [one.name for one in known]
    if twice := {name for name in names if names.count(name) > 1}:
        raise QuantkitError(f"tools names {min(twice)} twice", "give each tool a name of its own")
    if choice == "none" or not (known or choice not in (None, "auto")):
        return ToolUse()
    if not known:
        raise QuantkitError(
            "tool_choice asks for a tool and tools holds none",
            "send tools, or leave tool_choice out",
        )
    once = isinstance(choice, dict)  # a named function is called once, as by OpenAI and vLLM
    return ToolUse(tuple(known), tuple(tools), _forced(known, choice), parallel and not once)


def _tool(given: Any, where: str) -> Tool:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or given.get("type") != "function":
        raise QuantkitError(
            f"{where} is no function",
            'send {"type": "function", "function": {"name", "description", "parameters"}}',
        )
    name, parameters = function.get("name"), function.get("parameters") or _NOTHING
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise QuantkitError(
            f"{where}.function.name is no name", "use 1 to 64 letters, digits, _, . and -"
        )
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
        raise QuantkitError(
            f"{where}.function.parameters is no JSON schema of an object",
            "send one, or leave it out",
        )
    if not isinstance(function.get("description") or "", str):
        raise QuantkitError(f"{where}.function.description is no text", "send a text")
    return Tool(name, parameters, function.get("strict") is True)


def _forced(tools: list[Tool], choice: Any) -> tuple[Tool, ...]:
    """The tools of which one must be called; none where the model decides."""
    if choice in (None, "auto"):
        return ()
    if choice == "required":
        return tuple(tools)
    function = (
        choice.get("function")
        if isinstance(choice, dict) and choice.get("type") == "function"
        else None
    )
    if not isinstance(function, dict):
        remedy = (
            f"use {', '.join(_CHOICES)}, or "
            f"{json.dumps({'type': 'function', 'function': {'name': '...'}})}"
        )
        raise QuantkitError(f"tool_choice {str(choice)[:100]!r} is not supported", remedy)
    named = tuple(tool for tool in tools if tool.name == function.get("name"))
    if not named:
        raise QuantkitError(
            f"tool_choice names {str(function.get('name'))[:100]!r}, which tools does not hold",
            "send that tool, too",
        )
    return named


_DEEPSEEK = {
    mark: f"<｜tool▁{mark.replace('_', '▁')}｜>"
    for mark in ("calls_begin", "calls_end", "call_begin", "call_end", "sep")
}
_KIMI = {
    mark: f"<|tool_{mark}|>"
    for mark in (
        "calls_section_begin",
        "calls_section_end",
        "call_begin",
        "call_argument_begin",
        "call_end",
    )
}


@dataclass(frozen=True)
class ToolFormat:
    """section: marks around all calls; call: marks around each; between: the text between two
    calls.

    head, tail: the text before and after a tool's arguments in a call, {name} for its name and
    {index} for a number. reader: reads a
    call. in_xml: whether arguments are elements instead of JSON. known_by: what a chat template
    holds that writes this format.
    """

    name: str
    call: tuple[str, str]
    head: str
    tail: str
    reader: Callable[[tuple[Tool, ...]], CallReader]
    known_by: tuple[str, ...]
    section: tuple[str, str] = ("", "")
    between: str = ""
    in_xml: bool = False

    @property
    def marks(self) -> list[str]:
        """Everything that may be a token of its own, longest first."""
        found = {
            *self.section,
            *self.call,
            *re.findall(r"<[|｜][^<>]+[|｜]>", self.head + self.tail),
        }
        return sorted(found - {""}, key=len, reverse=True)

    @property
    def opening(self) -> str:
        """The mark that an answer's first call begins with."""
        return self.section[0] or self.call[0]


def _headed(head: str, tail: str = "") -> Callable[[tuple[Tool, ...]], CallReader]:
    pattern = re.compile(head)
    return lambda tools: HeadedReader(pattern, tail)


_DEEPSEEK_MARKS: JsonObject = {
    "section": (_DEEPSEEK["calls_begin"], _DEEPSEEK["calls_end"]),
    "call": (_DEEPSEEK["call_begin"], _DEEPSEEK["call_end"]),
}

FORMATS = (
    ToolFormat(
        "qwen3_coder",
        ("<tool_call>", "</tool_call>"),
        "\n<function={name}>\n",
        "</function>\n",
        lambda tools: XmlReader({tool.name: tool.parameters for tool in tools}),
        ("<function=", "<parameter="),
        between="\n",
        in_xml=True,
    ),
    ToolFormat(
        "hermes",
        ("<tool_call>", "</tool_call>"),
        '\n{{"name": "{name}", "arguments": ',
        "}}\n",
        lambda tools: JsonReader(),
        ("<tool_call>",),
        between="\n",
    ),
    ToolFormat(
        "deepseek_v3",
        head=f"function{_DEEPSEEK['sep']}{{name}}\n```json\n",
        tail="\n```",
        reader=_headed(rf"\s*function{_DEEPSEEK['sep']}(?P<name>[^\n]+)\n```json\n", "```"),
        known_by=(_DEEPSEEK["calls_begin"], "```json"),
        between="\n",
        **_DEEPSEEK_MARKS,
    ),
    ToolFormat(
        "deepseek_v31",
        head=f"{{name}}{_DEEPSEEK['sep']}",
        tail="",
        reader=_headed(rf"\s*(?P<name>.+?){_DEEPSEEK['sep']}"),
        known_by=(_DEEPSEEK["calls_begin"],),
        **_DEEPSEEK_MARKS,
    ),
    ToolFormat(
        "kimi_k2",
        (_KIMI["call_begin"], _KIMI["call_end"]),
        f"functions.{{name}}:{{index}}{_KIMI['call_argument_begin']}",
        "",
        _headed(
            rf"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*{re.escape(_KIMI['call_argument_begin'])}"
        ),
        (_KIMI["calls_section_begin"],),
        section=(_KIMI["calls_section_begin"], _KIMI["calls_section_end"]),
    ),
)
NAMES = tuple(one.name for one in FORMATS)


def named_format(name: str) -> ToolFormat:
    for one in FORMATS:
        if one.name == name:
            return one
    raise UsageError(f"there is no tool parser {name!r}", f"use one of {', '.join(NAMES)}, or auto")


def template_format(source: str) -> ToolFormat | None:
    """The format that a chat template writes calls in; None where it knows none of these."""
    return next((one for one in FORMATS if all(mark in source for mark in one.known_by)), None)


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

    def __init__(self, tokenizer: "ChatTokenizer", named: str = "auto") -> None:
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

    def messages(self, messages: list[JsonObject]) -> list[JsonObject]:
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

    def _render(self, messages: list[JsonObject]) -> str:
        return self._tokenizer.render(messages, tools=[_TOOL])


def _with_arguments(message: JsonObject, as_objects: bool) -> JsonObject:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {
        **message,
        "tool_calls": [
            {**call, "function": _function(call["function"], as_objects)} for call in calls
        ],
    }


def _function(function: JsonObject, as_objects: bool) -> JsonObject:
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
