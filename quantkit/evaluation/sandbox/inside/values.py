"""Serialization of argument and return values between two processes.

Supported types: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set,
frozenset, dict, OrderedDict, Counter, deque, range, Fraction, Decimal, date, datetime, time,
timedelta, iterators and the views of a dict. A subclass is sent as its supported base (a
defaultdict or TypedDict as dict, a namedtuple as tuple, an IntEnum as int), a numpy scalar as a
number, a numpy array as nested lists. The receiver builds objects of exactly these types: nothing
received can carry a method of the sender's.

The text is JSON. None, bool, int, float, str and list are themselves; every other type is an object
with one key, its tag.
"""

import base64
import collections
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

DEPTH = 200  # of nested containers
_PLAIN = {type(None), bool, int, float, str}


class Unsupported(TypeError):
    """A value of an unsupported type, or nested too deeply."""


def dumps(value: Any) -> bytes:
    """Raises Unsupported; never RecursionError."""
    sys.set_int_max_str_digits(0)
    return json.dumps(_pack(value, DEPTH)).encode()


def loads(data: bytes) -> Any:
    """Raises ValueError for anything that dumps does not write."""
    sys.set_int_max_str_digits(0)
    try:
        return _unpack(json.loads(data), DEPTH)
    except (
        ArithmeticError,
        AttributeError,
        KeyError,
        LookupError,
        RecursionError,
        TypeError,
    ) as error:
        raise ValueError(f"not a serialized value ({type(error).__name__}: {error})") from None


_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_SEQUENCES |= {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
_MAPPINGS: dict[type, str] = {
    collections.OrderedDict: "ordered",
    collections.Counter: "counter",
    dict: "dict",
}
_TEXTS: dict[type, tuple[str, Callable[[Any], str]]] = {
    Fraction: ("fraction", str),
    Decimal: ("decimal", str),
    datetime.datetime: ("datetime", datetime.datetime.isoformat),
    datetime.date: ("date", datetime.date.isoformat),
    datetime.time: ("time", datetime.time.isoformat),
}
_BYTES = {bytes: "bytes", bytearray: "bytearray"}
_BASES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    list,
    tuple,
    set,
    frozenset,
    *_MAPPINGS,
    collections.deque,
    *_TEXTS,
)


def _pack(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth == 0:
        raise Unsupported(f"a value nested deeper than {DEPTH}")
    if kind is list:
        return _pack_all(value, depth)
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: _pack_all(list(value), depth)}
    if kind in _MAPPINGS:
        return {_MAPPINGS[kind]: [_pack_all(list(pair), depth) for pair in value.items()]}
    if kind in _TEXTS:
        tag, text = _TEXTS[kind]
        return {tag: text(value)}
    return _pack_rare(value, kind, depth)


def _pack_all(items: list, depth: int) -> list:
    if set(map(type, items)) <= _PLAIN:
        return items
    return [_pack(item, depth - 1) for item in items]


def _pack_rare(value: Any, kind: type, depth: int) -> Any:
    if kind in _BYTES:
        return {_BYTES[kind]: base64.b64encode(value).decode()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is range:
        return {"range": [value.start, value.stop, value.step]}
    if kind is collections.deque:
        return {"deque": [_pack_all(list(value), depth), value.maxlen]}
    if kind is datetime.timedelta:
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return _pack(value.tolist(), depth - 1)
    for base in _BASES:
        if isinstance(value, base):
            return _pack(_as_base(value, base), depth - 1)
    if isinstance(value, Iterator):
        return {"iterator": _pack_all(list(value), depth)}
    raise Unsupported(f"a value of type {kind.__name__}")


def _as_base(value: Any, base: type) -> Any:
    """The value as an instance of `base`. Types that are rebuilt from text are converted through
    it."""
    if base in _TEXTS:
        return _MAKERS[_TEXTS[base][0]](_TEXTS[base][1](value), 1)
    return base(value)


def _unpack(value: Any, depth: int) -> Any:
    if type(value) is list:
        return _unpack_all(value, depth)
    if type(value) is dict:
        ((tag, body),) = value.items()
        return _MAKERS[tag](body, depth)
    return value


def _unpack_all(items: Any, depth: int) -> list:
    if type(items) is not list or depth == 0:
        raise ValueError("not a list, or nested too deep")
    if set(map(type, items)) <= _PLAIN:
        return items
    return [_unpack(item, depth - 1) for item in items]


def _pairs(body: Any, depth: int) -> list:
    return [(key, value) for key, value in (_unpack_all(pair, depth) for pair in body)]


def _deque(body: Any, depth: int) -> collections.deque:
    items, longest = body
    return collections.deque(_unpack_all(items, depth), longest)


def _counter(body: Any, depth: int) -> collections.Counter:
    return collections.Counter(dict(_pairs(body, depth)))


_MAKERS: dict[str, Any] = {
    "tuple": lambda body, depth: tuple(_unpack_all(body, depth)),
    "set": lambda body, depth: set(_unpack_all(body, depth)),
    "frozenset": lambda body, depth: frozenset(_unpack_all(body, depth)),
    "iterator": lambda body, depth: iter(_unpack_all(body, depth)),
    "keys": lambda body, depth: dict.fromkeys(_unpack_all(body, depth)).keys(),
    "values": lambda body, depth: dict(enumerate(_unpack_all(body, depth))).values(),
    "items": lambda body, depth: dict(_unpack_all(body, depth)).items(),
    "dict": lambda body, depth: dict(_pairs(body, depth)),
    "ordered": lambda body, depth: collections.OrderedDict(_pairs(body, depth)),
    "counter": _counter,
    "deque": _deque,
    "bytes": lambda body, depth: base64.b64decode(body, validate=True),
    "bytearray": lambda body, depth: bytearray(base64.b64decode(body, validate=True)),
    "complex": lambda body, depth: complex(*body),
    "range": lambda body, depth: range(*body),
    "fraction": lambda body, depth: Fraction(body),
    "decimal": lambda body, depth: Decimal(body),
    "datetime": lambda body, depth: datetime.datetime.fromisoformat(body),
    "date": lambda body, depth: datetime.date.fromisoformat(body),
    "time": lambda body, depth: datetime.time.fromisoformat(body),
    "timedelta": lambda body, depth: datetime.timedelta(*body),
}
