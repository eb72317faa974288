"""compressed-tensors pack-quantized: int4 or int8 in natural order, P = eight or four to a word
along the inputs.

    X.weight_packed int32 [N, K / P]   X.weight_scale bfloat16 [N, G]   X.weight_shape int64 [2] = (N, K)
    X.weight_zero_point int32 [N / P, G], asymmetric only, packed along the OUTPUTS

Codes and zero points are signed, stored as v + 8 or v + 128: w = (q - z) * s. Activations have 16
bits (W4A16, W8A16), or int4 codes come with input_activations of int8, a step a token (W4A8 in
groups).
"""

import torch
from torch import Tensor

from quantkit.checkpoint.formats import compressed
from quantkit.checkpoint.formats.base import (
    FLOAT_DTYPES,
    Grids,
    Json,
    Parts,
    Shape,
    StoredPart,
    Tensors,
    Unquantized,
    group_axis,
    require_multiple,
    stored_part,
    stored_scale,
)
from quantkit.common.result import JsonObject
from quantkit.grids.base import Grid, Weight
from quantkit.grids.int_groups import IntGrid, IntWeight
from quantkit.quant.packing import (
    from_offset,
    pack_bytes,
    pack_words,
    to_offset,
    unpack_bytes,
    unpack_words,
)


class CompressedInt4(compressed.Compressed):
    variant = "pack-quantized"
    outer = ("head", "embedding")
    scale_dtype = torch.bfloat16
    marker = ".weight_packed"
    marker_dtype = torch.int32
    own_suffixes = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point")
    bits = 4
    per_element = 8

    def holds(self, grid: Grid) -> bool:
        return grid.kind == f"int{self.bits}" and grid.activation_bits == 16

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        assert grid is not None
        require_multiple(module, "input channels", shape[1], self.per_element)
        along, packed = group_axis(module, shape[1], grid), self.per_element
        parts = (
            stored_part(".weight_packed", (torch.int32,), shape, ("N", 1), ("K", packed)),
            stored_part(".weight_scale", (self.scale_dtype, *FLOAT_DTYPES), shape, ("N", 1), along),
            StoredPart(".weight_shape", (torch.int64, torch.int32), (2,)),
        )
        if grid.symmetric:
            return parts
        require_multiple(module, "outputs", shape[0], packed)
        points = (torch.int32,)
        return (*parts, stored_part(".weight_zero_point", points, shape, ("N", packed), along))

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        weight = IntWeight.of(weight)
        tensors = {
            f"{module}.weight_packed": self.words(weight.codes),
            f"{module}.weight_scale": stored_scale(module, weight.scale, self.scale_dtype),
            f"{module}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        }
        if weight.zero_point is not None:
            tensors[f"{module}.weight_zero_point"] = self.words(weight.zero_point.T).T.contiguous()
        return tensors

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        zero_point = tensors.get(f"{module}.weight_zero_point")
        return IntWeight(
            codes=self.codes(tensors[f"{module}.weight_packed"]),
            scale=tensors[f"{module}.weight_scale"].float(),
            zero_point=None if zero_point is None else self.codes(zero_point.T).T.contiguous(),
            bits=self.bits,
        )

    def words(self, codes: Tensor) -> Tensor:
        """int8 [..., P n] -> int32 [..., n]"""
        return pack_words(to_offset(codes))

    def codes(self, words: Tensor) -> Tensor:
        """int32 [..., n] -> int8 [..., P n]"""
        return from_offset(unpack_words(words))

    def detect(self, config: Json, side: Json) -> bool:
        matches = compressed.detect(config, self.variant) and not compressed.has_bits(config, 8)
        return matches and compressed.reads_int8(config) == (self.activation_bits == 8)

    def grid(self, config: Json, side: Json) -> Grid | None:
        args = compressed.weight_args(config)
        size = args.get("group_size")
        by_group = args.get("strategy") == "group" and type(size) is int and size > 0
        if (
            args.get("num_bits") != self.bits
            or args.get("type") != "int"
            or not (by_group or args.get("strategy") == "channel")
        ):
            raise compressed.unreadable(args, f"{self.bits}-bit int by group or channel")
        symmetric, reads = (
            bool(args.get("symmetric", True)),
            self.activation_bits if by_group else 16,
        )
        return IntGrid(
            bits=self.bits,
            group_size=size if by_group else None,
            symmetric=symmetric,
            activation_bits=reads,
        )

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> JsonObject:
        assert grid is not None
        strategy: JsonObject = (
            {"strategy": "group", "group_size": grid.group_size}
            if grid.group_size
            else {"strategy": "channel"}
        )
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": grid.symmetric,
            **strategy,
            "dynamic": False,
        }
        activations = compressed.INT8_TOKENS if self.activation_bits == 8 else None
        return compressed.config_block(self.variant, weights, activations, quantized, unquantized)


class _Int8Inputs(CompressedInt4):
    activation_bits = 8

    def holds(self, grid: Grid) -> bool:
        return (grid.kind, grid.symmetric, grid.activation_bits) == ("int4", True, 8)


class _Fp16Scales(CompressedInt4):
    scale_dtype = torch.float16


class CompressedInt8Words(CompressedInt4):
    bits = 8
    per_element = 4

    def words(self, codes: Tensor) -> Tensor:
        return pack_bytes(codes)

    def codes(self, words: Tensor) -> Tensor:
        return unpack_bytes(words)

    def detect(self, config: Json, side: Json) -> bool:
        return compressed.detect(config, self.variant) and compressed.has_bits(config, 8)


FORMAT = CompressedInt4()
W4A8 = _Int8Inputs()
INT8_WORDS = CompressedInt8Words()
FP16_SCALES = _Fp16Scales()
"""For weights that come with such scales. Engines copy a scale into the dtype they run in, so
float16 runs lose nothing."""
