"""Extract the program from a reply and grade it in the sandbox.

A reply may hold several fenced blocks: explanations, the answer, its output, a way to call it. The
program is the last block tagged python that does what is asked for: defines the function, or reads
the input; a block without a tag counts only where none with it does, and a block of another
language never. For a function to complete, the prompt runs first (it has the imports and helpers);
an answer that is only a function body is appended to it.
"""

import ast
import base64
import itertools
import json
import pickletools
import re
import textwrap
import zlib
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.evaluation import sandbox
from quantkit.evaluation.grading.code_blocks import (
    Block,
    blocks,
    is_sketch,
    leading_code,
    parsed,
    parses,
)
from quantkit.evaluation.tasks.definitions import Grade, Problem

CONTEST_TIMEOUT_S = 6.0
_START = re.compile(
    r"^(?:from |import |def |class |@|async def |[A-Za-z_][\w, *]* = )", re.MULTILINE
)
_STARTS = 40  # places in bare text where a program may begin
_READERS = {"input", "stdin", "fileinput", "mmap", "read"}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = ast.Import | ast.ImportFrom | _FUNCTIONS | ast.ClassDef | ast.Assign


def _python_first(fenced: list[Block]) -> list[Block]:
    """The blocks that may be the program, the likeliest first: tagged python before untagged, later
    before earlier."""
    tagged = [block for block in reversed(fenced) if block.is_python]
    return tagged + [block for block in reversed(fenced) if not block.tag]


def _parts(block: Block, fenced: list[Block]) -> list[str]:
    """The block after those before it that only import or define, where it uses a name of theirs
    that it does not define itself."""
    code = parsed(block.source)
    parts, own, missing = [block.source], code.bound, code.used - code.bound
    for other in reversed(fenced[: fenced.index(block)]):
        code = parsed(other.source)
        defines = all(isinstance(node, _DEFINITIONS) for node in code.body)
        names = code.bound if other.is_python and defines else set()
        if missing & names and not own & names:
            parts.insert(0, other.source)
            missing = (missing | code.used) - names
    return parts


def completed_function(text: str, prompt: str, entry_point: str) -> tuple[str, ...] | None:
    """Parts to run in order for a function that `prompt` begins, or None where the reply holds no
    code."""
    # A prompt that ends in a bare signature is not complete by itself.
    before = (prompt,) if parses(prompt) else ()
    fenced = blocks(text)
    candidates = _python_first(fenced)
    for block in candidates:
        if entry_point in parsed(block.source).defined:
            return (*before, *_parts(block, fenced))
    for whole in (text, textwrap.dedent(text)):  # a whole program may be indented as a body is
        if entry_point in parsed(whole).defined:
            return (*before, whole)
    if candidates:
        body = max(reversed(candidates), key=lambda block: _likely_body(prompt, block))
        return (prompt + _as_body(body.source),)
    bare = _unfenced_program(text, lambda source: entry_point in parsed(source).defined)
    if bare is not None:
        return (*before, bare)
    program = prompt + _as_body(text)
    return (program,) if text.strip() and not fenced and parses(program) else None


def _likely_body(prompt: str, block: Block) -> tuple[bool, bool, bool]:
    returns = re.search(r"\b(return|yield|raise)\b", block.source) is not None
    return parses(prompt + _as_body(block.source)), returns, block.is_python


def _unfenced_program(text: str, does: Callable[[str], object]) -> str | None:
    """The program in a text without fences: from a line that looks like code to where it stops
    being code, if `does` accepts it."""
    starts = itertools.islice(_START.finditer(text), _STARTS)
    sources = (leading_code(text[start.start() :]) for start in starts)
    return next(filter(does, sources), None)


def whole_program(text: str, entry_point: str | None = None) -> str | None:
    """A program that reads stdin, or that defines `entry_point` (or a class Solution with it); None
    where the reply holds no code.

    Where no block does that: the last that parses, Python before untagged ones.
    """
    fenced = blocks(text)
    if not fenced:
        if len(parsed(text).body) > 1 or _answers(text, entry_point):
            return text
        return _unfenced_program(text, lambda source: _answers(source, entry_point))
    best = max(
        _python_first(fenced),
        key=lambda block: (
            _answers(block.source, entry_point),
            parses(block.source),
            block.is_python,
        ),
        default=None,
    )
    return "\n".join(_parts(best, fenced)) if best is not None else None


def _answers(source: str, entry_point: str | None) -> int:
    """How well a program does what is asked: 0 not at all, 2 reads stdin or defines the function, 1
    has a class Solution without it."""
    code = parsed(source)
    if entry_point is None:
        words = {getattr(node, name, "") for node in code.nodes for name in ("id", "attr")}
        return 2 if words & _READERS or ("open" in words and "open(0" in source) else 0
    classes = [one for one in code.body if isinstance(one, ast.ClassDef) and one.name == "Solution"]
    methods = [node for found in classes for node in found.body if isinstance(node, _FUNCTIONS)]
    found = {node.name for node in methods if not is_sketch(node)} | code.defined
    return 2 if entry_point in found else len(classes[:1])


def _as_body(source: str) -> str:
    """Lines of a function body, indented if they are not."""
    source = source.expandtabs(4)
    first = next((line for line in source.splitlines() if line.strip()), "")
    return source if first[:1] in " \t" else textwrap.indent(source, "    ")


