"""MXFP8 (OCP MX): E4M3 values and a power of two per 32 input channels. Inputs are rounded alike, as
they come."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.grids.base import Grid, Scales, check_group
from quantkit.grids.fp8_block import round_e4m3
from quantkit.grids.mx import MX_GROUP, MxQuantizer, MxWeight, encode_e8m0

if TYPE_CHECKING:
    from quantkit_kernels import Weight as KernelWeight


@dataclass(frozen=True)
class Mxfp8Grid(Grid):
    group_size: int = MX_GROUP

    bits = 8
    symmetric = True
    activation_bits = 8
    coarse_scales = True
    power_scales = True
    kind = "fp8"
    label = "mxfp8"

    def rank_multiple(self, *, inputs: bool) -> int:
        return self.group_size if inputs else 1

    def check_inputs(self, name: str, width: int) -> None:
        check_group(name, math.gcd(self.group_size, width), self.group_size, self.group_size, width)

    def quantizer(
        self, amax: Tensor, scale_dtype: torch.dtype, fit_points: int
    ) -> "Mxfp8Quantizer":
        return Mxfp8Quantizer()


@dataclass(frozen=True, eq=False)
class Mxfp8Weight(MxWeight):
    """w = codes * 2 ** (exponent - 127). codes float8_e4m3fn [N, K]; exponent as of `MxWeight`."""

    codes: Tensor
    exponent: Tensor

    def __post_init__(self) -> None:
        self.check(torch.float8_e4m3fn)

    @property
    def grid(self) -> Mxfp8Grid:
        return Mxfp8Grid()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        groups = self.codes.float().unflatten(1, (-1, MX_GROUP))
        return groups.mul_(self.scales().unsqueeze(-1)).flatten(1).to(dtype)

    def rows(self, start: int, stop: int) -> "Mxfp8Weight":
        return Mxfp8Weight(self.codes[start:stop], self.exponent[start:stop])

    def columns(self, name: str, start: int, stop: int) -> "Mxfp8Weight":
        self.grid.check_inputs(name, stop - start)
        exponent = self.exponent[:, start // MX_GROUP : stop // MX_GROUP]
        return Mxfp8Weight(self.codes[:, start:stop].contiguous(), exponent.contiguous())

    def kernel_weight(
        self, dtype: torch.dtype, activation_bits: int = 16, *, in_groups: bool = False
    ) -> "KernelWeight":
        """Dense, over inputs rounded to MXFP8 where the format has them so."""
        from quantkit_kernels import Dense, DenseMx8

        return (DenseMx8 if activation_bits == 8 else Dense)(self.dequantize(dtype))


class Mxfp8Quantizer(MxQuantizer):
    """E4M3 under the least power of two at which no value of the group is beyond 448. A larger one
    only makes the smallest values coarser, so a fit has none to try."""

    kind = "fp8"
    element_exponent = 8

    def quantize(self, w: Tensor, scales: Scales) -> Tensor:
        return round_e4m3(w, scales.scale)

    def encode(self, values: Tensor, scales: Scales) -> Mxfp8Weight:
        levels = values.unflatten(-1, (-1, MX_GROUP)) / scales.scale.unsqueeze(-1)
        codes = levels.flatten(-2).to(torch.float8_e4m3fn)
        return Mxfp8Weight(codes, encode_e8m0(scales.scale))
