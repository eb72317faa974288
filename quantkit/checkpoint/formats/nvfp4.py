"""What the NVFP4 formats share: codes two to a byte in the marker's tensor, uint8 [N, K / 2], the
even input in the low bits."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import (
    Along,
    Format,
    Parts,
    Shape,
    StoredPart,
    Tensors,
    require_multiple,
    stored_part,
)
from quantkit.grids.base import Grid, Weight
from quantkit.grids.nvfp4 import FP4_GROUP, Nvfp4Grid, Nvfp4Weight
from quantkit.quant.packing import pack_pairs, unpack_pairs

CODE_PAIRS: tuple[Along, ...] = (("N", 1), ("K", 2))


class Nvfp4(Format):
    """activation_bits: 4 for linears that round what they read, whose description says so and which
    have a scale for it; 16 for those that do not, where such a scale may be stored too and is not
    used."""

    scale_dtype = torch.float8_e4m3fn
    per_element = 2
    scalars: ClassVar[tuple[str, str]]  # suffixes of the global scale and of what inputs have
    divides: ClassVar[bool]  # both are divisors, not multipliers
    scalar_shape: ClassVar[tuple[int, ...]]
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()  # that scales are also declared in

    def __init__(self, activation_bits: int = 16) -> None:
        self.activation_bits = activation_bits  # type: ignore[misc]

    @property
    def rounds_inputs(self) -> bool:
        return self.activation_bits == 4

    @property
    def own_grid(self) -> Nvfp4Grid:
        return Nvfp4Grid(activation_bits=self.activation_bits)

    def holds(self, grid: Grid) -> bool:
        return grid == self.own_grid

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        require_multiple(module, "input channels", shape[1], FP4_GROUP)
        scales, scalar = (torch.float8_e4m3fn, *self.scale_dtypes), (torch.float32,)
        of_weight, of_inputs = self.scalars
        return (
            stored_part(self.marker, (torch.uint8,), shape, *CODE_PAIRS),
            stored_part(".weight_scale", scales, shape, ("N", 1), ("K", FP4_GROUP)),
            StoredPart(of_weight, scalar, self.scalar_shape),
            StoredPart(of_inputs, scalar, self.scalar_shape, required=self.rounds_inputs),
        )

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        weight = Nvfp4Weight.of(weight)
        scale, divisor = weight.global_scale, weight.input_divisor
        scalars = [scale.reciprocal() if self.divides else scale]
        if self.rounds_inputs:
            assert divisor is not None, module
            scalars.append(divisor if self.divides else divisor.reciprocal())
        tensors = {self.marker: pack_pairs(weight.codes), ".weight_scale": weight.scale}
        tensors |= {
            suffix: one.reshape(self.scalar_shape) for suffix, one in zip(self.scalars, scalars)
        }
        return {module + suffix: tensor for suffix, tensor in tensors.items()}

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        of_weight, of_inputs = self.scalars
        scale, divisor = tensors[module + of_weight].reshape(()), None
        if self.rounds_inputs:
            stored = tensors[module + of_inputs].reshape(())
            divisor = stored if self.divides else stored.reciprocal()
        return Nvfp4Weight(
            codes=unpack_pairs(tensors[f"{module}{self.marker}"]),
            scale=tensors[f"{module}.weight_scale"].view(torch.float8_e4m3fn),
            global_scale=scale.reciprocal() if self.divides else scale,
            input_divisor=divisor,
        )


def is_fp4(args: Any, group: int = FP4_GROUP) -> bool:
    """Whether a config group describes such numbers."""
    return are_floats(args, 4, group)


def are_floats(args: Any, bits: int, group: int) -> bool:
    """The same of floats in groups, by the keys that compressed-tensors and ModelOpt have in
    common."""
    keys = ("num_bits", "type", "group_size")
    return isinstance(args, dict) and tuple(map(args.get, keys)) == (bits, "float", group)
