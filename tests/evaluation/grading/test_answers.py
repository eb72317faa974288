"""Where an answer is found. Whether it is read right is held by the corpus (test_corpus.py): of what
it does not hold, each rule has a case here."""

from fractions import Fraction

import pytest

from quantkit.evaluation.grading.answers import find_number, last_box
from quantkit.evaluation.grading.choices import NOTHING, find_choice
from quantkit.evaluation.grading.typesetting import normalize


def test_normalize_leaves_superscripts_alone():
    assert normalize("１０² − 答案：５") == "10² - 答案:5"


@pytest.mark.parametrize(
    ("text", "box", "is_open"),
    [
        (r"\boxed{5} then \boxed{7}", "7", False),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", False),
        (r"\boxed{42", None, True),
        (r"\boxed{5} then \boxed{7", None, True),
        (r"\boxed{18} thousand", "18 thousand", False),
        (r"\boxed{7} or \boxed{8}", "7, 8", False),
        (r"\boxed{7} is wrong", "", False),
    ],
)
def test_last_box(text, box, is_open):
    found = last_box(text)
    assert (found.text, found.open_box) == (box, is_open)


@pytest.mark.parametrize(
    ("text", "value", "where"),
    [
        (r"4 and 5, so \boxed{6}. Not 7.", "6", "asked"),
        (r"\boxed{6}. Wait. The answer is 7.", "7", "phrase"),
        ("x\n#### 1,234", "1234", "phrase"),
        ("答案是42。", "42", "phrase"),
        ("The answer is not 6.", None, "phrase"),
        ("that makes 5 and 6.", None, None),
        ("that costs $1,250.50 today", "1250.5", "last"),
        ("from 3-4", None, None),
        ("9 × $2 = $", None, None),
        ("He pays $64. If all were at full price he would have paid $80.", None, None),
        ("Tom is 12, and his sister is 15.", None, None),
    ],
)
def test_find_number(text, value, where):
    found = find_number(text)
    assert (found.value, found.found) == (value and Fraction(value), where)


@pytest.mark.parametrize(
    ("text", "letter", "where"),
    [
        ("ANSWER: B\nwait\nANSWER: C", "C", "asked"),
        (r"\boxed{\text{C}}", "C", "asked"),
        ("the answer is (C). B is wrong.", "C", "phrase"),
        ("it must be C", "C", "last"),
        ("ANSWER: Z", None, None),
        ("ANSWER: C or D", NOTHING, "asked"),
        ("ANSWER: C. thing d", NOTHING, "asked"),
        ("thing c", "C", "last"),
        ("A) thing a\nB) thing b\nC) thing c", None, None),
    ],
)
def test_find_choice(text, letter, where):
    found = find_choice(text, [f"thing {letter}" for letter in "abcdefghij"])
    assert (found.text, found.found) == (letter, where)
