"""Serialization of argument and return values between two processes.

Supported types: None, bool, int, float, str, list, and those of KINDS. A subclass is sent as its
supported base (a defaultdict or TypedDict as dict, a namedtuple as tuple, an IntEnum as int), a
numpy scalar as a number, a numpy array as nested lists. The receiver builds objects of exactly these
types: nothing received can carry a method of the sender's.

The text is JSON. None, bool, int, float, str and list are themselves; every other value is an object
with one key, the name of its kind, and its parts: a text, or a list of values.
"""

import base64
import datetime
import json
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

DEPTH = 200  # of nested containers
_PLAIN = {type(None), bool, int, float, str}


class Unsupported(TypeError):
    """A value of an unsupported type, or nested too deeply."""


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _data(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _pairs(value: Any) -> list:
    return [list(pair) for pair in value.items()]


def _triple(value: Any) -> list:
    return [value.days, value.seconds, value.microseconds]


# kind: its type, how a value is taken apart, how it is made again
KINDS: dict[str, tuple[type, Any, Any]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "ordered": (OrderedDict, _pairs, OrderedDict),
    "counter": (Counter, _pairs, lambda parts: Counter(dict(parts))),
    "dict": (dict, _pairs, dict),
    "keys": (type({}.keys()), list, lambda parts: dict.fromkeys(parts).keys()),
    "values": (type({}.values()), list, lambda parts: dict(enumerate(parts)).values()),
    "items": (type({}.items()), list, lambda parts: dict(parts).items()),
    "deque": (deque, lambda value: [list(value), value.maxlen], lambda parts: deque(*parts)),
    "bytes": (bytes, _text, _data),
    "bytearray": (bytearray, _text, lambda text: bytearray(_data(text))),
    "complex": (complex, lambda it: [it.real, it.imag], lambda parts: complex(*parts)),
    "range": (range, lambda it: [it.start, it.stop, it.step], lambda parts: range(*parts)),
    "fraction": (Fraction, str, Fraction),
    "decimal": (Decimal, str, Decimal),
    "datetime": (
        datetime.datetime,
        datetime.datetime.isoformat,
        datetime.datetime.fromisoformat,
    ),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (datetime.timedelta, _triple, lambda parts: datetime.timedelta(*parts)),
    "iterator": (Iterator, list, iter),
}
_BASES: tuple[Any, ...] = (int, float, str, list)
_NAMES = {kind: name for name, (kind, _, _) in KINDS.items()}


def dumps(value: Any) -> bytes:
    """Raises Unsupported; never RecursionError."""
    sys.set_int_max_str_digits(0)
    return json.dumps(_pack(value, DEPTH)).encode()


def loads(data: bytes) -> Any:
    """Raises ValueError for anything that dumps does not write."""
    sys.set_int_max_str_digits(0)
    try:
        return _unpack(json.loads(data), DEPTH)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"not a serialized value ({type(error).__name__}: {error})") from None


def _pack(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth == 0:
        raise Unsupported(f"a value nested deeper than {DEPTH}")
    if kind is list:
        return (
            value if set(map(type, value)) <= _PLAIN else [_pack(one, depth - 1) for one in value]
        )
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return _pack(value.tolist(), depth - 1)
    for base in _BASES:
        if isinstance(value, base):
            return _pack(base(value), depth - 1)
    name = _NAMES.get(kind) or next(
        (n for n, one in KINDS.items() if isinstance(value, one[0])), ""
    )
    if not name:
        raise Unsupported(f"a value of type {kind.__name__}")
    parts = KINDS[name][1](value)
    return {name: parts if type(parts) is str else _pack(parts, depth)}


def _unpack(value: Any, depth: int) -> Any:
    if type(value) is list:
        if depth == 0:
            raise ValueError("nested too deep")
        return (
            value if set(map(type, value)) <= _PLAIN else [_unpack(one, depth - 1) for one in value]
        )
    if type(value) is not dict:
        return value
    ((name, parts),) = value.items()
    return KINDS[name][2](_unpack(parts, depth))
