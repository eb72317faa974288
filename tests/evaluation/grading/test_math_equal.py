import time

import pytest

from quantkit.evaluation.grading.math_equal import MathJudge


@pytest.fixture(scope="module")
def judge():
    made = MathJudge(deadline_s=3)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("1/2", r"\frac12", True),
        ("0.5", r"\dfrac{1}{2}", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("(1, 2)", "(1,2)", True),
        ("18", r"\frac{36}{2}", True),
        ("18", "17", False),
        ("18", "eighteen", False),
        ("18", "", False),
    ],
)
def test_equality(judge, gold, answer, equal):
    assert judge.equal(gold, answer) is equal


def test_a_tower_of_powers_is_cut_off_and_the_next_comparison_works(judge):
    assert judge.equal("1", "1") is True
    start = time.monotonic()
    assert judge.equal("18", "9^{9^{9^{9}}}") is None
    assert time.monotonic() - start < 8
    assert judge.equal("18", r"\frac{36}{2}") is True
