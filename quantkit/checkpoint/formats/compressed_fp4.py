"""compressed-tensors nvfp4-pack-quantized: E2M1 codes two to a byte along the inputs, the even one
in the low bits.

    X.weight_packed uint8 [N, K / 2]   X.weight_scale float8_e4m3fn [N, K / 16]   X.weight_global_scale float32 [1]
    X.input_global_scale float32 [1], where input_activations are described as 4-bit floats in
    groups (W4A4)

Global scales are DIVISORS: w = e2m1 * weight_scale / weight_global_scale. `fp4.global_scale` makes
multipliers whose reciprocal inverts back exactly; a multiplier from elsewhere may come back one
unit in the last place off.
"""

from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.formats import compressed
from quantkit.checkpoint.formats.base import (
    Grids,
    Json,
    Parts,
    Shape,
    StoredPart,
    Tensors,
    Unquantized,
)
from quantkit.checkpoint.formats.nvfp4 import Nvfp4, code_parts, is_fp4
from quantkit.grids.base import Grid, Weight
from quantkit.grids.nvfp4 import FP4_GROUP, Nvfp4Weight
from quantkit.quant.packing import pack_pairs, unpack_pairs


class CompressedFp4(compressed.Compressed, Nvfp4):
    variant = "nvfp4-pack-quantized"
    marker = ".weight_packed"
    own_suffixes = (".weight_packed", ".weight_scale", ".weight_global_scale")

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        return (
            *code_parts(module, shape, self.marker),
            StoredPart(".weight_global_scale", (torch.float32,), (1,)),
            StoredPart(".input_global_scale", (torch.float32,), (1,), required=self.rounds_inputs),
        )

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        weight = Nvfp4Weight.of(weight)
        tensors = {
            f"{module}.weight_packed": pack_pairs(weight.codes),
            f"{module}.weight_scale": weight.scale,
            f"{module}.weight_global_scale": weight.global_scale.reciprocal().reshape(1),
        }
        if self.rounds_inputs:
            assert weight.input_divisor is not None, module
            tensors[f"{module}.input_global_scale"] = weight.input_divisor.reshape(1)
        return tensors

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        return Nvfp4Weight(
            codes=unpack_pairs(tensors[f"{module}.weight_packed"]),
            scale=tensors[f"{module}.weight_scale"],
            global_scale=tensors[f"{module}.weight_global_scale"].reciprocal().reshape(()),
            input_divisor=tensors[f"{module}.input_global_scale"].reshape(())
            if self.rounds_inputs
            else None,
        )

    def detect(self, config: Json, side: Json) -> bool:
        return (
            compressed.detect(config, self.variant) and _rounds_inputs(config) == self.rounds_inputs
        )

    def grid(self, config: Json, side: Json) -> Grid | None:
        args = compressed.weight_args(config)
        if not is_fp4(args):
            raise compressed.unreadable(args, f"4-bit float in groups of {FP4_GROUP}")
        return self.own_grid

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> dict[str, Any]:
        strategy = {"strategy": "tensor_group", "group_size": FP4_GROUP}
        shared = {"num_bits": 4, "type": "float", "symmetric": True, **strategy}
        activations = {**shared, "dynamic": "local"} if self.rounds_inputs else None
        return compressed.config_block(
            self.variant, {**shared, "dynamic": False}, activations, quantized, unquantized
        )


def _rounds_inputs(config: Json) -> bool:
    """Whether groups with weights describe their inputs as NVFP4."""
    groups = config["quantization_config"].get("config_groups") or {}
    described = (
        [group for group in groups.values() if isinstance(group, dict) and group.get("weights")]
        if isinstance(groups, dict)
        else []
    )
    return bool(described) and all(is_fp4(group.get("input_activations")) for group in described)


FORMAT = CompressedFp4()
W4A4 = CompressedFp4(4)
