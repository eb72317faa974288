"""How often the tokens of a text were routed to each expert: counted by calibration, ppl, eval and
the engine, and read by expert placement.

A file is one JSON object: {"quantkit": "expert counts", "model_type", "hidden_size", "experts",
"tokens", "layers": {"3": [count, ...]}}, layers by their number in the model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.common.atomic_write import write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_json
from quantkit.models.architecture import ModelConfig

KIND = "expert counts"
FILE_NAME = "expert_counts.json"
"""Name of the file in the output of quantize."""
_REMEDY = (
    "give a file that quantize, ppl --count-experts, eval --count-experts or serve "
    "--count-experts wrote"
)
_MOST = 2**53
"""Largest count that JSON readers represent exactly."""


@dataclass(frozen=True)
class ExpertCounts:
    """model_type, hidden_size, experts: of the model. tokens: of the text. layers: counts of each
    expert, by layer."""

    model_type: str
    hidden_size: int
    experts: int
    tokens: int
    layers: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model_type: Any, config: ModelConfig, tokens: int, layers: Mapping[int, Sequence[int]]
    ) -> "ExpertCounts":
        """Counts of a model whose config.json has `model_type` and was read as `config`. Raises
        QuantkitError where it has no routed experts."""
        if config.routing is None:
            raise QuantkitError(
                f"a model of type {model_type} has no routed experts to count",
                "leave out --count-experts",
            )
        return cls(
            str(model_type), config.hidden_size, config.routing.n_routed_experts, tokens, layers
        )

    def to_bytes(self) -> bytes:
        layers = {str(layer): list(counts) for layer, counts in sorted(self.layers.items())}
        return (json.dumps({"quantkit": KIND, **vars(self), "layers": layers}) + "\n").encode()

    def write(self, path: Path) -> None:
        """Written atomically."""
        write_atomic(path, self.to_bytes())

    @classmethod
    def read(cls, path: Path) -> "ExpertCounts":
        """Raises QuantkitError for any other file."""
        if not path.exists():
            raise QuantkitError(f"{path} does not exist", _REMEDY)
        found = read_json(path)
        if found.get("quantkit") != KIND or not isinstance(found.get("layers"), dict):
            raise QuantkitError(f"{path} is not a file of expert counts", _REMEDY)
        hidden_size, experts, tokens = (
            _count(path, name, found.get(name)) for name in ("hidden_size", "experts", "tokens")
        )
        layers = {
            _layer(path, name): _counts(path, name, row, experts)
            for name, row in found["layers"].items()
        }
        return cls(str(found.get("model_type")), hidden_size, experts, tokens, layers)


def _layer(path: Path, name: str) -> int:
    if not name.isdecimal():
        raise QuantkitError(f"{path} counts a layer {name!r}, which is not a number", _REMEDY)
    return int(name)


def _counts(path: Path, layer: str, row: Any, experts: int) -> list[int]:
    if not isinstance(row, list) or len(row) != experts:
        held = f"{len(row)} counts" if isinstance(row, list) else "no list"
        raise QuantkitError(
            f"{path} has {held} for layer {layer} and says {experts} experts", _REMEDY
        )
    return [_count(path, f"layer {layer}", value) for value in row]


def _count(path: Path, name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise QuantkitError(f"{path} has {value!r} for {name}, which is not a count", _REMEDY)
    return value
