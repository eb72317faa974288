"""The corpus of answer styles: how models end their replies, each with the verdict of a person who read it.

A file of evaluation/grading/corpus holds one task. `= GOLD` begins a problem (mmlu_pro: `= LETTER | option | option ...`); then every line
is a reply, behind `+` where a reader calls it right and `-` where not. `⏎` stands for a new line; in programs `‹R›` and `‹W›` stand for a
right and a wrong solution and `‹P›` for the prompt. Verdicts were written down before any grader saw them. What the reader goes by: the
reply's own last answer counts, whole, as its writer would explain it; several answers, or one that is taken back, are no answer;
typesetting, units and politeness change nothing; what stands in the reasoning is not said.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "evaluation" / "grading" / "corpus"
TASKS = ("aime24", "gsm8k", "math_500", "mmlu_pro", "humaneval", "live_code_bench")

TOTAL = 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """ Sum of xs. """\n'
TOTAL_TEST = (
    "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n    assert candidate([5, -7, 4]) == 2\n"
)
PAIR = "class Solution:\n    def pair(self, nums: List[int], target: int) -> List[int]:\n        "
PAIR_RIGHT = """class Solution:
    def pair(self, nums: List[int], target: int) -> List[int]:
        for i, a in enumerate(nums):
            for j in range(i):
                if nums[j] + a == target:
                    return [j, i]
"""
SOLUTIONS = {  # right, wrong
    "total": ("def total(xs):\n    return sum(xs)\n", "def total(xs):\n    return 0\n"),
    "stdin": (
        "n = int(input())\nprint(sum(map(int, input().split())))\n",
        "n = int(input())\nprint(max(map(int, input().split())))\n",
    ),
    "call": (PAIR_RIGHT, PAIR_RIGHT.replace("[j, i]", "[i, j]")),
}


@dataclass(frozen=True)
class Style:
    """A reply to a problem. `row` is a line of the task's data file as its publishers write it."""

    task: str
    row: dict[str, Any]
    reply: str
    right: bool


def _number_row(gold: str) -> dict[str, Any]:
    return {"id": gold, "problem": "Which number is it?", "answer": gold}


def _gsm8k_row(gold: str) -> dict[str, Any]:
    return {"question": "How many are there?", "answer": f"So many.\n#### {gold}"}


def _math_row(gold: str) -> dict[str, Any]:
    return {"unique_id": gold, "problem": "What is it?", "answer": gold, "solution": f"\\boxed{{{gold}}}", "subject": "Algebra", "level": 1}


def _choice_row(text: str) -> dict[str, Any]:
    letter, *options = (part.strip() for part in text.split("|"))
    about = {"question_id": 1, "question": "Which is it?", "category": "other", "cot_content": ""}
    return about | {"options": options, "answer": letter, "answer_index": ord(letter) - ord("A")}


def _function_row(name: str) -> dict[str, Any]:
    return {"task_id": "own/0", "prompt": TOTAL, "entry_point": name, "canonical_solution": "    return sum(xs)\n", "test": TOTAL_TEST}


def _contest_row(kind: str) -> dict[str, Any]:
    by_call = kind == "call"
    tests = [("[2, 7, 11]\n9", "[0, 1]"), ("[3, 3]\n6", "[0, 1]")] if by_call else [("3\n1 2 3\n", "6\n"), ("2\n-5 5\n", "0\n")]
    made = [json.dumps([{"input": i, "output": o, "testtype": "functional" if by_call else "stdin"}]) for i, o in tests]
    return {
        "question_id": kind,
        "question_content": "Find two that add to target." if by_call else "Read n, then n integers; print their sum.",
        "starter_code": PAIR if by_call else "",
        "contest_date": "2024-09-01T00:00:00",
        "public_test_cases": made[0],
        "private_test_cases": made[1],
        "metadata": '{"func_name": "pair"}' if by_call else "{}",
    }


_ROWS = {
    "aime24": _number_row,
    "gsm8k": _gsm8k_row,
    "math_500": _math_row,
    "mmlu_pro": _choice_row,
    "humaneval": _function_row,
    "live_code_bench": _contest_row,
}


@cache
def styles(task: str) -> tuple[Style, ...]:
    return tuple(_read(task))


def _read(task: str) -> Iterator[Style]:
    row, solutions = {}, ("", "")
    for line in (CORPUS / f"{task}.txt").read_text(encoding="utf-8").split("\n"):
        if not line:
            continue
        mark, text = line[:1], line[2:]
        if mark == "=":
            row, solutions = _ROWS[task](text), SOLUTIONS.get(text, ("", ""))
            continue
        assert mark in "+-", line
        reply = text.replace("⏎", "\n")
        for name, value in zip(("‹R›", "‹W›", "‹P›"), (*solutions, TOTAL)):
            reply = reply.replace(name, value)
        yield Style(task, row, reply, mark == "+")
