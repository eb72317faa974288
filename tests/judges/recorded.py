r"""Recorded completions for the judges: self-written problems, answered in every style that models
use and graders stumble over.

A record is a raw row of the task's data file, the text that came back, and how the reply ended.
`style` names the trick; the expected difference between two graders is listed per style, never per
record.
"""

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Record:
    task: str
    row: Row
    style: str
    right: bool  # the answer put into the text was the right one
    text: str
    finish_reason: str = "stop"


GSM8K: list[Row] = [
    {
        "question": "A crate holds 6 boxes of 3 pears. How many pears?",
        "answer": "6 * 3 = <<6*3=18>>18\n#### 18",
    },
    {
        "question": "A hall has 2 blocks of 617 seats. How many seats?",
        "answer": "2 * 617 = 1234\n#### 1,234",
    },
    {
        "question": "It was 3 degrees and fell by 8. What is it now?",
        "answer": "3 - 8 = -5\n#### -5",
    },
    {
        "question": "Ten trucks carry 7,000 bricks each. How many bricks?",
        "answer": "10 * 7000 = 70000\n#### 70000",
    },
    {
        "question": "A pie for 5 dollars is shared by 4. What does each pay?",
        "answer": "5 / 4 = 1.25\n#### 1.25",
    },
]
AIME: list[Row] = [
    {
        "id": f"own-{n}",
        "problem": f"Find the integer between {n - 1} and {n + 1}.",
        "answer": str(n),
    }
    for n in (204, 33, 7, 999)
]
MMLU: list[Row] = [
    {
        "question_id": 1000 + n,
        "question": "Which of these is named first letter by letter?",
        "options": [f"thing {i}" for i in range(count)],
        "answer": "ABCDEFGHIJ"[gold],
        "answer_index": gold,
        "category": "other",
        "cot_content": "",
    }
    for n, (count, gold) in enumerate([(10, 8), (4, 0), (10, 3), (7, 6), (9, 1)])
]


def numbers(task: str, rows: list[Row], golds: list[str]) -> Iterator[Record]:
    """Each style with the right answer and with a wrong one."""
    for row, gold in zip(rows, golds):
        plain = gold.replace(",", "")
        wrong = str(int(float(plain)) + 11)
        for right, value in ((True, plain), (False, wrong)):
            for style, text, finish in numeric_styles(value, plain if not right else wrong):
                yield Record(task, row, style, right, text, finish)


