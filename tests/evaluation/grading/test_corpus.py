"""The corpus of answer styles (tests/support/answer_styles.py): every grader agrees with the reader.
`pytest -s` prints how often."""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from answer_styles import TASKS, Style, styles

from quantkit.evaluation import sandbox
from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading.graders import find_grader, grade
from quantkit.evaluation.grading.math_equal import MathJudge
from quantkit.evaluation.tasks.data import map_fields
from quantkit.evaluation.tasks.definitions import Problem, find_setting, find_task


@pytest.fixture(scope="module")
def judge() -> Iterator[MathJudge]:
    made = MathJudge()
    yield made
    made.close()


@pytest.fixture
def _each_program_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many styles hold the same program; the sandbox runs it once."""
    for name in ("run_tests", "run_script"):
        monkeypatch.setattr(sandbox, name, functools.cache(getattr(sandbox, name)))


@pytest.mark.usefixtures("_each_program_once")
@pytest.mark.parametrize("name", TASKS)
def test_the_reader_is_agreed_with(name: str, judge: MathJudge) -> None:
    task = find_task(name)
    grader = find_grader(find_setting(task, "r1").grader)

    def agrees(style: Style) -> bool:
        fields = map_fields(task, style.row, 0)
        return (
            grade(
                grader,
                Problem("p", fields, grader.gold(fields)),
                ModelReply(0, style.reply),
                False,
                judge,
            ).correct
            is style.right
        )

    with ThreadPoolExecutor(
        sandbox.workers() if grader.runs_code else 1
    ) as pool:  # as an evaluation grades
        differing = [
            style for style, right in zip(styles(name), pool.map(agrees, styles(name))) if not right
        ]
    count = len(styles(name))
    print(f"{name}: {count - len(differing)} of {count}")
    shown = "\n".join(
        f"{'right' if style.right else 'wrong'}: {style.reply!r}" for style in differing
    )
    assert len(differing) <= 0.005 * count, shown


def test_the_corpus_is_large_and_even() -> None:
    found = [style for task in TASKS for style in styles(task)]
    distinct = {(style.task, str(style.row), style.reply) for style in found}
    assert len(distinct) >= 2000
    assert 0.35 < sum(not style.right for style in found) / len(found) < 0.6
