"""Rotary position embedding: frequencies and scales with the names of transformers'
modeling_rope_utils.py.

Kinds: default, linear, llama3 (Llama 3.1's wavelength bands) and yarn (arXiv 2309.00071, as in
DeepSeek). A field of config.json that does not belong to the kind is refused by name, and so are
kinds whose frequencies depend on the text length (dynamic, longrope): such models are computed by
transformers, where it has them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from quantkit_kernels import rotary_angles
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject

Kind = Literal["default", "linear", "llama3", "yarn"]
DEFAULT_THETA = 10000.0
"""transformers' rope_theta of an architecture whose config.json has none."""

_BY_LENGTH = ("dynamic", "longrope")

_NEEDED: dict[Kind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_OPTIONAL: dict[Kind, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "llama3": ("original_max_position_embeddings",),
    "yarn": (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
}
_SMALLEST, _LARGEST = 1e-9, 1e15
"""Range of nonzero numbers in the description of an embedding."""
_SOURCE = "use the config.json that came with the model"


@dataclass(frozen=True)
class Rope:
    """Frequencies of a rotary embedding over `dim` channels, and its effect on the softmax scale.

    interleaved: rotates the pairs (x[2i], x[2i+1]), as DeepSeek does; else (x[i], x[i + dim/2]), as
    Llama does. attention_factor: YaRN's multiplier of cos and sin; None derives it from `factor`
    and the two mscales. truncate: YaRN's ramp starts and ends at whole channels.
    """

    dim: int
    theta: float
    interleaved: bool
    kind: Kind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @classmethod
    def from_dict(
        cls,
        config: JsonObject,
        dim: int,
        interleaved: bool,
        default_theta: float | None = DEFAULT_THETA,
        partial: float | None = None,
    ) -> "Rope":
        """From config.json: `rope_theta` with `rope_scaling`, or the newer `rope_parameters` that
        holds both.

        dim: channels of a head. default_theta: where config.json has none; None where the
        architecture has no default. partial: the fraction of these channels that is rotated where
        config.json has no partial_rotary_factor; None where the architecture rotates all. Raises
        QuantkitError naming a field that is missing, is not a number, or is not computed.
        """
        scaling = _scaling(config)
        if partial is not None:
            dim = int(dim * _partial_rotary_factor(scaling, config, partial))
        if dim < 2 or dim % 2:
            raise QuantkitError(
                f"head_dim gives the rotary embedding {dim} channels",
                f"it rotates pairs of them: {_SOURCE}",
            )
        for place in (scaling, config):
            if partial is None and place.get("partial_rotary_factor", 1) not in (None, 1):
                raise QuantkitError(
                    f"config.json has partial_rotary_factor = {place['partial_rotary_factor']!r}",
                    "quantkit rotates whole heads of this architecture",
                )
        theta = next(
            (
                place["rope_theta"]
                for place in (scaling, config)
                if place.get("rope_theta") is not None
            ),
            default_theta,
        )
        if theta is None:
            raise QuantkitError(
                "config.json has no rope_theta", "add the value the model was trained with"
            )
        theta, kind = _number("rope_theta", theta, above=1.0), _kind(scaling)
        if kind == "default":
            _check_fields(scaling, kind)
            return cls(dim, theta, interleaved)
        return cls(dim, theta, interleaved, kind, **_values(scaling, kind, config))

    @property
    def softmax_factor(self) -> float:
        """Multiplier of head_dim ** -0.5: DeepSeek applies mscale_all_dim to q and k, hence
        squared."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    @property
    def cos_sin_factor(self) -> float:
        """Multiplier of cos and sin: YaRN's attention factor."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def inverse_frequencies(self, device: torch.device | str = "cpu") -> Tensor:
        """[dim / 2] float32. Scaling keeps high frequencies, divides low ones by `factor`, and
        interpolates linearly in between."""
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        original = self.theta**-exponent
        if self.kind == "default":
            return original
        if self.kind == "linear":
            return original / self.factor
        keep = self._yarn_share(device) if self.kind == "yarn" else self._llama3_share(original)
        return original / self.factor * (1 - keep) + original * keep

    def _yarn_share(self, device: torch.device | str) -> Tensor:
        """Fraction of each original frequency that is kept: a ramp over the channel index, between
        two numbers of rotations."""
        low, high = self._correction_dim(self.beta_fast), self._correction_dim(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        span = high - low if high != low else 0.001
        ramp = (torch.arange(self.dim // 2, dtype=torch.float32, device=device) - low) / span
        return 1 - ramp.clamp(0, 1)

    def _llama3_share(self, original: Tensor) -> Tensor:
        """Fraction of each original frequency that is kept: a ramp over its rotations within the
        original context."""
        rotations = self.original_max_position * original / (2 * math.pi)
        return (
            (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        ).clamp(0, 1)

    def cos_sin(self, positions: Tensor, group: int = 1) -> tuple[Tensor, Tensor]:
        """positions int64 [T] -> cos, sin [T, dim / 2] float32, scaled by YaRN's attention factor.
        group: as of `rotary_angles`."""
        device = positions.device
        frequencies = (
            _cached_frequencies(self, device)
            if device.type == "cuda"
            else self.inverse_frequencies(device)
        )
        return rotary_angles(positions, frequencies, factor=self.cos_sin_factor, group=group)

    def _correction_dim(self, rotations: float) -> float:
        return (
            self.dim
            * math.log(self.original_max_position / (rotations * 2 * math.pi))
            / (2 * math.log(self.theta))
        )


_FREQUENCIES: dict[tuple[Rope, torch.device], Tensor] = {}


def _cached_frequencies(rope: Rope, device: torch.device) -> Tensor:
    """As `inverse_frequencies`, cached: saves 13 launches per decode step. Frequencies computed
    during graph capture only have their values after a replay, and are not cached."""
    found = _FREQUENCIES.get((rope, device))
    if found is None:
        with torch.inference_mode(False):  # calibration may need gradients of rotated inputs
            found = rope.inverse_frequencies(device)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _FREQUENCIES[rope, device] = found
    return found


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The description of the rotary embedding; as in transformers, `rope_scaling` takes
    precedence."""
    named = next((name for name in ("rope_scaling", "rope_parameters") if config.get(name)), None)
    scaling = config[named] if named else {}
    if not isinstance(scaling, Mapping):
        raise QuantkitError(f"config.json has {named} = {scaling!r}, not an object", _SOURCE)
    return scaling


def length_kind(config: Mapping[str, Any]) -> str:
    """The kind of a config.json's rotary embedding if its frequencies depend on the text length;
    else empty."""
    scaling = next(
        (
            value
            for name in ("rope_scaling", "rope_parameters")
            if isinstance(value := config.get(name), Mapping) and value
        ),
        {},
    )
    return next(
        (kind for kind in _BY_LENGTH if kind in (scaling.get("rope_type"), scaling.get("type"))), ""
    )


def _partial_rotary_factor(
    scaling: Mapping[str, Any], config: Mapping[str, Any], default: float
) -> float:
    named = (
        place["partial_rotary_factor"]
        for place in (scaling, config)
        if place.get("partial_rotary_factor") is not None
    )
    share = _number("partial_rotary_factor", next(named, default))
    if share > 1:
        raise QuantkitError(
            f"config.json has partial_rotary_factor = {share:g}, more than a whole head", _SOURCE
        )
    return share


def _kind(scaling: Mapping[str, Any]) -> Kind:
    named = [scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None] or [
        "default"
    ]
    if len(named) == 2 and named[0] != named[1]:
        raise QuantkitError(
            f"config.json's rope scaling has rope_type {named[0]!r} and type {named[1]!r}",
            "keep the one that is meant",
        )
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        if named[0] == kind:
            return kind
    raise QuantkitError(
        f"config.json has rope scaling {named[0]!r}",
        f"use another engine: quantkit computes {', '.join(kinds)}",
    )


def _check_fields(scaling: Mapping[str, Any], kind: Kind) -> None:
    known = {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        *_NEEDED[kind],
        *_OPTIONAL[kind],
    }
    unknown = [key for key, value in scaling.items() if key not in known and value is not None]
    if unknown:
        raise QuantkitError(
            f"config.json's rope scaling {kind!r} has {unknown[0]} = {scaling[unknown[0]]!r}",
            "quantkit does not compute it",
        )
    missing = [key for key in _NEEDED[kind] if key not in scaling]
    if missing:
        raise QuantkitError(f"config.json's rope scaling {kind!r} lacks {missing[0]}", _SOURCE)


def _values(scaling: Mapping[str, Any], kind: Kind, config: Mapping[str, Any]) -> JsonObject:
    """Fields of Rope for a scaled kind."""
    _check_fields(scaling, kind)
    given = {
        key: scaling[key]
        for key in (*_NEEDED[kind], *_OPTIONAL[kind])
        if scaling.get(key) is not None
    }
    values: JsonObject = {}
    if "original_max_position_embeddings" in _OPTIONAL[kind]:
        # As in transformers: the top-level field takes precedence, and without either the model was
        # not extended.
        first = config.get("original_max_position_embeddings") or given.pop(
            "original_max_position_embeddings", None
        )
        given.pop("original_max_position_embeddings", None)
        original = _number(
            "original_max_position_embeddings", first or config.get("max_position_embeddings")
        )
        if original < 1:
            raise QuantkitError(
                f"config.json has original_max_position_embeddings = {original:g}, less than one "
                "token",
                _SOURCE,
            )
        values["original_max_position"] = int(original)
        if kind == "yarn" and "factor" not in given:  # null in config.json
            given["factor"] = (
                _number("max_position_embeddings", config.get("max_position_embeddings")) / original
            )
    if "truncate" in given:
        values["truncate"] = bool(given.pop("truncate"))
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if key in given:
            values[key] = _number(key, given.pop(key), above=None)
    for key in ("beta_fast", "beta_slow"):
        if given.get(key) == 0:  # as in transformers: the default
            del given[key]
    values |= {key: _number(key, value) for key, value in given.items()}
    missing = [key for key in _NEEDED[kind] if key not in values]
    if missing:
        raise QuantkitError(f"config.json's rope scaling {kind!r} has {missing[0]} = null", _SOURCE)
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise QuantkitError(
            "config.json's rope scaling 'llama3' has high_freq_factor not above low_freq_factor",
            _SOURCE,
        )
    return values


def _number(key: str, value: Any, above: float | None = 0.0) -> float:
    """A number of config.json, greater than `above`, and in the range that frequencies can be
    computed with."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        not is_number
        or not (value == 0 or _SMALLEST <= abs(value) <= _LARGEST)
        or (above is not None and value <= above)
    ):
        wanted = "a number" if above is None else f"a number above {above:g}"
        raise QuantkitError(f"config.json has {key} = {value!r:.60}, not {wanted}", _SOURCE)
    return float(value)
