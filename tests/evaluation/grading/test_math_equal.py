import time

import pytest

from quantkit.evaluation.grading import math_equal


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
def test_equality(gold, answer, equal):
    assert math_equal.equal(gold, answer) is equal


def test_a_tower_of_powers_is_cut_off_and_the_next_comparison_works(monkeypatch):
    monkeypatch.setattr(math_equal, "DEADLINE_S", 2.0)
    assert math_equal.equal("1", "1") is True
    start = time.monotonic()
    assert math_equal.equal("18", "9^{9^{9^{9}}}") is None
    assert time.monotonic() - start < 8
    assert math_equal.equal("18", r"\frac{36}{2}") is True
