"""What ModelSlim writes in addition to its W8A8_DYNAMIC and per-channel W4A8_DYNAMIC: each linear
by its type in the description. Read only.

    W8A8, W8A8_MIX   X.weight int8 [N, K]   X.input_scale, X.input_offset [1]   X.deq_scale [N] = input_scale * weight_scale
                     X.quant_bias int32 [N]; X.weight_scale [N, 1] in its first form alone
    W8A16            X.weight int8 [N, K]   X.weight_scale, X.weight_offset [N, G]
    W4A16            X.weight int8 [N, K], a byte a code; in its second form two to a byte, [N, K / 2] per channel and [N / 2, K] in groups
    W4A8_DYNAMIC     in groups: X.weight_scale [N, 1] times X.weight_scale_second [N, G]; packed [N / 2, K] in the second form

w = (code - offset) * scale. The second form is the one whose description has a version. deq_scale
is float32, or, for models in FP16, int64 whose low 32 bits are those of the float. Static scales of
activations are not used: inputs are quantized by token, which loses less.
"""

from typing import Literal

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import (
    FLOAT_DTYPES,
    Along,
    Format,
    Parts,
    Shape,
    Specs,
    StoredPart,
    Tensors,
    along_groups,
    require_multiple,
    stored_part,
)
from quantkit.common.errors import QuantkitError
from quantkit.grids.base import Grid, Weight
from quantkit.grids.int_groups import IntGrid, IntWeight
from quantkit.quant.packing import from_twos_complement, unpack_pairs

Packed = Literal["", "N", "K"]
"""Along which axis two codes share a byte."""
_OFFSETS = (*FLOAT_DTYPES, torch.int8, torch.int32, torch.int64)
_SCALES = (".weight_scale", ".weight_offset")
_ROWS: tuple[Along, ...] = (("N", 1), None)


SLICES = 16
"""The largest tensor-parallel size a row-parallel scale_bias is cut for."""


def bias_slices(module: str) -> int:
    """Columns of a linear's scale_bias."""
    return SLICES if module.endswith(("down_proj", "o_proj")) else 1


class SlimLinear(Format):
    """bits of a code; packed; suffixes of its scales, and whether activations are quantized."""

    name = "modelslim"
    variant = "ascendV1"
    marker_dtype = torch.int8
    own_suffixes = (".weight_scale", ".weight_offset")

    def __init__(
        self,
        bits: int,
        activation_bits: int,
        packed: Packed = "",
        *,
        second: bool = False,
        static: bool = False,
    ) -> None:
        self.bits, self.packed, self.second, self.static = bits, packed, second, static
        self.activation_bits = activation_bits  # type: ignore[misc]
        if static:
            self.own_suffixes = (".deq_scale", ".input_scale")  # type: ignore[misc]

    def stored(self, module: str, tensors: Specs, grid: Grid | None) -> tuple[Shape, Grid | None]:
        rows, columns = tensors[f"{module}.weight"].shape
        shape = (
            rows * (2 if self.packed == "N" else 1),
            columns * (2 if self.packed == "K" else 1),
        )
        scale = tensors.get(f"{module}.weight_scale{'_second' if self.second else ''}")
        count = (
            scale.shape[1] if scale is not None and len(scale.shape) == 2 and scale.shape[1] else 1
        )
        require_multiple(module, "input channels", shape[1], count)
        return shape, IntGrid(
            self.bits,
            None if count == 1 else shape[1] // count,
            symmetric=self.activation_bits == 8,
        )

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        assert grid is not None
        rows, columns = shape
        axes = (("N", 2 if self.packed == "N" else 1), ("K", 2 if self.packed == "K" else 1))
        codes = stored_part(".weight", (torch.int8,), shape, *axes)
        if self.static:
            return codes, *_static_parts(shape)
        along = along_groups(columns, columns // (grid.group_size or columns))
        own = None if self.second else along
        found = (
            codes,
            *(stored_part(suffix, _OFFSETS, shape, ("N", 1), own) for suffix in _SCALES),
        )
        if not self.second:
            return found
        seconds = (
            stored_part(f"{suffix}_second", _OFFSETS, shape, ("N", 1), along) for suffix in _SCALES
        )
        sums = (rows, bias_slices(module))
        return (*found, *seconds, StoredPart(".scale_bias", FLOAT_DTYPES, sums, False, _ROWS))

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        codes = self._codes(tensors[f"{module}.weight"])
        if self.static:
            scale = _float_of(tensors[f"{module}.deq_scale"]) / tensors[
                f"{module}.input_scale"
            ].float().reshape(())
            return IntWeight(codes, scale.reshape(-1, 1).contiguous(), None, 8)
        scale, offset = (
            tensors[f"{module}.weight_scale"].float(),
            tensors[f"{module}.weight_offset"],
        )
        if self.second:
            scale = scale * tensors[f"{module}.weight_scale_second"].float()
            if bool(offset.any()) or bool(tensors[f"{module}.weight_offset_second"].any()):
                raise QuantkitError(
                    f"{module} has offsets of two stages that are not zero",
                    "quantkit reads those that are symmetric",
                )
            return IntWeight(codes, scale, None, self.bits)
        points = offset.round()
        half = 2 ** (self.bits - 1)
        if not torch.equal(points, offset) or bool((points.abs() > half).any()):
            return (
                codes - offset.float().repeat_interleave(codes.shape[1] // offset.shape[1], 1)
            ) * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
        zero_point = points.clamp(-half, half - 1).to(torch.int8)
        return IntWeight(
            codes,
            scale,
            zero_point if self.activation_bits == 16 or bool(points.any()) else None,
            self.bits,
        )

    def _codes(self, stored: Tensor) -> Tensor:
        if self.packed == "N":
            return from_twos_complement(unpack_pairs(stored.view(torch.uint8).T)).T.contiguous()
        return (
            from_twos_complement(unpack_pairs(stored.view(torch.uint8)))
            if self.packed == "K"
            else stored
        )


def _static_parts(shape: Shape) -> Parts:
    return (
        stored_part(".deq_scale", (torch.float32, torch.int64), shape, ("N", 1)),
        stored_part(".quant_bias", (torch.int32,), shape, ("N", 1)),
        *(StoredPart(suffix, _OFFSETS, (1,)) for suffix in (".input_scale", ".input_offset")),
        *(stored_part(suffix, _OFFSETS, shape, *_ROWS, required=False) for suffix in _SCALES),
    )


def _float_of(deq_scale: Tensor) -> Tensor:
    return (
        deq_scale
        if deq_scale.dtype == torch.float32
        else deq_scale.to(torch.int32).view(torch.float32)
    )
