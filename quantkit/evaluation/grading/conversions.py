"""One quantity in two units: `0.8 hours, which is 48 minutes`. Either value counts as the
answer."""

import re
from fractions import Fraction

from quantkit.evaluation.grading.quantities import begin_quantity
from quantkit.evaluation.grading.typesetting import END_TEXT, TEXT, plain

Dimension = dict[str, int]
"""How many of the least unit of a dimension a unit is; singular, in lower case."""

# A letter that is a unit of two dimensions means that of the first where it is alone: 5 m are
# metres, and in 1h 30m minutes.
_DIMENSIONS: tuple[Dimension, ...] = (
    {
        "millimeter": 1,
        "mm": 1,
        "centimeter": 10,
        "cm": 10,
        "meter": 1000,
        "metre": 1000,
        "m": 1000,
        "kilometer": 10**6,
        "km": 10**6,
    },
    {
        "second": 1,
        "sec": 1,
        "s": 1,
        "minute": 60,
        "min": 60,
        "m": 60,
        "hour": 3600,
        "hr": 3600,
        "h": 3600,
        "day": 86400,
        "week": 604800,
    },
    {"month": 1, "year": 12, "decade": 120},
    {"inch": 1, "inche": 1, "in": 1, "foot": 12, "feet": 12, "ft": 12, "yard": 36, "mile": 63360},
    {"gram": 1, "g": 1, "kilogram": 1000, "kg": 1000, "ton": 10**6, "tonne": 10**6},
    {"ounce": 1, "oz": 1, "pound": 16, "lb": 16},
    {"milliliter": 1, "millilitre": 1, "ml": 1, "liter": 1000, "litre": 1000, "l": 1000},
    {"cup": 1, "pint": 2, "quart": 4, "gallon": 16},
    MONEY := {"cent": 1, "¢": 1, "dollar": 100, "$": 100},
)


def dimension_of(*units: str) -> Dimension | None:
    """The first dimension that has all `units`, which may be plurals."""
    return next(
        (dimension for dimension in _DIMENSIONS if all(size_of(unit, dimension) for unit in units)),
        None,
    )


def size_of(unit: str, dimension: Dimension) -> int:
    """How many of the least unit of `dimension` a unit is; 0 where it has no such unit."""
    name = unit.lower().rstrip(".")
    return dimension.get(name) or dimension.get(name.removesuffix("s"), 0)


_BETWEEN = (
    r"(?:\s*\((?:which is |i\.e\.,? |or |=\s*)?|\s*=\s*|,?\s+(?:which "
    r"(?:is|equals)|i\.e\.,?|that is,?|or)\s+)(?:exactly |about )?"
)
_NUMBER = r"[$]?\d[\d,]*(?:\.\d+)?(?:/\d+)?"
_TWICE = re.compile(
    rf"(?i)(?:({_NUMBER})\s*([a-z]+),?\s+(?:and\s+)?)?({_NUMBER})\s*([a-z¢]*\.?){_BETWEEN}({_NUMBER})\s*([a-z¢]*)\.?\)?\W*$"
)


def equal_quantities(sentence: str) -> tuple[Fraction, ...]:
    """Both values of a sentence that ends with one quantity in two units; empty where it does
    not."""
    match = _TWICE.search(plain(sentence.rsplit("\n", 1)[-1]))
    if match is None:
        return ()
    larger = _amount(match[1], match[2]) if match[1] else None
    first, second = _amount(match[3], match[4]), _amount(match[5], match[6])
    if first is None or second is None or first[0] is not second[0]:
        return ()
    whole = first[1] + (larger[1] if larger is not None and larger[0] is first[0] else 0)
    if second[1] not in (first[1], whole):
        return ()
    values = [
        begin_quantity(match[number].lstrip("$")) for number in ((3, 5) if larger is None else (5,))
    ]
    return tuple(value.value for value in values if value is not None)


_ONE = re.compile(rf"(?i)\s*({_NUMBER})\s*([a-z¢]*)\W*")


def convert_to_unit_of(gold: str, said: str) -> Fraction | None:
    """The number of `said` in the unit of `gold` (5.4 cents), where both have comparable ones:
    0.054 dollars are 5.4."""
    found = [
        _ONE.fullmatch(plain(text).replace(TEXT, " ").replace(END_TEXT, " "))
        for text in (gold, said)
    ]
    amounts = [_amount(match[1], match[2]) if match is not None else None for match in found]
    target, given = amounts
    number = begin_quantity(found[0][1].lstrip("$")) if found[0] is not None else None
    if (
        target is None
        or given is None
        or number is None
        or target[0] is not given[0]
        or not target[1]
    ):
        return None
    return given[1] * number.value / target[1]


def _amount(number: str, unit: str) -> tuple[Dimension, Fraction] | None:
    """The dimension of a quantity, and how many of its least unit it is."""
    name = "$" if number.startswith("$") else unit
    value, dimension = begin_quantity(number.lstrip("$")), dimension_of(name)
    return (
        (dimension, value.value * size_of(name, dimension))
        if value is not None and dimension is not None
        else None
    )
