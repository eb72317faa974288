"""Which of a sentence's numbers the question asks for."""

from fractions import Fraction
from itertools import product

import pytest

from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading.answers import find_number
from quantkit.evaluation.grading.graders import find_grader, grade
from quantkit.evaluation.grading.math_equal import MathJudge
from quantkit.evaluation.grading.question import read_question
from quantkit.evaluation.tasks.definitions import Problem

LATER = "Tom is 5 years old. How old will he be in {n} years?"
NOW = "Tom's age is to be found. How old is Tom now?"
LEFT = "A shop has {start} {things} and sells some. How many {things} are left?"
SOLD = "A shop has {start} {things} and sells some. How many {things} does it sell?"
TOTAL = "A train carries {a} adults and {b} children. How many passengers does it carry altogether?"


def said(reply: str, question: str) -> Fraction | str | None:
    return find_number(reply, question=question).value


@pytest.mark.parametrize(("n", "name"), [(10, "Tom"), (4, "She"), (25, "The boy")])
def test_time_is_the_questions(n: int, name: str) -> None:
    reply = f"{name} is currently 5, and in {n} years will be {5 + n}."
    assert said(reply, LATER.format(n=n)) == 5 + n
    assert said(reply, NOW) == 5


@pytest.mark.parametrize(
    ("things", "numbers"),
    [*product(["pens", "boxes", "loaves"], [(40, 12, 28), (9, 4, 5), (1200, 1000, 200)])],
)
def test_what_is_left_and_what_is_gone(things: str, numbers: tuple[int, int, int]) -> None:
    start, sold, left = numbers
    replies = (
        f"The shop sells {sold} {things} and has {left} left.",
        f"Of the {start} {things}, the shop sells {sold}, leaving {left}.",
        f"{left} {things} are left after the shop sells {sold}.",
    )
    for reply in replies:
        assert said(reply, LEFT.format(start=start, things=things)) == left, reply
    swapped = f"The shop sells {left} {things} and has {sold} left."
    assert said(swapped, LEFT.format(start=start, things=things)) == sold, (
        "the reply's own claim counts, not the right one"
    )
    assert said(swapped, SOLD.format(start=start, things=things)) == left


@pytest.mark.parametrize(("a", "b"), [(30, 12), (7, 8), (150, 250)])
def test_a_total_is_not_a_part(a: int, b: int) -> None:
    question = TOTAL.format(a=a, b=b)
    assert (
        said(
            f"It carries {a} adults and {b} children, for a total of {a + b} passengers.", question
        )
        == a + b
    )
    assert said(f"It carries {a + b} passengers in all, {a} of them adults.", question) == a + b
    assert said(f"Adults: {a}\nChildren: {b}\nTotal: {a + b}", question) == a + b


def test_the_line_of_a_list_whose_label_is_asked() -> None:
    reply = "Ann: 6 pens\nBob: 4 pens\nCid: 5 pens"
    for name, value in (("Ann", 6), ("Bob", 4), ("Cid", 5)):
        assert said(reply, f"Fifteen pens are shared. How many pens does {name} get?") == value


def test_units_and_kinds() -> None:
    reply = "She buys 12 tickets for $84, which is 40% of her budget."
    assert said(reply, "How many tickets does she buy?") == 12
    assert said(reply, "How much does she pay in dollars?") == 84
    assert said(reply, "What percentage of her budget does she spend?") == 40


def test_a_calculation_says_its_result() -> None:
    question = "How many men finished the race?"
    assert (
        said("If 60 men began and 8 gave up, then 60 - 8 = 52 men finished the race.", question)
        == 52
    )
    assert said("60-8=52 men finished the race, 8 of 60 gave up", question) == 52


@pytest.mark.parametrize(
    "reply",
    [
        "Lena has 6 or 7 pencils left.",
        "Lena has 6 pencils left, or 5 if one broke.",
        "Lena has between 6 and 8 pencils left.",
        "Lena has half of 12 pencils left.",
        "Lena has 6 squared pencils left.",
        "Lena has six (5) pencils left.",
    ],
)
def test_no_question_settles_what_the_reply_leaves_open(reply: str) -> None:
    assert said(reply, "How many pencils does Lena have left?") != 6


def test_without_words_that_tell_nothing_is_asked() -> None:
    for question in ("", "Which is it?", "How many are there?", "A story without an end."):
        assert read_question(question) is None
    assert said("Tom has 9 apples and Sue 6.", "How many are there?") == said(
        "Tom has 9 apples and Sue 6.", ""
    )


@pytest.mark.parametrize(
    ("task", "field"), [("number", "problem"), ("integer", "problem"), ("expression", "problem")]
)
def test_graders_pass_the_question_and_stay_as_strict(task: str, field: str) -> None:
    grader, judge = find_grader(task), MathJudge()
    reply = ModelReply(0, "The shop sells 12 pens, of its 40 it has 28 left, and 3 clerks.")
    fields = {field: LEFT.format(start=40, things="pens"), "answer": "28"}
    asked = grade(grader, Problem("0", fields, grader.gold(fields)), reply, False, judge)
    unasked = grade(
        grader, Problem("0", {"answer": "28"}, grader.gold(fields)), reply, False, judge
    )
    boxed = grade(
        grader,
        Problem("0", fields, grader.gold(fields)),
        ModelReply(0, "28 are left. \\boxed{12}"),
        False,
        judge,
    )
    judge.close()
    assert (asked.reason, unasked.correct) == ("right-loose", False)
    assert not asked.strict
    assert boxed.reason == "wrong", "a box is read whatever the question"
