"""What the NVFP4 formats share: codes two to a byte in the marker's tensor, uint8 [N, K / 2], the
even input in the low bits."""

from typing import Any

import torch

from quantkit.checkpoint.formats.base import (
    Along,
    Format,
    Shape,
    StoredPart,
    require_multiple,
    stored_part,
)
from quantkit.grids.base import Grid
from quantkit.grids.nvfp4 import FP4_GROUP, Nvfp4Grid

CODE_PAIRS: tuple[Along, ...] = (("N", 1), ("K", 2))


class Nvfp4(Format):
    """activation_bits: 4 for linears that round what they read, whose description says so and which
    have a scale for it; 16 for those that do not, where such a scale may be stored too and is not
    used."""

    scale_dtype = torch.float8_e4m3fn
    per_element = 2

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


def is_fp4(args: Any, group: int = FP4_GROUP) -> bool:
    """Whether a config group describes such numbers, by the keys that compressed-tensors and ModelOpt
    have in common."""
    keys = ("num_bits", "type", "group_size")
    return isinstance(args, dict) and tuple(map(args.get, keys)) == (4, "float", group)


def code_parts(
    module: str, shape: Shape, codes: str, *scale_dtypes: torch.dtype
) -> tuple[StoredPart, StoredPart]:
    """Bytes of codes, and group scales in X.weight_scale, of a linear [N, K]."""
    require_multiple(module, "input channels", shape[1], FP4_GROUP)
    scales = (torch.float8_e4m3fn, *scale_dtypes)
    return (
        stored_part(codes, (torch.uint8,), shape, *CODE_PAIRS),
        stored_part(".weight_scale", scales, shape, ("N", 1), ("K", FP4_GROUP)),
    )
