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

from quantkit.checkpoint.formats import compressed
from quantkit.checkpoint.formats.base import (
    Grids,
    Json,
    Unquantized,
)
from quantkit.checkpoint.formats.nvfp4 import Nvfp4, is_fp4
from quantkit.grids.base import Grid
from quantkit.grids.nvfp4 import FP4_GROUP


class CompressedFp4(compressed.Compressed, Nvfp4):
    variant = "nvfp4-pack-quantized"
    marker = ".weight_packed"
    own_suffixes = (".weight_packed", ".weight_scale", ".weight_global_scale")

    scalars = (".weight_global_scale", ".input_global_scale")
    divides = True
    scalar_shape = (1,)

    def detect(self, config: Json, side: Json) -> bool:
        found = compressed.detect(config, self.variant)
        return found and compressed.reads(config, is_fp4) == self.rounds_inputs

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


FORMAT = CompressedFp4()
W4A4 = CompressedFp4(4)
