"""The text between the marks of one tool call, read while it is written: the name, and the
arguments as JSON text.

A reader gets the text piece by piece. Its `name` is None until it is known; where it never is, the
text was no call.
"""

import json
import re
from typing import Any, Protocol

_LONGEST_HEAD = 2048
"""Characters in which a call names its function."""


class CallReader(Protocol):
    """name, id: of the call, once they are known; id only where the format has one."""

    name: str | None
    id: str | None

    def push(self, text: str) -> str:
        """The next piece of text -> what of the arguments is certain now."""
        ...

    def finish(self) -> str:
        """The call is over: the rest of its arguments."""
        ...


class _Reader:
    """Text that waits for its head, which is no longer than `_LONGEST_HEAD`."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.id: str | None = None
        self._held = ""

    def _head_of(self, text: str, head: re.Pattern[str]) -> re.Match[str] | None:
        """`text` is held; the head, once it is there."""
        self._held += text
        return head.match(self._held[:_LONGEST_HEAD]) if self.name is None else None


class HeadedReader(_Reader):
    """A head that names the function, then the arguments as they are. head: matches the whole head;
    tail: what follows the arguments."""

    def __init__(self, head: re.Pattern[str], tail: str = "") -> None:
        super().__init__()
        self._head, self._tail, self._empty = head, tail, True

    def push(self, text: str) -> str:
        if found := self._head_of(text, self._head):
            self.name, self.id = found["name"], found.groupdict().get("id")
            self._held = self._held[found.end() :]
        if self.name is None:
            return ""
        certain = len(self._held.rstrip(" \n\r\t`" if self._tail else " \n\r\t"))
        return self._release(certain)

    def finish(self) -> str:
        if self.name is None:
            return ""
        rest = self._held.rstrip().removesuffix(self._tail).rstrip()
        self._held = rest
        return self._release(len(rest)) or ("{}" if self._empty else "")

    def _release(self, count: int) -> str:
        released, self._held = self._held[:count], self._held[count:]
        self._empty = self._empty and not released
        return released


class JsonReader(_Reader):
    """An object with `name` and `arguments`, as Hermes writes it. Written in another order it is
    read when it is whole."""

    _HEAD = re.compile(
        r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
    )

    def __init__(self) -> None:
        super().__init__()
        self._at = 0
        self._depth, self._quoted, self._escaped, self._closed = 0, False, False, False

    def push(self, text: str) -> str:
        if found := self._head_of(text, self._HEAD):
            self.name, self._at = json.loads(found[1]), found.end()
        return self._arguments() if self.name is not None else ""

    def finish(self) -> str:
        if self.name is not None:
            return ""
        try:
            call = json.loads(self._held)
        except (ValueError, RecursionError):
            return ""
        arguments = (
            call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        )
        if arguments is None or not isinstance(call.get("name"), str):
            return ""
        self.name = call["name"]
        return (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )

    def _arguments(self) -> str:
        """What is new of the object that begins where the head ends, up to its closing brace."""
        start = self._at
        while self._at < len(self._held) and not self._closed:
            self._take(self._held[self._at])
            self._at += 1
        return self._held[start : self._at]

    def _take(self, character: str) -> None:
        if self._quoted:
            ends = character == '"' and not self._escaped
            self._escaped = character == "\\" and not self._escaped
            self._quoted = not ends
        elif character == '"':
            self._quoted = True
        else:
            self._depth += (character in "{[") - (character in "}]")
            self._closed = self._depth == 0


class XmlReader(_Reader):
    """<function=NAME> with <parameter=KEY>VALUE</parameter>, as Qwen3-Coder writes it. schemas: of
    each function's parameters.

    A value is text; where its schema wants something else it is read as JSON, and stays text where
    it is none.
    """

    _HEAD = re.compile(r"\s*<function=(?P<name>[^>\n]+)>")
    _BEGIN = re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>")
    _END = "</parameter>"

    def __init__(self, schemas: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self._schemas, self._looked, self._count = schemas, 0, 0

    def push(self, text: str) -> str:
        if found := self._head_of(text, self._HEAD):
            self.name, self._held = found["name"].strip(), self._held[found.end() :]
        if self.name is None:
            return ""
        pieces = ""
        while (end := self._held.find(self._END, self._looked)) >= 0:
            pieces += self._parameter(self._held[:end])
            self._held, self._looked = self._held[end + len(self._END) :], 0
        self._looked = max(len(self._held) - len(self._END), 0)
        return pieces

    def finish(self) -> str:
        if self.name is None:
            return ""
        return "}" if self._count else "{}"

    def _parameter(self, text: str) -> str:
        found = self._BEGIN.match(text)
        if found is None:
            return ""
        value = text[found.end() :].removeprefix("\n").removesuffix("\n")
        opening = ", " if self._count else "{"
        self._count += 1
        key = found["key"].strip()
        return (
            f"{opening}{json.dumps(key, ensure_ascii=False)}: "
            f"{json.dumps(self._value(key, value), ensure_ascii=False)}"
        )

    def _value(self, key: str, text: str) -> Any:
        schema = self._schemas.get(self.name or "", {}).get("properties", {}).get(key)
        if takes_text(schema):
            return text
        try:
            return json.loads(text, parse_constant=lambda name: name)
        except (ValueError, RecursionError):
            return text


def takes_text(schema: Any) -> bool:
    """Whether a parameter of this schema may be a text: where it says nothing else."""
    if not isinstance(schema, dict):
        return True
    kinds = schema.get("type")
    if kinds is not None:
        return "string" in (kinds if isinstance(kinds, list) else [kinds])
    options = (
        schema.get("enum") or [schema["const"]] if "const" in schema or schema.get("enum") else None
    )
    if options is not None:
        return any(isinstance(one, str) for one in options)
    branches = [
        branch
        for name in ("anyOf", "oneOf", "allOf")
        for branch in schema.get(name) or []
        if isinstance(branch, dict)
    ]
    return any(takes_text(branch) for branch in branches) if branches else "$ref" not in schema
