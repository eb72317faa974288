"""Reads config.json into an architecture's dataclass, whose fields have config.json's names.

Every field is checked for type and range before it is used; an error names the field.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject


@dataclass(frozen=True)
class Range:
    """Bounds of an integer field."""

    least: int
    most: int


_LARGEST_COUNT = 2**31 - 1
"""Largest size or count: torch and the kernels use 32-bit integers."""
_LARGEST_NUMBER = 1e6
_SOURCE = "use the config.json that came with the model"
MOST_EXPERTS, MOST_LAYERS = 100_000, 10_000

# More than any trained model has, and few enough to iterate over.
NumLayers = Annotated[int, Range(1, MOST_LAYERS)]
NumLayersOrNone = Annotated[int, Range(0, MOST_LAYERS)]
NumExperts = Annotated[int, Range(1, MOST_EXPERTS)]
CountOrNone = Annotated[int, Range(0, _LARGEST_COUNT)]

DECIDED = "decided"
"""Annotation of a field that the architecture's file sets, never config.json."""


def read_fields(config_class: type, config: JsonObject) -> JsonObject:
    """The fields of `config_class` that config.json has; null means the default where there is one.

    `rope` is not read: the architecture builds it from several keys. Raises QuantkitError naming a
    field that is missing and has no default, or that has a value of another type or out of range.
    """
    values, hints = {}, get_type_hints(config_class, include_extras=True)
    for field in fields(config_class):
        kind, *notes = get_args(hints[field.name]) or (hints[field.name],)
        if field.name == "rope" or DECIDED in notes:
            continue
        if field.default is MISSING and field.name not in config:
            raise QuantkitError(f"config.json lacks {field.name}", _SOURCE)
        value = config.get(field.name)
        if value is not None or field.default is MISSING:
            values[field.name] = _check_field(field.name, value, kind, notes)
    return values


def _check_field(name: str, value: Any, kind: type, notes: list[Any]) -> Any:
    if kind is int:
        limits = next((note for note in notes if isinstance(note, Range)), Range(1, _LARGEST_COUNT))
        return check_count(name, value, least=limits.least, most=limits.most)
    if kind is float:
        return check_number(name, value)
    if type(value) is not kind:
        raise refusal(name, value, "true or false" if kind is bool else "a text")
    return value


def check_count(name: str, value: Any, *, least: int = 1, most: int = _LARGEST_COUNT) -> int:
    """`value` if it is an integer in least..most; else QuantkitError naming the field."""
    if type(value) is not int or not least <= value <= most:
        raise refusal(name, value, f"an integer from {least} to {most}")
    return value


def check_number(name: str, value: Any) -> float:
    """`value` as a float if it is a number in (0, 1e6]; else QuantkitError naming the field."""
    if type(value) not in (int, float) or not 0 < value <= _LARGEST_NUMBER:
        raise refusal(name, value, f"a number above 0 and at most {_LARGEST_NUMBER:g}")
    return float(value)


def check_flag(config: JsonObject, name: str, *, default: bool = False) -> bool:
    """A field that is true or false; missing or null is the default."""
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise refusal(name, value, "true or false")
    return value


def check_divides(small: str, large: str, config: Any) -> None:
    """Raise QuantkitError where one field does not divide another of an architecture's config."""
    one, other = getattr(config, small), getattr(config, large)
    if other % one:
        raise QuantkitError(
            f"config.json has {small} = {one}, which does not divide {large} = {other}", _SOURCE
        )


def check_at_most(small: str, one: int, large: str, other: int) -> None:
    """Raise QuantkitError where a field exceeds its upper bound, another field."""
    if one > other:
        raise QuantkitError(
            f"config.json has {small} = {one}, more than {large} = {other}", _SOURCE
        )


def refusal(name: str, value: Any, wanted: str) -> QuantkitError:
    """The error for a field of config.json whose value is not what is `wanted`."""
    text = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    return QuantkitError(f"config.json has {name} = {text}, expected {wanted}", _SOURCE)


def check_layer_kinds(
    name: str, kinds: Any, num_layers: int, known: tuple[str, ...]
) -> tuple[str, ...]:
    """`kinds` if it lists one of `known` for each layer; else QuantkitError naming the field."""
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not {*map(str, kinds)} <= {*known}
    ):
        wanted = f"{' or '.join(known)} for each of num_hidden_layers = {num_layers}"
        raise refusal(name, kinds, wanted)
    return tuple(kinds)


def refuse_other_values(
    config: JsonObject,
    computed: Mapping[str, Any],
    architecture: str,
    *,
    allow_null: bool = False,
) -> None:
    """Raise QuantkitError where a field has another value than the only one that is computed, which
    is also the default of a missing field. allow_null: null means the default, too, and flags must
    be true or false."""
    for name, value in computed.items():
        found = config.get(name, value)
        if allow_null and found is None:
            continue
        if found != value or (allow_null and isinstance(value, bool) and type(found) is not bool):
            raise refusal(
                name, config[name], f"{value!r}, which is what quantkit computes of {architecture}"
            )


def refuse_attention_bias(config: JsonObject) -> None:
    if config.get("attention_bias"):
        raise QuantkitError(
            "config.json has attention_bias",
            "quantkit computes this architecture without attention biases",
        )
