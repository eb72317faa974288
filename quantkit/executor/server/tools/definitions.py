"""The tools that a request offers a model, and whether it must call one."""

import json
import re
from dataclasses import dataclass
from typing import Any

from quantkit.common.errors import QuantkitError

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Tool:
    """parameters: the JSON schema of the arguments. strict: whether arguments must fit it even
    where the model calls of itself."""

    name: str
    parameters: dict[str, Any]
    strict: bool


@dataclass(frozen=True)
class ToolUse:
    """What a request says of tools. shown: the tools as the chat template gets them; forced: those
    of which one must be called.

    parallel: whether an answer may call more than once.
    """

    tools: tuple[Tool, ...] = ()
    shown: tuple[dict[str, Any], ...] = ()
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
    return ToolUse(tuple(known), tuple(tools), _forced(known, choice), parallel)


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
