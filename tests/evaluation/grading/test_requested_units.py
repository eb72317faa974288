from fractions import Fraction

import pytest

from quantkit.evaluation.grading.answers import find_number
from quantkit.evaluation.grading.requested_units import (
    convert_to_requested,
    requested_unit,
    unify_units,
)

MINUTES = "How many minutes does the film last?"


@pytest.mark.parametrize(
    ("question", "unit"),
    [
        (MINUTES, "minutes"),
        ("A day has 24 hours. How tall is he in inches?", "inches"),
        ("How much does a $3 pen cost after the discount?", "dollars"),
        ("How much do three pens of 80 cents cost, if a ruler costs $2?", None),
        ("How many points has the team in second place?", None),
        ("How old is Sam?", None),
    ],
)
def test_the_unit_of_a_question(question: str, unit: str | None) -> None:
    assert requested_unit(question) == unit


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1 h 30 min", "90 minutes"),
        ("1h30m", "90 minutes"),
        (r"\boxed{1\text{ hour and }30\text{ minutes}}", r"\boxed{90 minutes}"),
        ("$1$ hour and $30$ minutes", "90 minutes"),
        ("An hour and a half.", "90 minutes."),
        ("one hour and thirty minutes", "90 minutes"),
        ("1 day, 2 hours and 5 minutes", "1565 minutes"),
        ("1 hour 30 minutes = 90 minutes", "90 minutes = 90 minutes"),
        ("5 m 20 cm", "520 cm"),
        ("30 minutes and 1 hour", "30 minutes and 1 hour"),
        ("1 h 1 h 20 min 5 min", "1 h 80 minutes 5 min"),
        ("2 days, 5 hours each", "2 days, 5 hours each"),
        ("2 hours, 30 minutes of which are a break", "2 hours, 30 minutes of which are a break"),
        ("2 hours and 30 minutes respectively", "2 hours and 30 minutes respectively"),
        ("1 hour, 30 people", "1 hour, 30 people"),
        ("5 dollars and 50 cents", "5 dollars and 50 cents"),
        ("a film", "a film"),
    ],
)
def test_a_compound_is_one_quantity_in_the_unit_that_is_asked_for(text: str, meant: str) -> None:
    assert unify_units(text, MINUTES)[0] == meant


@pytest.mark.parametrize(
    ("text", "question", "value"),
    [
        ("The tram takes 1 hour and 30 minutes.", MINUTES, 90),
        ("The tram takes 1 hour and 30 minutes.", "How many hours does it take?", Fraction(3, 2)),
        (r"\boxed{1.5\text{ hours}}", MINUTES, 90),
        (r"\boxed{90\text{ hours}}", MINUTES, 5400),
        ("She makes 18 cents.", "How much does she make from eggs of $2?", Fraction(18, 100)),
        ("She makes 18 cents.", "How many cents does she make?", 18),
        ("He drives 60 miles per hour.", MINUTES, 60),
    ],
)
def test_the_number_is_that_of_the_unit_that_is_asked_for(
    text: str, question: str, value: Fraction
) -> None:
    assert find_number(text, question=question).value == value


def test_without_a_unit_in_the_question_a_compound_says_all_of_its_units() -> None:
    found = find_number("It takes 1 hour and 30 minutes.", question="How long does it take?")
    assert (found.value, found.restated) == (90, (Fraction(3, 2), Fraction(90)))


def test_a_number_that_stands_before_two_units_is_left_alone() -> None:
    assert convert_to_requested(Fraction(2), "2 hours for 2 days", MINUTES) == 2
