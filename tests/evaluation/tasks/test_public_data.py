"""The public data sets themselves, where QUANTKIT_DATA names a directory that holds them
(docs/evaluation.md says which files)."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantkit.evaluation import sandbox
from quantkit.evaluation.grading.graders import find_grader
from quantkit.evaluation.grading.programs import grade_with_tests
from quantkit.evaluation.tasks.data import problems, read_rows
from quantkit.evaluation.tasks.definitions import Problem, find_setting, find_task

DATA = os.environ.get("QUANTKIT_DATA")
pytestmark = pytest.mark.skipif(
    DATA is None, reason="QUANTKIT_DATA names no directory with the public data sets"
)


def read(name: str) -> tuple[list[dict], list[Problem]]:
    task = find_task(name)
    setting = find_setting(task, "r1")
    rows = read_rows(name, task.data, Path(DATA or "")).rows
    return rows, problems(setting, find_grader(setting.grader), rows)


@pytest.mark.parametrize(
    ("name", "count", "total"), [("aime24", 30, 8762), ("aime25", 30, 8344), ("gsm8k", 1319, None)]
)
def test_every_gold_answer_is_an_integer(name: str, count: int, total: int | None) -> None:
    _, found = read(name)
    assert len(found) == count
    golds = [int(problem.gold) for problem in found]
    assert total is None or sum(golds) == total


def test_every_multiple_choice_gold_is_one_of_its_options() -> None:
    _, found = read("mmlu_pro")
    assert len(found) == 12032
    assert all(problem.gold in "ABCDEFGHIJ"[: len(problem.fields["options"])] for problem in found)


@pytest.mark.parametrize(
    "style",
    [
        "{body}",
        "```python\n{body}```",
        "Here it is:\n\n```python\n{prompt}{body}\n```\nDone.",
        "{prompt}{body}",
    ],
)
def test_all_canonical_solutions_pass(style: str) -> None:
    rows, found = read("humaneval")
    texts = [style.format(prompt=row["prompt"], body=row["canonical_solution"]) for row in rows]
    with ThreadPoolExecutor(sandbox.workers()) as pool:
        grades = list(pool.map(grade_with_tests, found, texts))
    assert [(p.id, g) for p, g in zip(found, grades) if g.reason != "passed"] == []
    assert len(grades) == 164
