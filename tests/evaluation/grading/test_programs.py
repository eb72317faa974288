import base64
import json
import pickle
import zlib

import pytest
from refused import refused

from quantkit.evaluation import sandbox
from quantkit.evaluation.grading.code_blocks import blocks
from quantkit.evaluation.grading.programs import (
    completed_function,
    contest_tests,
    grade_contest,
    grade_with_tests,
    same_output,
    with_prelude,
)
from quantkit.evaluation.tasks.definitions import Problem

PROMPT = 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """ Sum. """\n'
FUNCTION = "def total(xs):\n    return sum(xs)\n"
TEST = "def check(candidate):\n    assert candidate([1, 2]) == 3\n"


def problem():
    return Problem("own/0", {"problem": PROMPT, "entry_point": "total", "test": TEST})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no-code"),
        ("I would add them up.", "no-code"),
        ("```python\ndef total(xs):\n    return 0\n```", "failed"),
        ("```python\ndef other(xs):\n    return sum(xs)\n```", "failed"),
        ("```python\nimport os; os._exit(0)\n```", "no-verdict"),
        ("```python\ndef total(xs):\n    return (\n```", "failed"),
    ],
)
def test_the_rest_is_told_apart(text, reason):
    assert grade_with_tests(problem(), text).reason == reason


def test_prompt_supplies_imports_and_helpers():
    assert completed_function(f"```python\n{FUNCTION}```", PROMPT, "total") == (PROMPT, FUNCTION)
    assert completed_function(f"```python\n{FUNCTION}```", "def total(xs):\n", "total") == (
        FUNCTION,
    )


def test_tests_use_the_prompts_helpers_and_not_the_replys():
    prompt = 'def double(x):\n    return 2 * x\n\ndef total(xs):\n    """ Sum. """\n'
    test = (
        "def check(candidate):\n    assert total([1, 2]) == 3\n    assert "
        "double(candidate([2])) == 4\n"
    )
    task = Problem("own/1", {"problem": prompt, "entry_point": "total", "test": test})
    assert (
        grade_with_tests(task, f"```python\ndef double(x): return x\n{FUNCTION}```").reason
        == "passed"
    )
    assert (
        grade_with_tests(
            task, "```python\ndef double(x): return 4\ndef total(xs): return 3\n```"
        ).reason
        == "failed"
    )


def test_tests_that_are_not_python_are_nobodys_fault():
    task = Problem(
        "own/2", {"problem": PROMPT, "entry_point": "total", "test": "def check(candidate) assert"}
    )
    grade = grade_with_tests(task, FUNCTION)
    assert (grade.reason, grade.excluded) == ("sandbox-error", True)
    assert "the tests cannot be prepared" in grade.detail


def test_blocks_are_dedented_and_an_open_one_counts():
    found = blocks("a\n```py\nx = 1\n```\n  ~~~ \n  y = 2\n  ~~~\n````Python title\nz = 3\n```\n")
    assert [(block.tag, block.source) for block in found] == [
        ("py", "x = 1\n"),
        ("", "y = 2\n"),
        ("python", "z = 3\n"),
    ]


def test_a_program_may_begin_with_future_imports():
    source = '"Doc."\nfrom __future__ import (\n    annotations)\nx: Missing = 1\nprint(gcd(4, 6))'
    found = sandbox.run_script(with_prelude(source), "")
    assert (found.status, found.output) == ("passed", "2\n")


def contest(function, tests):
    made = [
        {"input": i, "output": o, "testtype": "functional" if function else "stdin"}
        for i, o in tests
    ]
    metadata = json.dumps({"func_name": function} if function else {})
    return Problem(
        "c",
        {
            "public_tests": json.dumps(made[:1]),
            "private_tests": json.dumps(made[1:]),
            "metadata": metadata,
        },
    )


@pytest.mark.parametrize(
    ("source", "reason", "told"),
    [
        ("n = int(input())\nprint(sum(map(int, input().split())))", "passed", ""),
        (
            "def main():\n    input(); print(sum(map(int, input().split())))\nif __name__ == "
            "'__main__':\n    main()",
            "passed",
            "",
        ),
        (
            "input(); xs = list(map(int, input().split())); print(reduce(lambda a, b: a + b, xs))",
            "passed",
            "",
        ),
        ("input(); print(max(map(int, input().split())))", "failed", "test 1"),
        (
            "input(); xs = list(map(int, input().split())); print(sum(xs) if len(xs) == 3 else 9)",
            "failed",
            "test 2: got '9",
        ),
        ("raise ValueError", "failed", "ValueError"),
    ],
)
def test_contest_by_stdin(source, reason, told):
    found = grade_contest(
        contest(None, [("3\n1 2 3\n", "6\n"), ("2\n-5 5\n", "0")]), f"```python\n{source}\n```"
    )
    assert found.reason == reason, found
    assert told in found.detail


def test_contest_by_call():
    task = contest("pair", [("[2, 7]\n9", "[0, 1]"), ("[3, 3]\n6", "[0, 1]")])
    right = "class Solution:\n    def pair(self, nums: List[int], target):\n        return (0, 1)"
    assert grade_contest(task, f"```python\n{right}\n```").reason == "passed"
    assert grade_contest(
        task, f"```python\n{right.replace('(0, 1)', '[1, 0]')}\n```"
    ).detail.startswith("test 1: got '[1, 0]'")


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("1 2\n", "1 2", True),
        (" 1\n 2 ", "1\n2", True),
        ("1.0 2", "1 2.00", True),
        ("yes", "YES", False),
        ("1", "2", False),
        ("１", "1", False),
        ("sNaN", "1", False),
    ],
)
def test_outputs_compare_by_line(got, expected, same):
    assert same_output(got, expected) is same


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_private_tests_are_read_without_running_the_pickle():
    tests = [{"input": "1" * 300, "output": "2"}]
    for protocol in (2, 4, 5):
        text = base64.b64encode(
            zlib.compress(pickle.dumps(json.dumps(tests), protocol=protocol))
        ).decode()
        assert contest_tests({"public_tests": "[]", "private_tests": text}) == tests


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemError('the pickle ran')",)


@pytest.mark.parametrize("value", [Bomb(), ["[]", "[]"], 5, {"a": "b"}])
def test_a_pickle_of_anything_else_is_refused(value):
    with refused("private_test_cases"):
        contest_tests({"public_tests": "[]", "private_tests": packed(value)})
