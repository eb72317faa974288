"""Grammars in which a model must call a tool, or may, in the format it was trained on."""

import json
import re

from tokenizers import Tokenizer

from quantkit.common.result import JsonObject
from quantkit.executor.sampling.grammar import SPACES, lark
from quantkit.executor.server.tools.formats import Tool, ToolFormat, ToolUse
from quantkit.executor.server.tools.parsers import takes_text

_TEXT = "TEXT: /(.|\\n)*/"


def schema_term(schema: JsonObject) -> str:
    """A schema as a term of a Lark grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': SPACES})}"


def calls_grammar(
    form: ToolFormat, use: ToolUse, tokenizer: Tokenizer, answer: JsonObject | None
) -> str | None:
    """What an answer to a request with tools may be; None where anything may be.

    One of the forced tools must be called. Else, where some tools are strict, text may come first,
    and a call's arguments fit the schema of
    a strict tool. answer: the schema of an answer that calls nothing.
    """
    writer = _Writer(form, tokenizer)
    if use.forced:
        return lark(
            "\n".join(
                [
                    f"start: {writer.calls(use.parallel)}",
                    writer.call(use.forced, strict=False),
                    writer.rules,
                ]
            )
        )
    if answer is not None:
        start = f"start: {writer.calls(use.parallel)} | {schema_term(answer)}"
        return lark("\n".join([start, writer.call(use.tools, strict=False), writer.rules]))
    if not any(tool.strict for tool in use.tools):
        return None
    begun = writer.calls(use.parallel, begun=True)
    lines = [
        f"start: TEXT | {writer.trigger} {begun}",
        writer.call(use.tools, strict=True),
        writer.rules,
        _TEXT,
    ]
    return lark("\n".join([*lines, writer.trigger_rule]))


class _Writer:
    """Rules of a format. Marks that are tokens of their own are meant as these."""

    def __init__(self, form: ToolFormat, tokenizer: Tokenizer) -> None:
        self._form, self._tokenizer = form, tokenizer
        self._special = {
            id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._rules: list[str] = []

    @property
    def rules(self) -> str:
        return "\n".join(self._rules)

    def calls(self, parallel: bool, *, begun: bool = False) -> str:
        """All calls of an answer; begun: the first mark is there already."""
        form = self._form
        begin, end = (self._literal(mark) for mark in form.section)
        more = f"({self._literal(form.between)} call)*" if parallel else ""
        if not form.section[0]:
            return f"{'call_rest' if begun else 'call'} {more}"
        return f"{'' if begun else begin} call {more} {end}"

    def call(self, tools: tuple[Tool, ...], *, strict: bool) -> str:
        """The rules of one call. strict: arguments of tools that are not may be any object."""
        bodies = " | ".join(
            self._body(tool, place, strict and not tool.strict) for place, tool in enumerate(tools)
        )
        begin, end = (self._literal(mark) for mark in self._form.call)
        return f"call: {begin} call_rest\ncall_rest: ({bodies}) {end}"

    @property
    def trigger(self) -> str:
        """Text, and the mark that begins the calls."""
        return (
            f"TEXT {self._literal(self._form.opening)}"
            if self._is_special(self._form.opening)
            else "trigger"
        )

    @property
    def trigger_rule(self) -> str:
        opening = self._form.opening
        return (
            ""
            if self._is_special(opening)
            else f"trigger[lazy]: TEXT {json.dumps(opening, ensure_ascii=False)}"
        )

    def _body(self, tool: Tool, place: int, free: bool) -> str:
        head, tail = self._form.head.format(name=tool.name, index="\0"), self._form.tail.format()
        parameters = {"type": "object"} if free else tool.parameters
        arguments = (
            self._elements(parameters, place) if self._form.in_xml else schema_term(parameters)
        )
        return f"{self._literal(head)} {arguments} {self._literal(tail)}"

    def _elements(self, schema: JsonObject, place: int) -> str:
        """<parameter=KEY> elements, in the schema's order; those that are not required may be left
        out."""
        terms = []
        for number, (key, one) in enumerate(schema.get("properties", {}).items()):
            begin = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
            end, rule = '"\\n</parameter>\\n"', f"p{place}_{number}"
            optional = "" if key in schema.get("required", []) else "?"
            if takes_text(one) and not (isinstance(one, dict) and one.get("enum")):
                self._rules.append(f"{rule}[lazy]: {_TEXT.partition(': ')[2]} {end}")
                terms.append(f"({begin} {rule}){optional}")
                continue
            values = one.get("enum") if isinstance(one, dict) and takes_text(one) else None
            definitions = {
                str(name): schema[name] for name in ("$defs", "definitions") if name in schema
            }
            value = (
                " | ".join(json.dumps(str(text), ensure_ascii=False) for text in values)
                if values
                else schema_term({**definitions, **one})
            )
            terms.append(f"({begin} ({value}) {end}){optional}")
        return " ".join(terms)

    def _literal(self, text: str) -> str:
        """Text as terms: marks that are tokens by their ids, a NUL as a number, the rest as it
        is."""
        marks = "|".join(re.escape(mark) for mark in [*self._form.marks, "\0"])
        return " ".join(self._term(part) for part in re.split(f"({marks})", text) if part)

    def _term(self, part: str) -> str:
        if part == "\0":
            return "/0|[1-9][0-9]{0,2}/"
        token = self._tokenizer.token_to_id(part) if part in self._form.marks else None
        return json.dumps(part, ensure_ascii=False) if token is None else f"<[{token}]>"

    def _is_special(self, mark: str) -> bool:
        return self._tokenizer.token_to_id(mark) in self._special
