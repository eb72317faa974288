"""DeepSeek's own FP8: X.weight float8_e4m3fn [N, K] and X.weight_scale_inv float32 [ceil(N / 128),
ceil(K / 128)].

The scale is a multiplier despite its name (DeepSeek-V3 README_WEIGHTS.md); some releases store it
in 16 bits, or as the exponent of a power of two (UE8M0). Which linears are FP8 is said by their
dtype.
"""

from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import (
    CODES,
    Along,
    Format,
    Grids,
    Json,
    Parts,
    Plain,
    Shape,
    Tensors,
    stored_part,
)
from quantkit.common.errors import QuantkitError
from quantkit.grids.base import Grid, Weight
from quantkit.grids.fp8_block import FP8_BLOCK, Fp8BlockWeight

_BLOCK_SIZE = [FP8_BLOCK, FP8_BLOCK]
BLOCKS: tuple[Along, ...] = (("N", FP8_BLOCK), ("K", FP8_BLOCK))
_SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


class Fp8Block(Format):
    name = "fp8-block"
    variant = "e4m3-128x128"
    marker_dtype = torch.float8_e4m3fn
    own_suffixes = (".weight_scale_inv",)
    is_source = True
    with_fp4 = False

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        return (
            stored_part(".weight", (torch.float8_e4m3fn,), shape, *CODES),
            stored_part(".weight_scale_inv", _SCALES, shape, *BLOCKS),
        )

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        weight = Fp8BlockWeight.of(weight)
        return {f"{module}.weight": weight.codes, f"{module}.weight_scale_inv": weight.scale}

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        return Fp8BlockWeight(
            tensors[f"{module}.weight"], tensors[f"{module}.weight_scale_inv"].float()
        )

    def detect(self, config: Json, side: Json) -> bool:
        block = config.get("quantization_config") or {}
        has_fp4 = "fp4" in (block.get("expert_dtype"), config.get("expert_dtype"))
        return (
            block.get("quant_method") == "fp8"
            and block.get("weight_block_size") is not None
            and has_fp4 == self.with_fp4
        )

    def grid(self, config: Json, side: Json) -> Grid | None:
        block_size = config["quantization_config"].get("weight_block_size")
        if block_size != _BLOCK_SIZE:
            raise QuantkitError(
                f"the checkpoint is FP8 with weight_block_size {block_size}",
                f"quantkit reads FP8 with {_BLOCK_SIZE}",
            )
        return None

    def config_block(self, grid: Grid | None, quantized: Grids, plain: Plain) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": _BLOCK_SIZE,
        }

    def quantizes(self, module: str, role: str, *, mtp: bool = False) -> bool:
        return role in ("linear", "kv_b", "indexer")


FORMAT = Fp8Block()
