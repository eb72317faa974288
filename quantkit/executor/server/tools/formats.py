"""How models write tool calls: marks around the calls, and their content.

| format | models | a call |
|---|---|---|
| hermes | Qwen2.5, Qwen3, Hermes | <tool_call>{"name": ..., "arguments": {...}}</tool_call> |
| qwen3_coder | Qwen3-Coder | <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call> |
| deepseek_v3 | DeepSeek-V3, R1 | a name and ```json between the marks of V3's template |
| deepseek_v31 | DeepSeek-V3.1 and later | a name and its arguments between the same marks |
| kimi_k2 | Kimi-K2 | functions.NAME:INDEX and its arguments between marks of its own |

The formats are those of the models' own chat templates; which one a model has is asked of its
template.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantkit.common.errors import UsageError
from quantkit.executor.server.tools.definitions import Tool
from quantkit.executor.server.tools.parsers import CallReader, HeadedReader, JsonReader, XmlReader

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


_DEEPSEEK_MARKS: dict[str, Any] = {
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
