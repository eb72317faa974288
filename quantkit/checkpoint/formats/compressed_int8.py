"""compressed-tensors int-quantized, W8A8: int8 per output channel, activations quantized per token
when they come.

    X.weight int8 [N, K]   X.weight_scale float32 [N, 1]

vLLM, SGLang, vllm-ascend and omni-infer load it. The scale is float32, omni-infer's own; the others
copy it into their dtype.

What llm-compressor also calls so is read, and never written: int4 a byte a code (its W4A8 and
W4AFP8), groups, zero points, and one scale for all of a weight.
"""

from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.formats import compressed
from quantkit.checkpoint.formats.base import (
    CODES,
    FLOAT_DTYPES,
    Along,
    Grids,
    Json,
    Parts,
    Shape,
    StoredPart,
    Tensors,
    Unquantized,
    group_axis,
    stored_part,
    stored_scale,
)
from quantkit.grids.base import Grid, Weight
from quantkit.grids.int_groups import IntGrid, IntWeight

GRID = IntGrid(bits=8, group_size=None, symmetric=True)


class CompressedInt8(compressed.Compressed):
    variant = "int-quantized"
    marker_dtype = torch.int8
    own_suffixes = (".weight_scale",)
    activation_bits = 8

    def holds(self, grid: Grid) -> bool:
        return grid == GRID

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        return (
            stored_part(".weight", (torch.int8,), shape, *CODES),
            stored_part(".weight_scale", (torch.float32, *FLOAT_DTYPES), shape, ("N", 1), None),
        )

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        weight = IntWeight.of(weight)
        return {
            f"{module}.weight": weight.codes,
            f"{module}.weight_scale": stored_scale(module, weight.scale, self.scale_dtype),
        }

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        return IntWeight(
            tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"].float(), None, bits=8
        )

    def detect(self, config: Json, side: Json) -> bool:
        return compressed.detect(config, self.variant) and not any(
            _is_other(args) for args in compressed.weight_descriptions(config)
        )

    def grid(self, config: Json, side: Json) -> Grid | None:
        compressed.weight_args(config)
        return GRID

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> dict[str, Any]:
        weights = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "channel",
            "dynamic": False,
        }
        return compressed.config_block(
            self.variant, weights, compressed.INT8_TOKENS, quantized, unquantized
        )


def _is_other(args: Json) -> bool:
    return tuple(args.get(key) for key in ("num_bits", "type", "strategy", "symmetric")) != (
        8,
        "int",
        "channel",
        True,
    )


class CompressedInts(CompressedInt8):
    """bits: of a code. per_tensor: one scale, float [1]. activation_bits: 8 where what linears read
    is described as int8 per token.

    Else X.weight_scale [N, G], and X.weight_zero_point int8 [N, G] where not symmetric.
    """

    own_suffixes = (".weight_scale", ".weight_zero_point")  # type: ignore[assignment]

    def __init__(self, bits: int, *, per_tensor: bool = False, activation_bits: int = 16) -> None:
        self.bits, self.per_tensor = bits, per_tensor
        self.activation_bits = activation_bits  # type: ignore[misc]

    def holds(self, grid: Grid) -> bool:
        return False

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        assert grid is not None
        codes = stored_part(".weight", (torch.int8,), shape, *CODES)
        if self.per_tensor:
            return codes, StoredPart(".weight_scale", FLOAT_DTYPES, (1,))
        along: tuple[Along, ...] = (("N", 1), group_axis(module, shape[1], grid))
        scale = stored_part(".weight_scale", FLOAT_DTYPES, shape, *along)
        points = stored_part(".weight_zero_point", (torch.int8,), shape, *along)
        return (codes, scale) if grid.symmetric else (codes, scale, points)

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        codes, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"].float()
        if scale.dim() != 2 or self.per_tensor:
            scale = scale.reshape(1, 1).expand(len(codes), 1).contiguous()
        return IntWeight(codes, scale, tensors.get(f"{module}.weight_zero_point"), self.bits)

    def detect(self, config: Json, side: Json) -> bool:
        if not compressed.detect(config, self.variant):
            return False
        said = [
            (args.get("num_bits"), args.get("strategy") == "tensor")
            for args in compressed.weight_descriptions(config)
            if _is_other(args)
        ]
        # What is on no grid that is read, one of them must own: it says so.
        known = bool(said) and said[0] in [(one.bits, one.per_tensor) for one in OTHERS]
        if not said or not known:
            return bool(said) and self is OTHERS[0]
        matches = self.bits == 8 or compressed.reads_int8(config) == (self.activation_bits == 8)
        return said[0] == (self.bits, self.per_tensor) and matches

    def grid(self, config: Json, side: Json) -> Grid | None:
        args = compressed.weight_args(config)
        size, strategy, bits = args.get("group_size"), args.get("strategy"), args.get("num_bits")
        by_group = strategy == "group" and type(size) is int and size > 0
        symmetric = bool(args.get("symmetric", True))
        strategies = ("tensor",) if self.per_tensor and symmetric else ("channel",)
        if (
            bits != self.bits
            or args.get("type") != "int"
            or not (by_group or strategy in strategies)
        ):
            raise compressed.unreadable(args, "4- or 8-bit int by group, channel or tensor")
        reads = self.activation_bits if by_group and bits == 4 else 16
        return IntGrid(
            bits=bits,
            group_size=size if by_group else None,
            symmetric=symmetric,
            activation_bits=reads,
        )


FORMAT = CompressedInt8()
OTHERS = (
    CompressedInts(4),
    CompressedInts(4, activation_bits=8),
    CompressedInts(8),
    CompressedInts(8, per_tensor=True, activation_bits=8),
)
