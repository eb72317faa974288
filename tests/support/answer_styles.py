"""The corpus of answer styles: how models end their replies, each with the verdict of a person who
read it.

A file of evaluation/grading/corpus holds one task. `= GOLD` begins a problem (mmlu_pro: `= LETTER | option | option ...`);
then every line is a reply, after `+` where a reader calls it right and `-` where not. `⏎` stands for a new line; in programs
`‹R›` and `‹W›` stand for a right and a wrong solution and `‹P›` for the prompt. Verdicts were written down before any grader saw
them: the reply's own last answer counts, whole, as its writer would explain it; several answers, or one that is taken back, are
no answer; typesetting, units and politeness change nothing; what is in the reasoning is not said. The lines are a draw from
15,550, by task and by `is_common`.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parents[1] / "evaluation" / "grading" / "corpus"
QUESTION = "Which is it?"
TASKS = ("aime24", "gsm8k", "math_500", "mmlu_pro", "humaneval", "live_code_bench")

TOTAL = 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """ Sum of xs. """\n'
TOTAL_TEST = (
    "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) "
    "== 0\n    assert candidate([5, -7, 4]) == 2\n"
)
RUNNING = (
    "def running_total(xs: list) -> list:\n    ''' Running sums of xs.\n    >>> "
    "running_total([1, 2, 3])\n    [1, 3, 6]\n    '''\n"
)
RUNNING_RIGHT = """def running_total(xs: list) -> list:
    out, s = [], 0
    for x in xs:
        s += x
        out.append(s)
    return out
"""
RUNNING_TEST = (
    "def check(candidate):\n    assert candidate([]) == []\n    assert candidate([5, "
    "-5, 2]) == [5, 0, 2]\n"
)
VOWELS = """from typing import List


def _is_vowel(c: str) -> bool:
    return c in "aeiou"


def vowel_counts(words: List[str]) -> List[int]:
    ''' How many lower-case vowels every word has. '''
"""
VOWELS_RIGHT = (
    "def vowel_counts(words: List[str]) -> List[int]:\n    return [sum(_is_vowel(c) "
    "for c in w) for w in words]\n"
)
VOWELS_TEST = (
    "def check(candidate):\n    assert candidate([]) == []\n    assert "
    "candidate(['tree', 'sky', 'aeiou']) == [2, 0, 5]\n"
)
FUNCTIONS = {
    "total": (TOTAL, TOTAL_TEST),
    "running": (RUNNING, RUNNING_TEST),
    "vowels": (VOWELS, VOWELS_TEST),
}  # prompt, tests
PAIR = "class Solution:\n    def pair(self, nums: List[int], target: int) -> List[int]:\n        "
PAIR_RIGHT = """class Solution:
    def pair(self, nums: List[int], target: int) -> List[int]:
        for i, a in enumerate(nums):
            for j in range(i):
                if nums[j] + a == target:
                    return [j, i]
