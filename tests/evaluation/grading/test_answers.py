from decimal import Decimal

import pytest

from quantkit.evaluation.grading.answers import canonical, find_choice, find_number, last_box, normalize, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", "42"),
        (" 42 ", "42"),
        ("$18.00", "18"),
        (r"\$18", "18"),
        ("US$5", "5"),
        ("18 dollars", "18"),
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        (r"70,\!000", "70000"),
        (r"1\,234", "1234"),
        ("12,345,678.5", "12345678.5"),
        ("42 apples", "42"),
        (r"42 \text{ cm}", "42"),
        ("42 cm^2", "42"),
        ("12 miles per hour", "12"),
        (r"25\%", "25"),
        ("25%", "25"),
        (r"60^\circ", "60"),
        (r"60^{\circ}", "60"),
        (r"\text{42}", "42"),
        (r"\mathbf{42}", "42"),
        ("x = 42", "42"),
        ("m+n=42", "42"),
        ("033", "33"),
        ("42.", "42"),
        ("-5", "-5"),
        ("−7", "-7"),
        ("- 5", "-5"),
        (".5", "0.5"),
        ("1.2e3", "1200"),
        ("４２", "42"),
        ("42元", "42"),
        ("$-3$", "-3"),
        (r"\(42\)", "42"),
    ],
)
def test_numbers_with_decorations_are_read(text: str, value: str) -> None:
    number = parse_number(text)
    assert number is not None
    assert number == Decimal(value)


@pytest.mark.parametrize(
    "text", ["", "none", "200+4", "1/2", r"\frac12", "{5,7}", "1,23", "12 or 13", r"4 \times 2", "10²", "1 2", "9^{9^{9^{9}}}", "3-4", "x"]
)
def test_what_is_not_one_number_is_refused(text: str) -> None:
    assert parse_number(text) is None


def test_normalize_leaves_superscripts_alone() -> None:
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
        (r"\boxed{}", "", False),
        (r"\boxed{\boxed{7}}", "7", False),
    ],
)
def test_last_box(text: str, box: str | None, is_open: bool) -> None:
    found = last_box(text)
    assert (found.text, found.open_box) == (box, is_open)


@pytest.mark.parametrize(
    ("text", "answer", "where"),
    [
        (r"4 and 5, so \boxed{6}. Not 7.", "6", "asked"),
        ("2 + 3 = 5. The answer is 6. I made 7 checks.", "6", "phrase"),
        ("x\n#### 1,234", "1,234", "phrase"),
        ("**Answer: 6**\nin 3 steps", "6", "phrase"),
        ("最终答案：42。", "42", "phrase"),
        ("答案是42。", "42", "phrase"),
        ("that makes 5 and 6.", "6", "last"),
        ("that costs $1,250.50 today", "$1,250.50", "last"),
        ("from 3-4", "4", "last"),
        ("it fell to -5", "-5", "last"),
        ("nothing", None, None),
    ],
)
def test_find_number(text: str, answer: str | None, where: str | None) -> None:
    found = find_number(normalize(text))
    assert (found.text, found.found) == (answer, where)


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
        ("Clearly Cats", None, None),
    ],
)
def test_find_choice(text: str, letter: str | None, where: str | None) -> None:
    found = find_choice(text, "ABCDEFGHIJ")
    assert (found.text, found.found) == (letter, where)


@pytest.mark.parametrize(("number", "text"), [("18.00", "18"), ("1.50", "1.5"), ("-0.0", "0"), ("7E2", "700")])
def test_canonical_spelling_is_one_per_value(number: str, text: str) -> None:
    assert canonical(Decimal(number)) == text