def numeric_styles(v: str, other: str) -> Iterator[tuple[str, str, str]]:
    """(style, text, finish reason) for the value v; `other` is a number that is not meant as the
    answer."""
    grouped = f"{int(v):,}" if v.lstrip("-").isdigit() else v
    wide = v.translate({ord(c): ord(c) + 0xFEE0 for c in "0123456789"})
    yield "boxed", f"So we get 2 + 2 = 4 and then \\boxed{{{v}}}.", "stop"
    yield "boxed, text after", f"\\boxed{{{v}}} is what we looked for, in a few steps.", "stop"
    yield "boxed, display", f"Therefore\n\\[\n\\boxed{{{v}}}\n\\]", "stop"
    yield "boxed, dollars outside", f"The final answer is $\\boxed{{{v}}}$.", "stop"
    yield "boxed, currency", f"She pays \\boxed{{\\${v}}}.", "stop"
    yield "boxed, text unit", f"\\boxed{{{v} \\text{{ pears}}}}", "stop"
    yield "boxed, bare unit", f"\\boxed{{{v} pears}}", "stop"
    yield "boxed, thousands", f"\\boxed{{{grouped}}}", "stop"
    yield "boxed, latex thousands", f"\\boxed{{{grouped.replace(',', '{,}')}}}", "stop"
    yield "boxed, text", f"\\boxed{{\\text{{{v}}}}}", "stop"
    yield "boxed, bold", f"\\boxed{{\\mathbf{{{v}}}}}", "stop"
    yield "boxed, equation", f"\\boxed{{x = {v}}}", "stop"
    yield "boxed, sum equation", f"\\boxed{{m+n={v}}}", "stop"
    yield "boxed, decimal zero", f"\\boxed{{{v}.0}}" if "." not in v else f"\\boxed{{{v}0}}", "stop"
    yield "boxed, leading zeros", f"\\boxed{{{v.zfill(3)}}}", "stop"
    yield "boxed, point", f"\\boxed{{{v}.}}", "stop"
    yield "boxed, degrees", f"\\boxed{{{v}^\\circ}}", "stop"
    yield "boxed, expression", f"\\boxed{{{v}+4-4}}", "stop"
    yield "boxed, fraction", f"\\boxed{{\\frac{{{2 * float(v):g}}}{{2}}}}", "stop"
    yield "boxed, cjk unit", f"\\boxed{{{v}元}}", "stop"
    yield "boxed, full width", f"\\boxed{{{wide}}}", "stop"
    yield "boxed, thin space", f"\\boxed{{{grouped.replace(',', chr(92) + ',')}}}", "stop"
    yield "fbox", f"\\fbox{{{v}}}", "stop"
    yield "two boxes, same", f"\\boxed{{{v}}} and again \\boxed{{{v}}}", "stop"
    yield "two boxes, last counts", f"\\boxed{{{other}}}, no wait, \\boxed{{{v}}}", "stop"
    yield "box, then remark with number", f"\\boxed{{{v}}}\n\nCheck: 3 + {other} is not it.", "stop"
    yield "hash", f"We add.\n#### {v}", "stop"
    yield "answer is", f"First 2 + 3 = 5. The answer is {v}.", "stop"
    yield "answer is, then remark", f"The answer is {v}. I did {other} checks in 3 minutes.", "stop"
    yield "answer colon bold", f"Steps: 1, 2.\n\n**Answer: {v}**", "stop"
    yield "last number", f"So in total that makes {v}", "stop"
    yield "last number, sentence", f"In the end there are {v} of them.", "stop"
    yield "last number, grouped", f"That comes to {grouped}", "stop"
    yield "chinese answer", f"答案是{v}。", "stop"
    yield "bare", v, "stop"
    yield "dollars", f"That costs ${v}", "stop"
    yield "think paired", f"<think>\nmaybe {other}\n</think>\n\n\\boxed{{{v}}}", "stop"
    yield (
        "think prefilled",
        f"maybe \\boxed{{{other}}}, hm\n</think>\n\nIt is \\boxed{{{v}}}.",
        "stop",
    )
    yield "think prefilled, prose", f"maybe {other}, hm\n</think>\n\nThe answer is {v}.", "stop"
    yield "think twice", f"a </think> b \\boxed{{{other}}} </think> \\boxed{{{v}}}", "stop"
    yield (
        "think unfinished, tagged",
        f"<think>\nlet me see: 4, 5, \\boxed{{{v}}} but wait",
        "length",
    )
    yield "answer cut before number", f"x\n</think>\n\nFirst we take {v} and then we", "length"
    yield "box cut", f"x\n</think>\n\nSo it is \\boxed{{{v}", "length"
    yield "empty", "", "stop"
    yield "empty after think", "I am thinking of 3.\n</think>\n\n", "stop"
    yield "refusal", "I cannot solve this problem, sorry.", "stop"


def choices(rows: list[Row]) -> Iterator[Record]:
    for row in rows:
        letters = "ABCDEFGHIJ"[: len(row["options"])]
        wrong = next(letter for letter in letters[1:] + "A" if letter != row["answer"])
        for right, letter in ((True, row["answer"]), (False, wrong)):
            other = wrong if right else row["answer"]
            for style, text in choice_styles(letter, other):
                yield Record("mmlu_pro", row, style, right, text)


