"""Mutants by class of fault, at every place of a source where one fits. The tests were written
before anybody thought of them.

The classes: an operand that is not made contiguous, another axis, another dtype, a widening left
out, an offset with the other sign, a layout not changed, a barrier left out. What a class makes of
a whole source is listed, or a part of it drawn by `some`.
"""

import random
import re

from by_rule import Mutant, numbered

PYTHON = (
    ("missing contiguous", re.compile(r"(?<=[\w)\]])\.contiguous\(\)"), ""),
    ("widening left out", re.compile(r"(?<=[\w)\]])\.float\(\)"), ""),
    ("wrong axis", re.compile(r"\bdim=-1\b"), "dim=0"),
    ("wrong axis", re.compile(r"\bdim=1\b"), "dim=0"),
    ("wrong axis", re.compile(r"unsqueeze\(1\)"), "unsqueeze(0)"),
    ("wrong axis", re.compile(r"unsqueeze\(2\)"), "unsqueeze(1)"),
    ("axes not swapped", re.compile(r"(?<=[\w)\]])\.transpose\(\w+, \w+\)"), ""),
    ("wrong dtype", re.compile(r"\btorch\.float32\b"), "torch.bfloat16"),
    ("wrong dtype", re.compile(r"\btorch\.int32\b"), "torch.int64"),
    ("wrong dtype", re.compile(r"\btorch\.int64\b"), "torch.int32"),
    ("wrong dtype", re.compile(r"\btorch\.bfloat16\b"), "torch.float16"),
    ("wrong dtype", re.compile(r"\bnp\.int32\b"), "np.int64"),
    ("wrong sign", re.compile(r"(?<=[=(,] )-(?=\w)"), ""),
    (
        "kept from before",
        re.compile(r"(?<=\n)( +)\w[\w.\[\]:, ]*\.(?:fill|copy|fill_|copy_|clear)\([^\n]*\)(?=\n)"),
        r"\1pass",
    ),
    ("other default", re.compile(r"\b0\.0\b"), "1.0"),
)
CPP = (
    ("barrier left out", re.compile(r"\bPipeBarrier<PIPE_V>\(\);"), ";"),
    ("wrong stride", re.compile(r"(?<=BinaryRepeatParams\()1, 1, 1, 8, 8,"), "1, 1, 1, 8, 4,"),
    ("wrong bound", re.compile(r"(?<=static_cast<uint16_t>\()item\.rows(?=\))"), "1"),
    ("wrong operand", re.compile(r"\bBrcbRepeatParams\(1, 8\)"), "BrcbRepeatParams(1, 4)"),
)
TEXT = re.compile(r'"""[\s\S]*?"""|#[^\n]*|//[^\n]*|/\*[\s\S]*?\*/')


def of_source(path: str, source: str) -> list[Mutant]:
    """All that the classes make of it; comments, docstrings, rules' words and assertions are left
    alone."""
    left_alone = [one.span() for one in TEXT.finditer(source)]
    found = []
    for rule, pattern, new in CPP if path.endswith((".cpp", ".h")) else PYTHON:
        for one in pattern.finditer(source):
            line = source[source.rfind("\n", 0, one.start()) + 1 : one.start()]
            if any(
                first <= one.start() < last for first, last in left_alone
            ) or line.lstrip().startswith("assert "):
                continue
            function = _function(source, one.start())
            number = source.count("\n", 0, one.start()) + 1
            found.append(
                Mutant(
                    path, one.start(), one.end(), one.expand(new), one[0], rule, number, function
                )
            )
    return numbered(found)


def some(path: str, source: str, count: int) -> list[Mutant]:
    """So many of them at most, always the same."""
    every = of_source(path, source)
    return random.Random(path).sample(every, min(count, len(every)))


def _function(source: str, place: int) -> str:
    """The outermost function or class of Python around a place."""
    found = re.findall(r"^(?:def|class) (\w+)", source[:place], re.MULTILINE)
    return found[-1] if found else ""
