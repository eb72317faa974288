"""Code blocks of a reply: fenced, in HTML, or as a string in a JSON object."""

import ast
import html
import json
import re
import textwrap
from dataclasses import dataclass

from quantkit.evaluation.grading.source_names import LONGEST, parses, tree_of

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*(?:\{[ \t]*\.?)?([\w+#.-]*)")
# A fence that shares its line: with the text before the block, with the first line of the program,
# or with its last.
_LOOSE_FENCE = re.compile(
    r"(?m)^(?P<intro>[^\n`]*[^\s`>])[ \t]*(?P<opens>```(?:python|py)\d?)[ \t]*$"
    r"|^(?P<tag>```(?:python|py)\d?)[ "
    r"\t]+(?=(?:def|class|import|from)\b)|^(?P<last>[^\n`]*[^\s`>])```[ \t]*$"
)
_QUOTED = re.compile(r"(?m)^[ \t]*>[ \t]?(?=[ \t]*(?:`{3,}|~{3,}))")
_MARKED_UP = re.compile(
    r"(?is)<pre[^<>]*>\s*<code(?:[^<>]*language-([\w+]+))?[^<>]*>(.*?)</code>\s*</pre>"
)
_CUTS = 40  # places where a program may end
_CLOSERS = 8  # fences inside one block that are tried as its end
_PYTHON = re.compile(r"(?:py|python|ipython|pypy)[\d.]*")


@dataclass(frozen=True)
class Block:
    """A fenced block: the first word after the opening fence, in lower case, and the text without
    common indentation."""

    tag: str
    source: str

    @property
    def is_python(self) -> bool:
        return _PYTHON.fullmatch(self.tag) is not None


def blocks(text: str) -> list[Block]:
    """Fenced blocks in order. A block ends at the first fence of its kind where it parses, else at
    the first: docstrings may hold fences.

    A last block that is never closed counts to the end of the text.
    """
    text = _MARKED_UP.sub(
        lambda match: f"```{match[1] or ''}\n{html.unescape(match[2])}\n```", text
    )
    if _QUOTED.search(text):
        text = re.sub(r"(?m)^[ \t]*>[ \t]?", "", text)
    lines = _LOOSE_FENCE.sub(_on_its_own_line, text).splitlines(keepends=True)
    found, number, start = [], 0, 0
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        number += 1
        if opened is None or "`" in lines[number - 1][opened.end() :]:
            continue
        before = "" if opened[2] else _code_at_end("".join(lines[start : number - 1]))
        end = number - 1 if before else _end(lines, number, opened[1])
        source = before or textwrap.dedent("".join(lines[number:end]))
        source = source if before or end < len(lines) else leading_code(source) or source
        block = Block(opened[2].lower(), source)
        found += (_in_json(block.source) if block.tag == "json" else []) or [block]
        number = start = end + 1
    return found or _in_json(text)


_BEGINS = re.compile(r"(?m)^[ \t]*(?:(?:async )?def|class|import|from|@\w+)\b")


def _code_at_end(text: str) -> str:
    """The code that `text` ends with, where a fence without a partner closes it: from its first
    definition or import, or all of it as the body of a function; "" where it is prose."""
    begins = _BEGINS.search(text)
    program = textwrap.dedent(text[begins.start() :]) if begins else ""
    if program and parses(program):
        return program
    body = tree_of(f"def body():\n{textwrap.indent(textwrap.dedent(text), '    ')}")
    nodes = ast.walk(body) if isinstance(body, ast.Module) else ()
    return text if any(isinstance(node, ast.Return | ast.Assign) for node in nodes) else ""


def leading_code(source: str) -> str:
    """The lines of `source` up to where it stops being Python."""
    lines = source.splitlines(keepends=True)
    for _ in range(_CUTS):
        tree = tree_of("".join(lines))
        if isinstance(tree, ast.Module):
            break
        lines = lines[: max(0, min(tree, len(lines)) - 1)]
    statements = tree.body if isinstance(tree, ast.Module) else []
    ends = [
        node.end_lineno or 0
        for node in statements
        if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call)
    ]
    return "".join(lines[: max(ends, default=0)])


def _on_its_own_line(match: re.Match[str]) -> str:
    if match["tag"]:
        return f"{match['tag']}\n"
    return f"{match['intro']}\n{match['opens']}" if match["opens"] else f"{match['last']}\n```"


def _in_json(text: str) -> list[Block]:
    """The programs among the strings of a reply, or of a block, that is one JSON object."""
    text = re.sub(r"</?tool_call>", "", text).strip()
    try:
        held = json.loads(text) if text.startswith("{") and len(text) <= LONGEST else {}
    except (ValueError, RecursionError):
        return []
    strings, values = [], list(held.values())
    for value in values:
        values += value.values() if isinstance(value, dict) else []
        strings += [value] if isinstance(value, str) else []
    return [
        Block("python", source) for source in strings if "\n" in source.strip() and parses(source)
    ]


def _end(lines: list[str], first: int, fence: str) -> int:
    """The line of the fence that closes a block whose text begins at `first`."""
    closing = re.compile(rf"[ \t]*{fence[0]}{{{len(fence)},}}[ \t]*$")
    ends = []
    for number in range(first, len(lines)):
        if closing.match(lines[number].rstrip("\r\n")):
            ends.append(number)
            if parses(textwrap.dedent("".join(lines[first:number]))):
                return number
            if len(ends) == _CLOSERS:
                break
    return ends[0] if ends else len(lines)