def grade_with_tests(problem: Problem, text: str) -> Grade:
    """HumanEval: the problem's own check() must return. It and the prompt's helpers run in the
    judge's process, not in the program's."""
    prompt, entry_point = problem.fields["problem"], problem.fields["entry_point"]
    parts = completed_function(text, prompt, entry_point)
    if parts is None:
        return Grade("no-code")
    helpers = next((source for source in (prompt, f"{prompt}\n    pass\n") if parses(source)), "")
    tests = f"{problem.fields['test']}\ncheck({entry_point})"
    return _grade(sandbox.run_function(sandbox.Program(parts, entry_point), helpers, tests))


def _grade(run: sandbox.ProgramRun) -> Grade:
    return Grade(run.status, detail=run.detail)


def grade_with_asserts(problem: Problem, text: str) -> Grade:
    """MBPP: the assertions of a row, on the function of theirs that its reference defines."""
    fields = problem.fields
    tests = fields["test"] or "\n".join([fields["setup"], *fields["asserts"]])
    called = parsed("\n".join(fields["asserts"])).used
    name = next((one for one in parsed(fields["code"]).defined if one in called), None)
    if name is None:
        raise QuantkitError(
            f"{problem.id}: its assertions call no function that its code defines",
            "use the rows as published",
        )
    program = whole_program(text, name)
    if program is None:
        return Grade("no-code")
    return _grade(sandbox.run_function(sandbox.Program((program,), name), "", tests))


# ------------------------------------------------------------------------------------------------------------------- contests

_NAMES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json builtins typing"
)
_STANDARD = _NAMES.split()
# Contest judges give every program the standard library's names; solutions rely on it.
PRELUDE = "\n".join(
    [
        *(f"from {name} import *" for name in _STANDARD),
        *(f"import {name}" for name in _STANDARD[:-2]),
        "sys.setrecursionlimit(50000)",
    ]
)


def contest_tests(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Public and private tests of one LiveCodeBench row: dicts with input and output."""
    return [
        *json.loads(fields["public_tests"]),
        *json.loads(_private_tests(fields["private_tests"])),
    ]


_LARGEST_TESTS = 256 << 20
"""Limit in bytes of the tests of one problem, unpacked."""
_STRING_OPCODES = ["SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"]
_OTHER_OPCODES = ["PROTO", "FRAME", "MEMOIZE", "STOP", "BINPUT", "PUT", "LONG_BINPUT"]


def _private_tests(text: str) -> str:
    """LiveCodeBench stores private tests as JSON, or as base64(zlib(pickle of a JSON string)).

    The pickle is never run: its opcodes are only listed, and exactly one string is expected among
    them.
    """
    if text.lstrip().startswith("["):
        return text
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(text), _LARGEST_TESTS)
        if not unpacking.eof:
            raise ValueError(f"cut off, or more than {_LARGEST_TESTS >> 20} MiB")
        opcodes = list(pickletools.genops(data))
    except (ValueError, zlib.error) as error:
        raise QuantkitError(
            f"private_test_cases cannot be read ({error})",
            "use the code_generation_lite rows as published",
        ) from error
    strings = [argument for opcode, argument, _ in opcodes if opcode.name in _STRING_OPCODES]
    allowed = _STRING_OPCODES + _OTHER_OPCODES
    if len(strings) != 1 or any(opcode.name not in allowed for opcode, _, _ in opcodes):
        raise QuantkitError(
            "private_test_cases hold more than one string",
            "the file is not what LiveCodeBench publishes; do not use it",
        )
    return str(strings[0])


def grade_contest(problem: Problem, text: str) -> Grade:
    """LiveCodeBench: every test, stopping at the first that fails. Expected outputs never enter the
    program's box."""
    function = json.loads(problem.fields.get("metadata") or "{}").get("func_name")
    program = whole_program(text, function)
    if program is None:
        return Grade("no-code")
    tests = contest_tests(problem.fields)
    if function is not None:
        cases = [(_arguments(test["input"]), json.loads(test["output"])) for test in tests]
        whole = sandbox.Program((PRELUDE, program), function)
        return _grade(sandbox.run_function(whole, cases=cases, timeout_s=CONTEST_TIMEOUT_S))
    source = with_prelude(program)
    for number, test in enumerate(tests, start=1):
        run = sandbox.run_script(source, test["input"], timeout_s=CONTEST_TIMEOUT_S)
        if run.status != "passed":
            return Grade(run.status, detail=f"test {number}: {run.detail}")
        if not same_output(run.output, test["output"]):
            return Grade(
                "failed",
                detail=f"test {number}: got {run.output[:200]!r}, expected {test['output'][:200]!r}",
            )
    return Grade("passed")


def _arguments(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def with_prelude(program: str) -> str:
    """The prelude in front; imports from __future__ must come first in what is compiled."""
    return f"{PRELUDE}\nexec(compile({program!r}, 'main.py', 'exec', dont_inherit=True))\n"


def same_output(got: str, expected: str) -> bool:
    """Line by line without surrounding blanks; lines that differ as text may agree as lists of
    decimal numbers."""
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (got, expected))
    return len(ours) == len(theirs) and all(
        a == b or ((found := _decimals(a)) is not None and found == _decimals(b))
        for a, b in zip(ours, theirs)
    )


def _decimals(line: str) -> list[Decimal] | None:
    """As a program prints them: Decimal also takes underscores and the digits of other scripts."""
    words = line.split()
    try:
        return [Decimal(word) for word in words] if set("".join(words)) <= _PRINTED else None
    except InvalidOperation:
        return None


_PRINTED = frozenset("-+.eE0123456789")
