"""Fenced code blocks of a reply, and the names that Python source defines, imports and uses."""

import ast
import re
import textwrap
from dataclasses import dataclass
from functools import lru_cache

LONGEST = 1 << 18  # characters of a program; parsing more takes longer than it is worth
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*(?:\{[ \t]*\.?)?([\w+#.-]*)")
# A fence that shares its line: with the text before the block, with the first line of the program,
# or with its last.
_LOOSE_FENCE = re.compile(
    r"(?m)^([^\n`]*[^\s`>])[ \t]*(?=```(?:python|py)\d?[ \t]*$)"
    r"|^(```(?:python|py)\d?)[ \t]+(?=(?:def|class|import|from)\b)|^([^\n`]*[^\s`>])(?=```[ \t]*$)"
)
_CUTS = 40  # places where a program may end
_CLOSERS = 8  # fences inside one block that are tried as its end
_PYTHON = ("py", "python", "ipython", "pypy")  # and their versions
_BEGINS = re.compile(r"(?m)^[ \t]*(?:(?:async )?def|class|import|from|@\w+)\b")


@dataclass(frozen=True)
class Block:
    """A fenced block: the first word after the opening fence, in lower case, and the text without
    common indentation."""

    tag: str
    source: str

    @property
    def is_python(self) -> bool:
        return self.tag.rstrip("0123456789.") in _PYTHON


def blocks(text: str) -> list[Block]:
    """Fenced blocks in order. A block ends at the first fence of its kind where it parses, else at
    the first: docstrings may hold fences. A last block that is never closed counts to the end of
    the text."""
    text = re.sub(r"(?m)^[ \t]*>(?!>)[ \t]?", "", text)  # quoted
    lines = _LOOSE_FENCE.sub(lambda match: f"{match[0]}\n", text).splitlines(keepends=True)
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
        found.append(Block(opened[2].lower(), source))
        number = start = end + 1
    return found


def _code_at_end(text: str) -> str:
    """The code that `text` ends with, where a fence without a partner closes it: from its first
    definition or import, or all of it as the body of a function; "" where it is prose."""
    begins = _BEGINS.search(text)
    program = textwrap.dedent(text[begins.start() :]) if begins else ""
    if program and parses(program):
        return program
    body = f"def body():\n{textwrap.indent(textwrap.dedent(text), '    ')}"
    found = any(isinstance(node, ast.Return | ast.Assign) for node in parsed(body).nodes)
    return text if found else ""


def leading_code(source: str) -> str:
    """The lines of `source` up to where it stops being Python."""
    lines = source.splitlines(keepends=True)
    for _ in range(_CUTS):
        code = parsed("".join(lines))
        if code.fault is None:
            break
        lines = lines[: max(0, min(code.fault, len(lines)) - 1)]
    ends = [
        node.end_lineno or 0
        for node in code.body
        if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call)
    ]
    return "".join(lines[: max(ends, default=0)])


def _end(lines: list[str], first: int, fence: str) -> int:
    """The line of the fence that closes a block whose text begins at `first`."""
    closing = re.compile(rf"[ \t]*{fence[0]}{{{len(fence)},}}\s*")
    ends = [n for n in range(first, len(lines)) if closing.fullmatch(lines[n])]
    whole = (n for n in ends[:_CLOSERS] if parses(textwrap.dedent("".join(lines[first:n]))))
    return next(whole, ends[0] if ends else len(lines))


# ----------------------------------------------------------------------------------------- names


@dataclass(frozen=True)
class Code:
    """Source as Python reads it: its statements, and the line where it stops being Python, None
    where all of it is."""

    body: list[ast.stmt]
    fault: int | None = None

    @property
    def nodes(self) -> list[ast.AST]:
        return [node for statement in self.body for node in ast.walk(statement)]

    @property
    def used(self) -> set[str]:
        """Names that are read anywhere."""
        names = (node for node in self.nodes if isinstance(node, ast.Name))
        return {node.id for node in names if isinstance(node.ctx, ast.Load)}

    @property
    def defined(self) -> set[str]:
        """Names of functions, classes and variables at the top, other than functions that are only
        sketched."""
        found = {
            node.name for node in self.body if isinstance(node, _NAMED) and not is_sketch(node)
        }
        assigned = (node.targets for node in self.body if isinstance(node, ast.Assign))
        return found | {
            target.id for targets in assigned for target in targets if isinstance(target, ast.Name)
        }

    @property
    def bound(self) -> set[str]:
        """Names that are defined or imported at the top."""
        imports = [node for node in self.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [alias.asname or alias.name for node in imports for alias in node.names]
        return self.defined | {name.split(".")[0] for name in names}


_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_NAMED = _FUNCTIONS | ast.ClassDef


@lru_cache(maxsize=64)
def parsed(source: str) -> Code:
    try:
        if len(source) <= LONGEST:
            return Code(ast.parse(source).body)
    except SyntaxError as error:
        return Code([], error.lineno or 0)
    except (ValueError, RecursionError, MemoryError):
        pass
    return Code([], 0)


def parses(source: str) -> bool:
    return parsed(source).fault is None


def is_sketch(node: ast.stmt) -> bool:
    """A function whose body is `...` or `pass`, perhaps after a docstring."""
    return isinstance(node, _FUNCTIONS) and all(
        isinstance(one, ast.Pass)
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        for one in node.body
    )
