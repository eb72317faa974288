from fractions import Fraction

import pytest

from quantkit.evaluation.grading.answers import find_number, last_box
from quantkit.evaluation.grading.choices import NOTHING, find_choice
from quantkit.evaluation.grading.numbers import read_value
from quantkit.evaluation.grading.typesetting import normalize


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "{5,7}",
        "1,23",
        "12 or 13",
        "1 2",
        "x",
        "12x",
        "12:1",
        r"12 \text{ or } 13",
        r"\pm 12",
        "> 12",
        "m=7, n=12",
        "12 = 13",
    ],
)
def test_what_is_not_one_value_is_refused(text):
    assert read_value(text) is None


def test_normalize_leaves_superscripts_alone():
    assert normalize("１０² − 答案：５") == "10² - 答案:5"


@pytest.mark.parametrize(
    ("text", "box", "is_open"),
    [
        (r"a \boxed{42} b", "42", False),
        (r"\boxed{5} then \boxed{7}", "7", False),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", False),
        (r"\fbox{42}", "42", False),
        (r"\boxed {42}", "42", False),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", False),
        (r"\boxed{42", None, True),
        (r"\boxed{5} then \boxed{7", None, True),
        ("no box", None, False),
        (r"\boxed{}", None, False),
        (r"\boxed{7} \boxed{}", "7", False),
        (r"\boxed{18} thousand", "18 thousand", False),
        (r"\boxed{7} or \boxed{8}", "7, 8", False),
        (r"$x = \boxed{7}$ or $x = \boxed{8}$", "7, 8", False),
        (r"$x = \boxed{7}$ and $y = \boxed{8}$", "7, 8", False),
        (r"\boxed{7} is wrong", "", False),
        (r"\boxed{7} was the example. I could not solve it.", "", False),
        (r"\boxed{\boxed{7}}", "7", False),
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
        ("2 + 3 = 5. The answer is 6. I made 7 checks.", "6", "phrase"),
        ("x\n#### 1,234", "1234", "phrase"),
        ("**Answer: 6**\nin 3 steps", "6", "phrase"),
        ("最终答案：42。", "42", "phrase"),
        ("答案是42。", "42", "phrase"),
        ("The answer is 6/4.", "1.5", "phrase"),
        ("The answer is not 6.", None, "phrase"),
        ("that makes 5 and 6.", None, None),
        ("that costs $1,250.50 today", "1250.5", "last"),
        ("from 3-4", None, None),
        ("it fell to -5", "-5", "last"),
        ("9 × $2 = $", None, None),
        ("The fee is $5. He gets $1,450,000 in total.", "1450000", "last"),
        ("12 out of 20 students, or **60%**", "60", "last"),
        ("He pays $64. If all were at full price he would have paid $80.", None, None),
        ("Tom is 12, and his sister is 15.", None, None),
        ("16 - 3 - 4 = 9 and 9 * 2 = $18 a day", "18", "last"),
        ("The answer is 18.\n\nWait, that is wrong. So the answer is 19.", "19", "phrase"),
        ("nothing", None, None),
    ],
)
def test_find_number(text, value, where):
    found = find_number(text)
    assert (found.value, found.found) == (value and Fraction(value), where)


@pytest.mark.parametrize(
    ("text", "letter", "where"),
    [
        ("so\nANSWER: C", "C", "asked"),
        ("ANSWER: (C)", "C", "asked"),
        ("**ANSWER: C**", "C", "asked"),
        ("ANSWER: **C**", "C", "asked"),
        ("Answer: C) apples", "C", "asked"),
        ("ANSWER: C, not B", "C", "asked"),
        ("ANSWER: B\nwait\nANSWER: C", "C", "asked"),
        ("end with ANSWER: [LETTER]\nANSWER: C", "C", "asked"),
        (r"\boxed{\text{C}}", "C", "asked"),
        ("ANSWER：Ｃ", "C", "asked"),
        ("the answer is (C). B is wrong.", "C", "phrase"),
        ("答案是C", "C", "phrase"),
        ("it must be C", "C", "last"),
        ("C because A fits less", "C", "last"),
        ("I am sure I know", None, None),
        ("ANSWER: Z", None, None),
        ("ANSWER: C or D", NOTHING, "asked"),
        ("ANSWER: thing d", "D", "asked"),
        ("ANSWER: C. thing d", NOTHING, "asked"),
        ("ANSWER: I believe c", "C", "asked"),
        ("Clearly Cats", None, None),
        ("Not B; C.", None, None),
        ("A) thing a\nB) thing b\nC) thing c", None, None),
        ("C) thing c", "C", "last"),
        ("thing c", "C", "last"),
        ("A) thing a\nB) thing b\n\nB) thing b", "B", "last"),
        ("The options confuse me and so do I.", None, None),
    ],
)
def test_find_choice(text, letter, where):
    found = find_choice(text, [f"thing {letter}" for letter in "abcdefghij"])
    assert (found.text, found.found) == (letter, where)
