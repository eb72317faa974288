"""The corpus of answer styles (tests/support/answer_styles.py): of the common ones each grader
agrees with the reader nearly always, and of the rare ones it calls hardly any wrong reply right.
`pytest -s` prints how often."""

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from answer_styles import TASKS, styles
from graded import graded_row, setting_of

from quantkit.evaluation import sandbox
from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading.graders import find_grader


@pytest.fixture
def _each_program_once(monkeypatch):
    """Many styles hold the same program; the sandbox runs it once."""
    found = {}

    def once(run, *given, **named):
        key = repr((given, named))
        return found[key] if key in found else found.setdefault(key, run(*given, **named))

    for name in ("run_function", "run_script"):
        monkeypatch.setattr(sandbox, name, functools.partial(once, getattr(sandbox, name)))


@pytest.mark.usefixtures("_each_program_once")
@pytest.mark.parametrize("name", TASKS)
def test_the_reader_is_agreed_with(name):
    runs_code = find_grader(setting_of(name).grader).runs_code

    def correct(style):
        return graded_row(name, style.row, style.reply).correct

    with ThreadPoolExecutor(
        sandbox.workers() if runs_code else 1
    ) as pool:  # as an evaluation grades
        verdicts = list(zip(styles(name), pool.map(correct, styles(name))))
    for is_common in (True, False):
        judged = [(style, found) for style, found in verdicts if style.is_common is is_common]
        differing = [style for style, found in judged if found is not style.right]
        false_right = [style for style in differing if not style.right]
        print(
            f"{name}, {'common' if is_common else 'rare'}: {len(judged) - len(differing)} of "
            f"{len(judged)}, {len(false_right)} false right"
        )
        shown = "\n".join(f"{style.right}: {style.reply!r}" for style in differing)
        assert not is_common or len(differing) <= 0.01 * len(judged), shown
        assert len(false_right) <= (0 if is_common else 0.02 * len(judged)), shown


REAL = Path(__file__).with_name("real") / "smollm2.jsonl"


@pytest.mark.parametrize(("name", "number"), [("gsm8k", 40), ("humaneval", 15), ("mmlu_pro", 40)])
def test_replies_of_a_real_model(name, number):
    """SmolLM2-135M-Instruct's greedy replies of at most 256 tokens to the first questions; a person
    read every one and agrees with its reason."""
    rows = [json.loads(line) for line in REAL.read_text().split("\n") if line]
    rows = [row for row in rows if row["task"] == name]
    assert len(rows) == number
    for row in rows:
        found = graded_row(name, row["row"], ModelReply(0, row["reply"], row["finish"]))
        assert found.reason == row["reason"], row["reply"]
