"""Quantities in the unit that a question asks for: `1 h 30 min` are 90 minutes, `18 cents` are
0.18 where dollars are requested."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from quantkit.evaluation.grading.clauses import BELOW_TWENTY, ONES
from quantkit.evaluation.grading.conversions import MONEY, Dimension, dimension_of, size_of
from quantkit.evaluation.grading.quantities import begin_quantity, canonical
from quantkit.evaluation.grading.question import read_question
from quantkit.evaluation.grading.typesetting import END_TEXT, TEXT, plain

_UNIT_OF = re.compile(
    r"(?i)\b(?:how\s+many|number\s+of|in)\s+(?:total\s+|whole\s+|full\s+)?([a-z]{3,})\b"
)
_SMALL_MONEY = re.compile(r"(?i)\bcents?\b|¢|\bpenn(?:y|ies)\b|\b(?:dime|nickel|quarter)s?\b")


def requested_unit(question: str) -> str | None:
    """The unit that a question asks for, in the plural: of `how many minutes` and `in inches` the
    last one; dollars, where money is asked for, its sign is there, and no cents are mentioned. None
    where it asks for no unit."""
    units = [word.lower() for word in _UNIT_OF.findall(plain(question))]
    units = [
        word
        for word in units
        if (word == "feet" or word.endswith("s")) and dimension_of(word) is not None
    ]
    if units:
        return units[-1]
    target = read_question(question)
    is_dollars = (
        target is not None
        and target.kind == "$"
        and "$" in question
        and not _SMALL_MONEY.search(question)
    )
    return "dollars" if is_dollars else None


@dataclass(frozen=True)
class _Compound:
    """`1 hour and 30 minutes`: where it is, its dimension, its units from the largest on, and
    the amount in the least unit."""

    start: int
    end: int
    dimension: Dimension
    units: tuple[str, ...]
    amount: Fraction

    def in_unit(self, unit: str) -> Fraction:
        return self.amount / size_of(unit, self.dimension)


def unify_units(text: str, question: str) -> tuple[str, dict[Fraction, tuple[Fraction, ...]]]:
    """`text` with every compound quantity (`5 feet 5 inches`) in one unit: that which the question
    asks for, else its smallest. Of the second, by the value that is in the text then, its
    values in all of its own units.

    Dollars and cents stay as they are unless the question asks for one of them.
    """
    requested, others = requested_unit(question), {}
    pieces, position = [], 0
    for found in _compounds(text):
        is_requested = requested is not None and size_of(requested, found.dimension) > 0
        if found.dimension is MONEY and not is_requested:
            continue
        unit = requested if requested is not None and is_requested else found.units[-1]
        value = found.in_unit(unit)
        if not is_requested:
            others[value] = tuple(found.in_unit(own) for own in found.units)
        pieces += [text[position : found.start], f"{canonical(value)} {unit}"]
        position = found.end
    return "".join([*pieces, text[position:]]), others


_WORD = rf"(?:an?|(?:twenty|thirty|forty|fifty)(?:[ -](?:{ONES}))?|{BELOW_TWENTY})"
_NUMBER = rf"(?:\d[\d,]*(?:\.\d+)?|{_WORD}(?=[\s-]))"
_SPACE = r"(?:[\s~-]|\\[,;: ])*"
_PART = re.compile(
    rf"(?i)(?:\$(?P<typeset>{_NUMBER})\$|(?P<number>{_NUMBER})){_SPACE}"
    r"(?:\\(?:text|textrm|mathrm|mbox)\s*\{\s*(?P<quoted>[a-z]+)\.?,?\s*(?P<joined>and)?\s*\}|(?P<unit>[a-z]+)(?![a-z]))"
)
_BEGINS = re.compile(rf"(?i)(?<![\w.,/^*×+=-])(?<![*×+/-]\s)(?:\${_NUMBER}\$|{_NUMBER})")
_JOINT = re.compile(
    rf"\.?(?P<comma>,)?{_SPACE}(?:(?P<joined>and\b|&|\\text\s*\{{\s*and\s*\}}){_SPACE})?"
)
_HALF = re.compile(r"(?i)\s+and\s+a\s+half(?![\w-])")
_TWO_THINGS = re.compile(r"(?i),?\s+(?:of\s+(?:which|that|it|them|those|these)|respectively)\b")
_RATE = re.compile(r"(?i)\s*(?:/|(?:at|of|per|each|every|apiece|an?)\b)")


def _compounds(text: str) -> Iterator[_Compound]:
    """Compounds go from larger units to smaller ones of one dimension. After a comma alone no part
    makes up one of the unit before it,
    and no rate follows: `2 days, 5 hours each` are two things."""
    position = 0
    while (begins := _BEGINS.search(text, position)) is not None:
        found = _compound(text, begins.start())
        position = found.end if found is not None else begins.end()
        if found is not None:
            yield found


def _compound(text: str, start: int) -> _Compound | None:
    units: tuple[str, ...] = ()
    numbers: list[Fraction] = []
    end, position, is_list, is_half = start, start, False, False
    while (part := _PART.match(text, position)) is not None:
        unit, number = (
            (part["quoted"] or part["unit"]).lower(),
            _number(part["number"] or part["typeset"]),
        )
        dimension = dimension_of(*units, unit)
        if (
            number is None
            or dimension is None
            or (units and size_of(unit, dimension) >= size_of(units[-1], dimension))
        ):
            break
        units, numbers, end = (*units, unit), [*numbers, number], part.end()
        if len(units) == 1 and (half := _HALF.match(text, end)) is not None:
            numbers, end, is_half = [number + Fraction(1, 2)], half.end(), True
            break
        joint = _JOINT.match(text, end)
        assert joint is not None  # all of it may be missing
        is_list, position = is_list or bool(joint["comma"] and not joint["joined"]), joint.end()
    dimension = dimension_of(*units)
    if dimension is None or (len(units) < 2 and not is_half) or _TWO_THINGS.match(text, end):
        return None
    amounts = [number * size_of(unit, dimension) for number, unit in zip(numbers, units)]
    is_one = all(part < size_of(unit, dimension) for part, unit in zip(amounts[1:], units))
    if is_list and (not is_one or _RATE.match(text, end)):
        return None
    return _Compound(start, end, dimension, units, sum(amounts, Fraction(0)))


def _number(said: str) -> Fraction | None:
    if said.lower() in ("a", "an"):
        return Fraction(1)
    found = begin_quantity(said)
    return found.value if found is not None and found.end == len(said) else None


_MEASURED = re.compile(
    r"(?i)(?<![\w.,])(?P<number>\d[\d,]*(?:\.\d+)?)\s*(?P<unit>[a-z]+|¢)(?![a-z])(?!\s*(?:/|per\b))"
)


def convert_to_requested(value: Fraction, said: str, question: str) -> Fraction:
    """`value`, which the sentence or box `said` states, in the unit that the question asks for,
    where it is there before another unit
    of the same dimension: 1.5 hours are 90 where minutes are asked for."""
    requested = requested_unit(question)
    shown = plain(said).replace(TEXT, " ").replace(END_TEXT, " ") if requested is not None else ""
    units = {
        match["unit"] for match in _MEASURED.finditer(shown) if _number(match["number"]) == value
    }
    dimension = (
        dimension_of(*units, requested) if requested is not None and len(units) == 1 else None
    )
    if dimension is None or requested is None:
        return value
    return value * size_of(units.pop(), dimension) / size_of(requested, dimension)