def choice_styles(v: str, other: str) -> Iterator[tuple[str, str]]:
    yield "ANSWER line", f"Because of this and that.\nANSWER: {v}"
    yield "ANSWER line, brackets", f"Because.\nANSWER: ({v})"
    yield "ANSWER line, square brackets", f"Because.\nANSWER: [{v}]"
    yield "ANSWER line, bold", f"Because.\n**ANSWER: {v}**"
    yield "ANSWER line, bold letter", f"Because.\nANSWER: **{v}**"
    yield "ANSWER line, lower case word", f"Because.\nAnswer: {v}."
    yield "ANSWER line, text after", f"Because.\nANSWER: {v}) thing"
    yield "ANSWER line, reason after", f"ANSWER: {v}, not {other}"
    yield "ANSWER line, two", f"ANSWER: {other}\nNo, wait.\nANSWER: {v}"
    yield "ANSWER line, placeholder first", f"I must end with ANSWER: [LETTER].\nANSWER: {v}"
    yield "ANSWER line, latex", f"Because.\nANSWER: $\\boxed{{{v}}}$"
    yield "boxed", f"Because.\n\\boxed{{{v}}}"
    yield "answer is", f"Because of that, the answer is {v}."
    yield "answer is, brackets", f"Because of that, the answer is ({v})."
    yield "answer is, then remark", f"The answer is ({v}). Option {other} is wrong."
    yield "last letter", f"Clearly it must be {v}"
    yield "bare", v
    yield "think prefilled", f"is it {other}? ANSWER: {other}?\n</think>\n\nANSWER: {v}"
    yield "think unfinished, tagged", f"<think>\nis it {v}? ANSWER: {v}"
    yield "lower case label", f"ANSWER: {v.lower()}"
    yield "refusal", "no letter at all here"
    yield "empty", ""


TOTAL_ABOVE = """from typing import List


def total_above(values: List[int], floor: int) -> int:
    ''' Sum of the values above floor.
    >>> total_above([1, 5, 9], 4)
    14
    '''
"""
AREA = """import math


def area(radius: float) -> float:
    ''' Area of a circle. '''
"""
DECODE = """def encode(text: str) -> str:
    ''' Reverse. '''
    return text[::-1]


def decode(text: str) -> str:
    ''' Undo encode. '''
"""


def _function(number: int, name: str, prompt: str, body: str, checks: list[str]) -> Row:
    test = "\ndef check(candidate):\n" + "".join(f"    assert {check}\n" for check in checks)
    return {
        "task_id": f"own/{number}",
        "prompt": prompt,
        "entry_point": name,
        "canonical_solution": f"    {body}\n",
        "test": test,
    }


HUMANEVAL: list[Row] = [
    _function(
        0,
        "total_above",
        TOTAL_ABOVE,
        "return sum(v for v in values if v > floor)",
        ["candidate([1, 5, 9], 4) == 14", "candidate([], 0) == 0", "candidate([3], 3) == 0"],
    ),
    _function(
        1,
        "area",
        AREA,
        "return math.pi * radius ** 2",
        ["abs(candidate(1.0) - 3.141592653589793) < 1e-9", "candidate(0.0) == 0"],
    ),
    _function(
        2,
        "decode",
        DECODE,
        "return text[::-1]",
        ["all(candidate(encode(text)) == text for text in ('', 'ab', 'race'))"],
    ),
]


def programs(rows: list[Row]) -> Iterator[Record]:
    for row in rows:
        for right in (True, False):
            body = row["canonical_solution"] if right else "    return None\n"
            for style, text, finish in program_styles(row, body):
                yield Record("humaneval", row, style, right, text, finish)


def program_styles(row: Row, body: str) -> Iterator[tuple[str, str, str]]:
    function = row["prompt"].rstrip() + "\n" + body
    header = row["prompt"].split("def " + row["entry_point"])[0]
    only = function[len(header) :]
    yield "whole function in a block", f"Here it is:\n\n```python\n{function}```\n", "stop"
    yield "function without imports", f"```python\n{only}```", "stop"
    yield "block without language", f"```\n{function}\n```", "stop"
    yield "body only, raw", body, "stop"
    yield "function, raw", function, "stop"
    yield (
        "think prefilled",
        f"let me draft\n```python\ndef {row['entry_point']}(*a):\n    return "
        f"'draft'\n```\n</think>\n\n```python\n{function}```",
        "stop",
    )
    yield (
        "example block first",
        f"Call it like this:\n```python\nprint(1)\n```\n\nSolution:\n```python\n{function}```",
        "stop",
    )
    yield "usage block after", f"```python\n{function}```\n\nUsage:\n```python\nx = 1\n```", "stop"
    yield (
        "draft block first",
        f"```python\n{header}def {row['entry_point']}(*a):\n    return "
        f"'draft'\n```\nBetter:\n```python\n{function}```",
        "stop",
    )
    yield (
        "main guard",
        f"```python\n{function}\n\nif __name__ == '__main__':\n    print(1)\n```",
        "stop",
    )
    yield (
        "test in block",
        f"```python\n{function}\n\nassert callable({row['entry_point']})\n```",
        "stop",
    )
    yield "exits early", "```python\nimport sys\nsys.exit(0)\n```", "stop"
    yield "prose", "I would loop over the values.", "stop"
    yield "empty", "", "stop"