"""
GAP = "class Solution:\n    def widestGap(self, nums: List[int]) -> int:\n        "
GAP_RIGHT = (
    GAP + "nums = sorted(nums)\n        return max((b - a for a, b in zip(nums, nums[1:])), "
    "default=0)\n"
)
CALLS = {  # starter code, method, tests
    "call": (PAIR, "pair", [("[2, 7, 11]\n9", "[0, 1]"), ("[3, 3]\n6", "[0, 1]")]),
    "gap": (GAP, "widestGap", [("[3, 6, 9, 1]", "3"), ("[10]", "0")]),
}
SOLUTIONS = {  # right, wrong
    "running": (
        RUNNING_RIGHT,
        "def running_total(xs: list) -> list:\n    return [sum(xs)] * len(xs)\n",
    ),
    "vowels": (
        VOWELS_RIGHT,
        "def vowel_counts(words: List[str]) -> List[int]:\n    return [len(w) for w in words]\n",
    ),
    "gap": (GAP_RIGHT, GAP + "return max(nums) - min(nums)\n"),
    "total": ("def total(xs):\n    return sum(xs)\n", "def total(xs):\n    return 0\n"),
    "stdin": (
        "n = int(input())\nprint(sum(map(int, input().split())))\n",
        "n = int(input())\nprint(max(map(int, input().split())))\n",
    ),
    "call": (PAIR_RIGHT, PAIR_RIGHT.replace("[j, i]", "[i, j]")),
}


_BOXES = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_NUMBER = re.compile(
    r"[\s$]*(?:[A-Za-z+ ]{1,8}=\s*)?-?\\?\$?\d[\d,.]*(?:\{,\}\d+)*(?:\s*\\?%"
    r"|\s*(?:\\text\{\s*[a-z ]+\}|[a-z]+))?[.\s$]*"
    r"|[\s$]*-?\\[dt]?frac\{\d+\}\{\d+\}[\s$]*"
)
_CHOICE = re.compile(r"(?i)\b(?:answer\W{0,4}[:：]|answer is|option is)\W{0,6}[A-J]\b")
_STATED = re.compile(
    r"(?i)(?:####|\banswer\W{0,4}[:：]|\banswer is)[\s*$]{0,6}-?\\?\$?\d[\d,.]*[\s*$.]*$"
    r"|\*\*[^*]*\d[^*]*\*\*[.\s]*$"
)


@dataclass(frozen=True)
class Style:
    """A reply to a problem. `row` is a line of the task's data file as its publishers write it."""

    task: str
    row: dict[str, Any]
    reply: str
    right: bool

    @property
    def is_common(self):
        """Whether a model that was asked for a box or an answer line writes so: one box with a number
        in it (any mathematics, a choice), a line or a sentence that states the answer, bold text at
        the end, fenced programs."""
        text = self.reply.split("</think>")[-1]
        if self.task in ("humaneval", "live_code_bench"):
            return "```" in text
        boxes = _BOXES.findall(text)
        if "box" in text:
            any_content = self.task in ("math_500", "mmlu_pro")
            return len(boxes) == 1 and (any_content or _NUMBER.fullmatch(boxes[0]) is not None)
        stated = _CHOICE if self.task == "mmlu_pro" else _STATED
        return stated.search(text) is not None


def _number_row(gold):
    return {"id": gold, "problem": QUESTION, "answer": gold}


def _gsm8k_row(gold):
    return {"question": QUESTION, "answer": f"So many.\n#### {gold}"}


def _math_row(gold):
    return {
        "unique_id": gold,
        "problem": QUESTION,
        "answer": gold,
        "solution": f"\\boxed{{{gold}}}",
        "subject": "Algebra",
        "level": 1,
    }


def _choice_row(text):
    letter, *options = (part.strip() for part in text.split("|"))
    about = {"question_id": 1, "question": QUESTION, "category": "other", "cot_content": ""}
    return about | {"options": options, "answer": letter, "answer_index": ord(letter) - ord("A")}


def _function_row(kind):
    prompt, test = FUNCTIONS[kind]
    name, body = re.findall(r"(?m)^def (\w+)", prompt)[-1], SOLUTIONS[kind][0].partition("\n")[2]
    return {
        "task_id": "own/0",
        "prompt": prompt,
        "entry_point": name,
        "canonical_solution": body,
        "test": test,
    }


def _contest_row(kind):
    starter, name, tests = CALLS.get(
        kind, ("", None, [("3\n1 2 3\n", "6\n"), ("2\n-5 5\n", "0\n")])
    )
    made = [
        json.dumps([{"input": i, "output": o, "testtype": "functional" if name else "stdin"}])
        for i, o in tests
    ]
    return {
        "question_id": kind,
        "question_content": f"Write {name}."
        if name
        else "Read n, then n integers; print their sum.",
        "starter_code": starter,
        "contest_date": "2024-09-01T00:00:00",
        "public_test_cases": made[0],
        "private_test_cases": made[1],
        "metadata": json.dumps({"func_name": name} if name else {}),
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
def styles(task):
    return tuple(_read(task))


def _read(task):
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
        for name, value in zip(("‹R›", "‹W›", "‹P›"), (*solutions, row.get("prompt", ""))):
            reply = reply.replace(name, value)
        yield Style(task, row, reply, mark == "+")
