"""What crosses between a program and its judge."""

import collections
import datetime
import enum
import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.evaluation.sandbox.inside import values

Point = collections.namedtuple("Point", "x y")
Colour = enum.IntEnum("Colour", {"red": 3})


class Liar(int):
    def __eq__(self, other):
        return True

    __hash__ = None


TEXT = st.text(st.characters(codec=None))  # lone surrogates too
hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None))
    | st.binary()
    | st.fractions(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
anything = st.recursive(
    hashable
    | st.dates()
    | st.datetimes()
    | st.timedeltas()
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
        | st.builds(collections.deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 5))
    ),
    max_leaves=8,
)


def kinds(value):
    """The types of a value and of what it holds, in an order that two equal sets share."""
    if isinstance(value, dict):
        return type(value), sorted(str((kinds(key), kinds(item))) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return type(value), sorted(str(kinds(item)) for item in value)
    return type(value)


@settings(max_examples=150, deadline=None)
@given(anything)
def test_values_cross_as_they_are(value):
    back = values.loads(values.dumps(value))
    assert back == value
    assert kinds(back) == kinds(value)


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        (np.float16(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(["a", None], dtype=object), ["a", None]),
        ([np.int32(1), (np.float32(2.0),)], [1, (2.0,)]),
        (Point(1, 2), (1, 2)),
        (Colour.red, 3),
        (Liar(5), 5),
        (collections.defaultdict(list, {1: [2]}), {1: [2]}),
        *(
            (value, value)
            for value in (
                collections.Counter("aab"),
                collections.OrderedDict([(2, 1), (1, 2)]),
                range(1, 9, 3),
                bytearray(b"\xff"),
                math.inf,
                10**9000,
                Decimal("1.10"),
                datetime.time(1, 2, 3),
                {"tuple": [1]},
                {(1, 2): {3}},
            )
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numpy_and_subclasses_arrive_as_plain_values(value, arrives):
    back = values.loads(values.dumps(value))
    assert (back, kinds(back)) == (arrives, kinds(arrives))


FOREIGN = [
    print,
    object(),
    type,
    ...,
    NotImplemented,
    {1: object()},
    memoryview(b"x"),
    ValueError("x"),
]


@pytest.mark.parametrize("value", FOREIGN, ids=lambda value: type(value).__name__)
def test_the_rest_does_not_cross(value):
    with pytest.raises(values.Unsupported, match="a value of type"):
        values.dumps(value)


@pytest.mark.parametrize("kind", [list, tuple, lambda one: {1: next(iter(one))}])
def test_depth_is_bounded_both_ways(kind):
    def nest(depth):
        made = 1
        for _ in range(depth):
            made = kind([made])
        return made

    fits = values.DEPTH // 2  # a dict holds pairs, which are lists
    assert values.loads(values.dumps(nest(fits))) == nest(fits)
    for depth in (values.DEPTH + 1, 100_000):
        with pytest.raises(values.Unsupported, match="deeper than"):
            values.dumps(nest(depth))
    for text in (b"[" * 100_000 + b"]" * 100_000, b'{"tuple":[' * 300 + b"]}" * 300):
        with pytest.raises(ValueError):
            values.loads(text)


MALFORMED = r"""
[
{}
{"tuple": 1}
{"set": [[1]]}
{"dict": [[1]]}
{"dict": [1]}
{"x": 1}
{"tuple": [], "set": []}
{"bytes": 5}
{"bytes": "é"}
{"fraction": "1/0"}
{"range": [0, 1.5, 1]}
{"range": "abc"}
{"complex": ["x", 1]}
{"decimal": [1]}
{"deque": [1]}
{"deque": [[], "x"]}
{"timedelta": [1e300, 0, 0]}
{"datetime": 5}
{"counter": [[[], 1]]}
{"__class__": []}
"""


@pytest.mark.parametrize("text", MALFORMED.splitlines())
def test_what_dumps_does_not_write_is_refused(text):
    with pytest.raises(ValueError):
        values.loads(text.encode())
