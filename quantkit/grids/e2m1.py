"""E2M1, the 4-bit float of NVFP4 and MXFP4: a sign, two exponent bits, one mantissa bit. Rounding
is to nearest, ties to the even code, as ModelOpt and compressed-tensors do."""

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from quantkit.grids.base import Grid, GroupedWeight, Levels, Quantizer, Scales, check_group

E2M1_MAX = 6.0
E2M1_VALUES = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 codes uint8 0..15 of float32 values; beyond 6 saturates, and -0.0 is code 0."""
    magnitude = x.abs()
    # Midpoints between neighbours. At a tie the even code wins, which is the lower one at every
    # other midpoint.
    codes = (magnitude > 0.25).to(torch.uint8)
    codes += magnitude >= 0.75
    codes += magnitude > 1.25
    codes += magnitude >= 1.75
    codes += magnitude > 2.5
    codes += magnitude >= 3.5
    codes += magnitude > 5.0
    return codes.bitwise_or_((x < 0).to(torch.uint8).mul_(8))


def decode_e2m1(codes: Tensor) -> Tensor:
    """Values float32 of E2M1 codes uint8 0..15."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def round_e2m1(w: Tensor, scale: Tensor) -> Tensor:
    """Nearest values of scale times E2M1, both float32 of shapes that broadcast."""
    level = w / scale
    # Spacing of E2M1 at |level|: 1/2 up to 2, 1 up to 4, 2 up to 6. Rounding to even in it is RNE
    # on the codes.
    spacing = torch.where(level.abs() < 2, 0.5, torch.where(level.abs() < 4, 1.0, 2.0))
    return (level / spacing).round_().mul_(spacing).clamp_(-E2M1_MAX, E2M1_MAX).mul_(scale)


class Fp4Grid(Grid):
    """E2M1 values in groups of one size."""

    group_size: int
    bits = 4
    symmetric = True
    coarse_scales = True
    kind = "fp4"

    def check_inputs(self, name: str, width: int) -> None:
        check_group(name, math.gcd(self.group_size, width), self.group_size, self.group_size, width)


class Fp4Weight(GroupedWeight):
    """codes uint8 [N, K] in 0..15, bit 3 the sign, in groups of `group_size` input channels."""

    group_size: int

    @abstractmethod
    def scales(self) -> Tensor:
        """What a group's E2M1 values are multiplied by, float32 [N, G]."""

    def levels(self) -> Levels:
        values = decode_e2m1(self.codes)
        return Levels(values, None, self.scales(), self.group_size, 4, is_e2m1=True)

    def columns(self, name: str, start: int, stop: int) -> Self:
        self.grid.check_inputs(name, stop - start)
        ends = start // self.group_size, stop // self.group_size
        cut = {name: part[:, slice(*ends)].contiguous() for name, part in self.matrices().items()}
        return replace(self, **cut | {"codes": self.codes[:, start:stop].contiguous()})  # type: ignore[type-var]


class Fp4Quantizer(Quantizer):
    """E2M1 under scales [..., G]."""

    group_size: int
    kind = "fp4"

    def quantize(self, w: Tensor, scales: Scales) -> Tensor:
        return round_e2m1(w, scales.scale)

    def codes(self, values: Tensor, scales: Scales) -> Tensor:
        """Of values on the grid [N, K], uint8 [N, K]."""
        levels = values.unflatten(-1, (-1, self.group_size)) / scales.scale.unsqueeze(-1)
        return encode_e2m1(levels).flatten(-2)
