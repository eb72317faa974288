"""DeepSeek's own FP8: X.weight float8_e4m3fn [N, K] and X.weight_scale_inv float32 [ceil(N / 128),
ceil(K / 128)].

The scale is a multiplier despite its name (DeepSeek-V3 README_WEIGHTS.md); some releases store it
in 16 bits, or as the exponent of a power of two (UE8M0). Which linears are FP8 is said by their
dtype.

MXFP8, as SGLang and MiniMax-M3 have it (quant_method mxfp8): X.weight_scale_inv uint8 [N, K / 32], the
exponent of a power of two plus 127.

DeepSeek-V4's own: FP8 blocks of 128 x 128, in V4.1 of 32 x 32, and MXFP4 experts, each with
powers of two (UE8M0) for scales. Read only.

FP8     X.weight float8_e4m3fn [N, K]     X.weight_scale_inv [ceil(N / 128), ceil(K / 128)]
MXFP4   X.weight int8 [N, K / 2]          X.weight_scale_inv float8_e8m0fnu [N, K / 32]

E2M1 codes lie two to a byte along the inputs, the even one in the low bits. The dtype says which of
the two a linear is. The release writes .scale for .weight_scale_inv (checkpoint/tensor_aliases.py).
"""

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import (
    CODES,
    Format,
    Grids,
    Json,
    Parts,
    Shape,
    Specs,
    Tensors,
    Unquantized,
    require_multiple,
    stored_part,
    unquantized_linears,
)
from quantkit.checkpoint.formats.compressed_mxfp4 import exponents
from quantkit.checkpoint.formats.nvfp4 import CODE_PAIRS
from quantkit.checkpoint.header import TensorSpec
from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.grids.base import Grid, QuantizedWeight, Weight
from quantkit.grids.fp8_block import FP8_BLOCK, Fp8BlockGrid, Fp8BlockWeight
from quantkit.grids.mx import MX_GROUP
from quantkit.grids.mxfp4 import Mxfp4Grid, Mxfp4Weight
from quantkit.grids.mxfp8 import Mxfp8Grid, Mxfp8Weight
from quantkit.quant.packing import pack_pairs, unpack_pairs

_BLOCK_SIZE = [FP8_BLOCK, FP8_BLOCK]
_V41_BLOCK = 32
_SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


class Fp8Block(Format):
    name = "fp8-block"
    variant = "e4m3-128x128"
    marker_dtype = torch.float8_e4m3fn
    own_suffixes = (".weight_scale_inv",)
    is_source = True
    with_fp4 = False
    side = FP8_BLOCK
    """Rows and columns of a block."""

    def holds(self, grid: Grid) -> bool:
        return not self.with_fp4 and grid == Fp8BlockGrid()

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        return (
            stored_part(".weight", (torch.float8_e4m3fn,), shape, *CODES),
            stored_part(".weight_scale_inv", _SCALES, shape, ("N", self.side), ("K", self.side)),
        )

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        weight = Fp8BlockWeight.of(weight)
        return {f"{module}.weight": weight.codes, f"{module}.weight_scale_inv": weight.scale}

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        scale = tensors[f"{module}.weight_scale_inv"].float()
        return Fp8BlockWeight(tensors[f"{module}.weight"], scale, (self.side, self.side))

    def detect(self, config: Json, side: Json) -> bool:
        block = config.get("quantization_config") or {}
        has_fp4 = "fp4" in (block.get("expert_dtype"), config.get("expert_dtype"))
        return (
            block.get("quant_method") == "fp8"
            and block.get("weight_block_size") is not None
            and has_fp4 == self.with_fp4
            and (self.side == _V41_BLOCK)
            == (has_fp4 and block["weight_block_size"] == [_V41_BLOCK, _V41_BLOCK])
        )

    def grid(self, config: Json, side: Json) -> Grid | None:
        block_size = config["quantization_config"].get("weight_block_size")
        if block_size != [self.side, self.side]:
            raise QuantkitError(
                f"the checkpoint is FP8 with weight_block_size {block_size}",
                f"quantkit reads FP8 with {_BLOCK_SIZE}, and with {[_V41_BLOCK] * 2} next to FP4",
            )
        return None if self.with_fp4 else Fp8BlockGrid()

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> JsonObject:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": _BLOCK_SIZE,
            "modules_to_not_convert": unquantized_linears(unquantized, quantized),
        }

    def quantizes(self, module: str, role: str, *, mtp: bool = False) -> bool:
        return role in ("linear", "kv_b", "indexer")


class Fp8BlockMx(Fp8Block):
    """MXFP8 as SGLang has it: a power of two for 32 inputs of a row; inputs are rounded as they
    come."""

    variant = "mxfp8-1x32"
    activation_bits = 8

    def holds(self, grid: Grid) -> bool:
        return grid == Mxfp8Grid()

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        require_multiple(module, "input channels", shape[1], MX_GROUP)
        codes = stored_part(".weight", (torch.float8_e4m3fn,), shape, *CODES)
        return codes, exponents(".weight_scale_inv", shape)

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        weight = Mxfp8Weight.of(weight)
        return {f"{module}.weight": weight.codes, f"{module}.weight_scale_inv": weight.exponent}

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        scale = tensors[f"{module}.weight_scale_inv"]
        return Mxfp8Weight(tensors[f"{module}.weight"], scale.view(torch.uint8))

    def detect(self, config: Json, side: Json) -> bool:
        return (config.get("quantization_config") or {}).get("quant_method") == "mxfp8"

    def grid(self, config: Json, side: Json) -> Grid | None:
        return Mxfp8Grid()

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> JsonObject:
        block = super().config_block(grid, quantized, unquantized)
        of_mx = {"quant_method": "mxfp8", "weight_block_size": [1, MX_GROUP], "scale_fmt": "ue8m0"}
        return block | of_mx


FORMAT, MX = Fp8Block(), Fp8BlockMx()


class Fp8BlockFp4(Fp8Block):
    name = "fp8-fp4"
    with_fp4 = True

    def __init__(self, side: int) -> None:
        self.side, self.variant = side, f"e4m3-{side}x{side} and e2m1-32"  # type: ignore[misc]

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


WITH_FP4 = Fp8BlockFp4(FP8_BLOCK)
WITH_FP4_32 = Fp8BlockFp4(_V41_BLOCK)