CONTEST: list[Row] = [
    {
        "question_id": "own-stdin",
        "question_content": "Read n, then n integers; print their sum.",
        "starter_code": "",
        "contest_date": "2024-09-01T00:00:00",
        "public_test_cases": json.dumps(
            [{"input": "3\n1 2 3\n", "output": "6\n", "testtype": "stdin"}]
        ),
        "private_test_cases": json.dumps(
            [{"input": "2\n-5 5\n", "output": "0\n", "testtype": "stdin"}]
        ),
        "metadata": "{}",
    },
    {
        "question_id": "own-call",
        "question_content": "Return the indices of the two numbers that add to target.",
        "starter_code": "class Solution:\n    def pair(self, nums: List[int], target: int) -> "
        "List[int]:\n        ",
        "contest_date": "2024-10-01T00:00:00",
        "public_test_cases": json.dumps(
            [{"input": "[2, 7, 11]\n9", "output": "[0, 1]", "testtype": "functional"}]
        ),
        "private_test_cases": json.dumps(
            [{"input": "[3, 3]\n6", "output": "[0, 1]", "testtype": "functional"}]
        ),
        "metadata": '{"func_name": "pair"}',
    },
]
SUM = {
    True: "n = int(input())\nprint(sum(map(int, input().split())))",
    False: "n = int(input())\nprint(max(map(int, input().split())))",
}
PAIR = {
    True: """class Solution:
    def pair(self, nums: List[int], target: int) -> List[int]:
        for i, a in enumerate(nums):
            for j in range(i):
                if nums[j] + a == target:
                    return [j, i]
""",
    False: "class Solution:\n    def pair(self, nums, target):\n        return [1, 0]",
}


def contests() -> Iterator[Record]:
    for row, solutions in zip(CONTEST, (SUM, PAIR)):
        for right, source in solutions.items():
            yield Record("live_code_bench", row, "one block", right, f"```python\n{source}\n```")
            yield Record(
                "live_code_bench",
                row,
                "two blocks",
                right,
                f"First\n```python\nprint('draft')\n```\nthen\n```python\n{source}\n```\nDone.",
            )
            yield Record(
                "live_code_bench",
                row,
                "think prefilled",
                right,
                f"```\ndraft\n```\n</think>\n```python\n{source}\n```",
            )
            yield Record("live_code_bench", row, "raw, no block", right, source)
            yield Record(
                "live_code_bench", row, "block not closed", right, f"```python\n{source}", "length"
            )
        yield Record("live_code_bench", row, "prose", False, "I would sort them.")
        yield Record(
            "live_code_bench",
            row,
            "loops forever",
            False,
            "```python\nclass Solution: pass\nwhile True: pass\n```",
        )


def records(data_dir: Path | None) -> list[Record]:
    """Every record; with a data directory also over the public problems there, which multiplies the
    golds."""
    gsm8k, aime, mmlu, humaneval = list(GSM8K), list(AIME), list(MMLU), list(HUMANEVAL)
    if data_dir is not None:
        gsm8k += _read(data_dir / "gsm8k/test.jsonl")[::60]
        aime += (
            _read(data_dir / "aime24/aime24.jsonl")[::3]
            + _read(data_dir / "aime25/aime25.jsonl")[::3]
        )
        mmlu += _read(data_dir / "mmlu_pro/test.jsonl.gz")[::120]
        humaneval += _read(data_dir / "humaneval/HumanEval.jsonl.gz")[::8]
    return [
        *numbers("gsm8k", gsm8k, [row["answer"].rpartition("#### ")[2] for row in gsm8k]),
        *numbers("aime24", aime, [row["answer"] for row in aime]),
        *choices(mmlu),
        *programs(humaneval),
        *contests(),
    ]


def data_dir() -> Path | None:
    given = os.environ.get("QUANTKIT_DATA")
    return Path(given) if given else None


def _read(path: Path) -> list[Row]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [json.loads(line) for line in file]
