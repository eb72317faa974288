"""Unquantized: X.weight in BF16, FP16 or FP32, and nothing said in config.json, or of a cache
alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import (
    CODES,
    FLOAT_DTYPES,
    SIDE_FILES,
    Format,
    StoredPart,
    is_cache_alone,
)
from quantkit.checkpoint.header import TensorSpec
from quantkit.grids.base import Grid, Weight


class DenseFormat(Format):
    name = "dense"
    variant = "plain"
    scale_dtype = torch.float32
    own_suffixes = ()
    is_source = True

    def holds(self, grid: Grid) -> bool:
        return False

    def parts(
        self, module: str, shape: tuple[int, int], grid: Grid | None
    ) -> tuple[StoredPart, ...]:
        return (StoredPart(".weight", FLOAT_DTYPES, shape, axes=CODES),)

    def stored(
        self, module: str, tensors: Mapping[str, TensorSpec], grid: Grid | None
    ) -> tuple[tuple[int, int], Grid | None]:
        rows, columns = tensors[f"{module}.weight"].shape
        return (rows, columns), None

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        assert isinstance(weight, Tensor), type(weight)
        return {f"{module}.weight": weight}

    def unpack(self, module: str, tensors: Mapping[str, Tensor]) -> Weight:
        return tensors[f"{module}.weight"]

    def detect(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> bool:
        nothing = not config.get("quantization_config") and not any(
            name in side for name in SIDE_FILES
        )
        return nothing or is_cache_alone(config, side)

    def grid(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> Grid | None:
        return None

    def ignored(
        self, config: Mapping[str, Any], side: Mapping[str, Any]
    ) -> Callable[[str], bool] | None:
        return None

    def config_block(
        self, grid: Grid | None, quantized: Mapping[str, Grid | None], plain: Sequence[TensorSpec]
    ) -> dict[str, Any]:
        return {}

    def quantized_module(self, tensor: TensorSpec) -> str | None:
        return None

    def quantizes(self, module: str, role: str, *, mtp: bool = False) -> bool:
        return False


FORMAT = DenseFormat()
