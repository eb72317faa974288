"""Finding the program in a reply, and grading it in the sandbox.

The program is the last fenced block that parses and defines what is asked for: explanations before it often hold snippets, and the first
block is not the answer. For a function to complete, the prompt stays in front (it has the imports and helpers); an answer that is only a
function body is appended to it.
"""

import ast
import base64
import json
import pickletools
import re
import textwrap
import zlib
from decimal import Decimal, InvalidOperation
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.evaluate import sandbox
from quantkit.evaluate.problems import Grade, Problem

CONTEST_TIMEOUT_S = 6.0
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_START = re.compile(r"^(?:from |import |def |class |@|async def )", re.MULTILINE)


def blocks(text: str) -> list[str]:
    """Contents of the fenced blocks, in order. A last block that is never closed counts to the end of the text."""
    found = [textwrap.dedent(body) for body in _FENCE.findall(text)]
    rest = _FENCE.sub("", text)
    opened = re.search(r"^[ \t]*```[^\n`]*\n(.+)\Z", rest, re.DOTALL | re.MULTILINE)
    return [*found, opened[1]] if opened else found


def completed_function(text: str, prompt: str, entry_point: str) -> str | None:
    """The whole program for a function that `prompt` begins, or None where the reply holds no code."""
    fenced = blocks(text)
    for candidate in reversed([text, *fenced]):
        if _defines(candidate, entry_point):
            whole = f"{prompt}\n{candidate}"
            return whole if _parses(whole) else candidate  # a prompt that ends in a bare signature cannot stand by itself
    if fenced:
        return prompt + _as_body(fenced[-1])
    for start in _START.finditer(text):
        if _defines(text[start.start() :], entry_point):
            return f"{prompt}\n{text[start.start() :]}"
    program = prompt + _as_body(text)
    return program if text.strip() and _parses(program) else None


def whole_program(text: str) -> str | None:
    """The last fenced block that parses, else the last fenced block, else the text if it is code, else None."""
    fenced = blocks(text)
    for candidate in reversed(fenced):
        if _parses(candidate):
            return candidate
    if fenced:
        return fenced[-1]
    return text if text.strip() and _parses(text) and len(ast.parse(text).body) > 1 else None


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _defines(source: str, name: str) -> bool:
    if not _parses(source):
        return False
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            return True
    return False


def _as_body(source: str) -> str:
    """Lines of a function body, indented if they are not."""
    lines = source.splitlines()
    first = next((line for line in lines if line.strip()), "")
    return source if first[:1] in " \t" else textwrap.indent(source, "    ")


def grade_with_tests(problem: Problem, text: str) -> Grade:
    """HumanEval: the problem's own check() must return."""
    fields = problem.fields
    program = completed_function(text, fields["problem"], fields["entry_point"])
    if program is None:
        return Grade("no-code")
    run = sandbox.run_tests(program, f"{fields['test']}\ncheck({fields['entry_point']})", fields["entry_point"])
    return Grade(run.status, run.status == "passed", run.status == "passed", detail=run.detail)


# ------------------------------------------------------------------------------------------------------------------- contests

_STANDARD = ["string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools", "functools"]
_STANDARD += ["operator", "io", "sys", "json", "builtins", "typing"]
# Contest judges give every program the standard library's names; solutions rely on it.
PRELUDE = "\n".join(
    [*(f"from {name} import *" for name in _STANDARD), *(f"import {name}" for name in _STANDARD[:-2]), "sys.setrecursionlimit(50000)"]
)


def contest_tests(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Public and private tests of one LiveCodeBench row: dicts with input and output."""
    return [*json.loads(fields["public_tests"]), *json.loads(_private_tests(fields["private_tests"]))]


def _private_tests(text: str) -> str:
    """LiveCodeBench stores private tests as JSON, or as base64(zlib(pickle of a JSON string)).

    The pickle is never run: its opcodes are only listed, and exactly one string is expected among them.
    """
    if text.lstrip().startswith("["):
        return text
    try:
        opcodes = list(pickletools.genops(zlib.decompress(base64.b64decode(text))))
    except (ValueError, zlib.error) as error:
        raise QuantkitError(f"private_test_cases cannot be read ({error})", "use the code_generation_lite rows as published") from error
    allowed = {
        "PROTO",
        "FRAME",
        "MEMOIZE",
        "STOP",
        "BINPUT",
        "PUT",
        "LONG_BINPUT",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "UNICODE",
    }
    strings = [argument for opcode, argument, _ in opcodes if "UNICODE" in opcode.name]
    if len(strings) != 1 or any(opcode.name not in allowed for opcode, _, _ in opcodes):
        raise QuantkitError("private_test_cases hold more than one string", "the file is not what LiveCodeBench publishes; do not use it")
    return str(strings[0])


def grade_contest(problem: Problem, text: str) -> Grade:
    """LiveCodeBench: every test, stopping at the first that fails."""
    program = whole_program(text)
    if program is None:
        return Grade("no-code")
    program = f"{PRELUDE}\n{program}"
    function = json.loads(problem.fields.get("metadata") or "{}").get("func_name")
    for number, test in enumerate(contest_tests(problem.fields), start=1):
        run = _run_contest(program, function, test)
        if run.status != "passed":
            return Grade(run.status, detail=f"test {number}: {run.detail}")
        right = same_output(run.output, test["output"]) if function is None else run.result == json.loads(test["output"])
        if not right:
            shown = run.output if function is None else json.dumps(run.result)
            return Grade("failed", detail=f"test {number}: got {shown[:200]!r}, expected {test['output'][:200]!r}")
    return Grade("passed", True, True)


def _run_contest(program: str, function: str | None, test: dict[str, Any]) -> sandbox.Run:
    if function is None:
        return sandbox.run_script(program, test["input"], timeout_s=CONTEST_TIMEOUT_S)
    arguments = [json.loads(line) for line in test["input"].split("\n") if line.strip()]
    return sandbox.run_call(program, function, arguments, timeout_s=CONTEST_TIMEOUT_S)


def same_output(got: str, expected: str) -> bool:
    """Line by line without surrounding blanks; lines that differ as text may agree as lists of decimal numbers."""
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (got, expected))
    return len(ours) == len(theirs) and all(a == b or _same_numbers(a, b) for a, b in zip(ours, theirs))


def _same_numbers(a: str, b: str) -> bool:
    try:
        return [Decimal(word) for word in a.split()] == [Decimal(word) for word in b.split()]
    except InvalidOperation:
        return False
