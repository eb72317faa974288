"""How often the tokens of a text were routed to each expert: counted by calibration, ppl, eval and
the engine, and read by expert placement.

A file is one JSON object: {"quantkit": "expert counts", "model_type", "hidden_size", "experts",
"tokens", "layers": {"3": [count, ...]}}, layers by their number in the model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from quantkit.common.atomic_write import write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_json
from quantkit.common.settings import checked
from quantkit.models.architecture import ModelConfig

KIND = "expert counts"
FILE_NAME = "expert_counts.json"
"""Name of the file in the output of quantize."""
_REMEDY = (
    "give a file that quantize, ppl --count-experts, eval --count-experts or serve "
    "--count-experts wrote"
)


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
        found = checked(read_json(path), _File, str(path), _REMEDY)
        for layer, counts in found.layers.items():
            if len(counts) != found.experts:
                raise QuantkitError(
                    f"{path} has {len(counts)} counts for layer {layer} and says {found.experts} "
                    "experts",
                    _REMEDY,
                )
        layers = {int(layer): counts for layer, counts in found.layers.items()}
        return cls(found.model_type, found.hidden_size, found.experts, found.tokens, layers)


_Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
"""What JSON readers represent exactly."""


class _File(BaseModel):
    quantkit: Literal["expert counts"]
    model_type: str
    hidden_size: _Count
    experts: _Count
    tokens: _Count
    layers: dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,5})$")], list[_Count]]
