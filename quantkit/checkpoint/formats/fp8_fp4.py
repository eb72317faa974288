"""DeepSeek-V4's own: FP8 blocks of 128 x 128 and MXFP4 experts, each with powers of two (UE8M0)
for scales. Read only.

FP8     X.weight float8_e4m3fn [N, K]     X.weight_scale_inv [ceil(N / 128), ceil(K / 128)]
MXFP4   X.weight int8 [N, K / 2]          X.weight_scale_inv float8_e8m0fnu [N, K / 32]

E2M1 codes lie two to a byte along the inputs, the even one in the low bits. The dtype says which of
the two a linear is. The release writes .scale for .weight_scale_inv (checkpoint/tensor_aliases.py).
"""

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import (
    Parts,
    Shape,
    Specs,
    Tensors,
    require_multiple,
    stored_part,
)
from quantkit.checkpoint.formats.compressed_mxfp4 import exponents
from quantkit.checkpoint.formats.fp8_block import Fp8Block
from quantkit.checkpoint.formats.nvfp4 import CODE_PAIRS
from quantkit.checkpoint.header import TensorSpec
from quantkit.grids.base import Grid, QuantizedWeight, Weight
from quantkit.grids.mxfp4 import MX_GROUP, Mxfp4Grid, Mxfp4Weight
from quantkit.quant.packing import pack_pairs, unpack_pairs


class Fp8BlockFp4(Fp8Block):
    name = "fp8-fp4"
    variant = "e4m3-128x128 and e2m1-32"
    with_fp4 = True

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        if grid != Mxfp4Grid():
            return super().parts(module, shape, grid)
        require_multiple(module, "input channels", shape[1], MX_GROUP)
        codes = stored_part(".weight", (torch.int8, torch.uint8), shape, *CODE_PAIRS)
        scales = exponents(".weight_scale_inv", shape)
        return codes, replace(scales, dtypes=scales.dtypes[::-1])

    def quantized_module(self, tensor: TensorSpec) -> str | None:
        if tensor.dtype in (torch.int8, torch.uint8) and tensor.name.endswith(self.marker):
            return tensor.name.removesuffix(self.marker)
        return super().quantized_module(tensor)

    def stored(self, module: str, tensors: Specs, grid: Grid | None) -> tuple[Shape, Grid | None]:
        codes = tensors[f"{module}.weight"]
        rows, columns = codes.shape
        return (
            ((rows, columns), None)
            if codes.dtype == self.marker_dtype
            else ((rows, 2 * columns), Mxfp4Grid())
        )

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        if QuantizedWeight.of(weight).grid != Mxfp4Grid():
            return super().pack(module, weight)
        weight = Mxfp4Weight.of(weight)
        scale = weight.exponent.view(torch.float8_e8m0fnu)
        return {
            f"{module}.weight": pack_pairs(weight.codes).view(torch.int8),
            f"{module}.weight_scale_inv": scale,
        }

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        codes, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale_inv"]
        if codes.dtype == self.marker_dtype:
            return super().unpack(module, tensors)
        return Mxfp4Weight(unpack_pairs(codes.view(torch.uint8)), scale.view(torch.uint8))


FORMAT = Fp8BlockFp4()
