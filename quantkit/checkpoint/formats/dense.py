"""Unquantized: X.weight in BF16, FP16 or FP32, and nothing said in config.json, or of a cache
alone."""

from typing import Any

from torch import Tensor

from quantkit.checkpoint.formats.base import (
    CODES,
    FLOAT_DTYPES,
    SIDE_FILES,
    Format,
    Grids,
    Json,
    Parts,
    Shape,
    Tensors,
    Unquantized,
    is_cache_alone,
    stored_part,
)
from quantkit.checkpoint.header import TensorSpec
from quantkit.grids.base import Grid, Weight


class DenseFormat(Format):
    name = "dense"
    variant = "plain"
    is_source = True

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        return (stored_part(".weight", FLOAT_DTYPES, shape, *CODES),)

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        assert isinstance(weight, Tensor), type(weight)
        return {f"{module}.weight": weight}

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        return tensors[f"{module}.weight"]

    def detect(self, config: Json, side: Json) -> bool:
        nothing = not config.get("quantization_config") and not any(
            name in side for name in SIDE_FILES
        )
        return nothing or is_cache_alone(config, side)

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> dict[str, Any]:
        return {}

    def quantized_module(self, tensor: TensorSpec) -> str | None:
        return None

    def quantizes(self, module: str, role: str, *, mtp: bool = False) -> bool:
        return False


FORMAT = DenseFormat()
