"""Which number of a sentence is its claim, and what a reply ends with besides its answer."""

import pytest

from quantkit.evaluation.grading.answers import find_number
from quantkit.evaluation.grading.closing_phrases import is_refusal, strip_verification
from quantkit.evaluation.grading.roles import has_cases, strip_circumstances


@pytest.mark.parametrize(
    ("sentence", "left"),
    [
        ("Maria will be 36 years old in 2030.", "Maria will be 36 years old."),
        ("There are 2030 ways.", "There are 2030 ways."),
        ("Il reste 33 pommes sur 40.", "Il reste 33 pommes."),
        ("The price fell to 20 after 3 days.", "The price fell to 20."),
        ("She has 3 cats and 4 dogs.", "She has 3 cats and 4 dogs."),
    ],
)
def test_numbers_that_are_governed_are_not_claimed(sentence: str, left: str) -> None:
    assert strip_circumstances(sentence) == left


def test_a_sentence_may_leave_its_number_open() -> None:
    assert has_cases("It is 36 if she has had her birthday, and 35 if she has not.")
    assert not has_cases("If each box holds 8, she needs 9 boxes.")


def test_a_check_brings_nothing_new_unless_it_doubts() -> None:
    assert strip_verification("8 x 30 = 240.\n\nCheck: 240 / 30 = 8") == "8 x 30 = 240."
    doubted = "8 x 30 = 250.\n\nCheck: 250 / 30 is wrong, so 240"
    assert strip_verification(doubted) == doubted


def test_a_refusal_is_no_answer_unless_one_is_given_all_the_same() -> None:
    assert is_refusal("I cannot determine the age. If she was born in 1994, she would be 36.")
    assert not is_refusal("I cannot prove it, but the answer is 36.")


@pytest.mark.parametrize(
    ("reply", "value"), [("Der Tank fasst 1.250 Liter.", 1250), ("The rope is 1.250 m long.", 1.25)]
)
def test_a_point_at_thousands_is_read_by_language(reply: str, value: float) -> None:
    assert find_number(reply).value == value


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        (r"\boxed{330 + 50 = 385}", None),
        (r"\boxed{330 + 55 = 385}", 385),
        (r"\boxed{12 \cdot 17 = 205}", None),
        ("It rides at 45 mph (≈ 72 km/h)", 45),
        ("$Q+R = 699$, where $N = 5694$.", 699),
        ("She will be 20 years old, or 25 if we count from today.", None),
        ("L'école reçoit 1 430 crayons.", 1430),
        ("The disk is divided into 371 regions.", 371),
    ],
)
def test_sums_conversions_and_remarks(reply: str, value: int | None) -> None:
    assert find_number(reply).value == value
