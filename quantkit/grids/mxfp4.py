"""MXFP4 (OCP MX): E2M1 values and a power of two per 32 input channels; and the same values as
NVFP4, where the powers of two lie close enough together for e4m3."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.grids.base import Grid, Scales
from quantkit.grids.e2m1 import Fp4Grid, Fp4Quantizer, Fp4Weight, decode_e2m1, encode_e2m1
from quantkit.grids.mx import E8M0_BIAS, MX_GROUP, MxQuantizer, MxWeight, encode_e8m0
from quantkit.grids.nvfp4 import FP4_GROUP, Nvfp4Grid, Nvfp4Weight

if TYPE_CHECKING:
    from quantkit_kernels import Weight as KernelWeight

_RAISED = (0, 1)
"""Powers of two that a fit tries, above the one under which the largest value of a group is from 4
to 8."""
_E4M3_RANGE = (-9, 8)
"""Exponents of the powers of two that e4m3 holds."""
_GLOBAL_RANGE = (-100, 100)
"""Exponents that a global scale may have: its reciprocal, too, is a normal number."""


@dataclass(frozen=True)
class Mxfp4Grid(Fp4Grid):
    """activation_bits: 4 where the inputs of the linears are rounded to MXFP4 too."""

    group_size: int = MX_GROUP
    activation_bits: int = 16

    power_scales = True

    @property
    def label(self) -> str:
        return "mxfp4" if self.activation_bits == 16 else f"mxfp4-w4a{self.activation_bits}"

    @property
    def equivalents(self) -> tuple[Grid, ...]:
        return (Nvfp4Grid(),) if self.activation_bits == 16 else ()

    def quantizer(
        self, amax: Tensor, scale_dtype: torch.dtype, fit_points: int
    ) -> "Mxfp4Quantizer":
        return Mxfp4Quantizer(_RAISED if fit_points else (0,))


@dataclass(frozen=True, eq=False)
class Mxfp4Weight(MxWeight, Fp4Weight):
    """w = e2m1[codes] * 2 ** (exponent - 127), an exponent per row and group of 32 input channels.

    codes uint8 [N, K] in 0..15, bit 3 the sign; exponent as of `MxWeight`.
    """

    codes: Tensor
    exponent: Tensor

    group_size = MX_GROUP

    def __post_init__(self) -> None:
        self.check(torch.uint8)

    @property
    def grid(self) -> Mxfp4Grid:
        return Mxfp4Grid()

    def kernel_weight(
        self, dtype: torch.dtype, activation_bits: int = 16, *, in_groups: bool = False
    ) -> "KernelWeight":
        """NVFP4's operators, where NVFP4 holds the same values; else dense. Over inputs rounded to
        MXFP4 where the format has them so."""
        from quantkit_kernels import DenseMx4, Fp4Mx4

        alike, rounds = self.is_nvfp4(), activation_bits == 4
        found = self.to_nvfp4().kernel_weight(dtype) if alike else super().kernel_weight(dtype)
        return found if not rounds else Fp4Mx4(*found) if alike else DenseMx4(*found)

    def is_nvfp4(self) -> bool:
        """Whether `to_nvfp4` gives the same values, bit for bit."""
        power, multiplier = self._powers(None)
        return bool((power >= _E4M3_RANGE[0]).all()) and multiplier == self._unclamped(None)

    def to_nvfp4(self, largest: int | None = None) -> Nvfp4Weight:
        """With a scale for each half of a group and a global scale that is a power of two: the same
        codes, but for groups whose power lies more than 17 below the largest, which are rounded to
        the smallest scale there is.

        largest: the largest exponent of the tensor and its fused siblings (`largest_exponent`),
        which share a global scale; None: its own.
        """
        power, multiplier = self._powers(largest)
        smallest = _E4M3_RANGE[0]
        codes, low = self.codes, power < smallest
        if bool(low.any()):
            values = decode_e2m1(codes).unflatten(1, (-1, MX_GROUP))
            shift = (power - smallest).clamp(max=0).unsqueeze(-1)
            rounded = encode_e2m1(torch.ldexp(values, shift)).flatten(1)
            codes = torch.where(low.repeat_interleave(MX_GROUP, 1), rounded, codes)
        ones = torch.ones_like(power, dtype=torch.float32)
        scale = torch.ldexp(ones, power.clamp(min=smallest)).to(torch.float8_e4m3fn)
        halves = scale.view(torch.uint8).repeat_interleave(MX_GROUP // FP4_GROUP, 1)
        return Nvfp4Weight(
            codes, halves.view(scale.dtype), torch.tensor(2.0**multiplier, device=scale.device)
        )

    @property
    def largest_exponent(self) -> int:
        """Of the groups that are not all zeros; 127, which is a scale of 1, where all are."""
        zero = self._zero_groups()
        return E8M0_BIAS if bool(zero.all()) else int(self.exponent.masked_fill(zero, 0).max())

    def _powers(self, largest: int | None) -> tuple[Tensor, int]:
        """Exponents of the scales under the global one, int32 [N, K / 32], and that of the global
        scale. Groups of zeros may have any scale."""
        multiplier = min(max(self._unclamped(largest), _GLOBAL_RANGE[0]), _GLOBAL_RANGE[1])
        power = self.exponent.int() - E8M0_BIAS - multiplier
        return power.clamp(max=_E4M3_RANGE[1]).masked_fill(self._zero_groups(), 0), multiplier

    def _unclamped(self, largest: int | None) -> int:
        return (self.largest_exponent if largest is None else largest) - E8M0_BIAS - _E4M3_RANGE[1]

    def _zero_groups(self) -> Tensor:
        return (self.codes & 7).unflatten(1, (-1, MX_GROUP)).amax(-1) == 0


class Mxfp4Quantizer(MxQuantizer, Fp4Quantizer):
    """E2M1 with a power of two per 32 channels: the largest under which the group's largest value
    stays above 4, and those `raised` by.

    Of several the first lets values beyond 6 saturate, as OCP's MX has it; the next keeps all, with
    a scale twice as large. One alone is compressed-tensors', which takes the next beyond 7.
    """

    element_exponent = 2

    def encode(self, values: Tensor, scales: Scales) -> Mxfp4Weight:
        return Mxfp4Weight(self.codes(values, scales), encode_e8m0(scales.scale))
