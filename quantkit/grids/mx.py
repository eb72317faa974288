"""The scales of MXFP4 and MXFP8 (OCP MX): for each row and 32 input channels a power of two, stored
as E8M0, its exponent plus 127."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantkit.grids.base import (
    QuantizedWeight,
    Quantizer,
    Scales,
    Weight,
    dequantize,
    extremes_of,
    relative_error,
)

MX_GROUP = 32
E8M0_BIAS = 127
_E8M0_RANGE = (-126, 127)
"""Of exponents that are stored: powers of two that float32 holds as normal numbers."""
_FULL = 0.875
"""1.75, as frexp has it."""


class MxWeight(QuantizedWeight):
    """w = value of the code * 2 ** (exponent - 127), an exponent per row and group of 32 inputs.

    codes [N, K]; exponent uint8 [N, K / 32], the bits of float8_e8m0fnu, where 255 is NaN.
    """

    exponent: Tensor

    def check(self, dtype: torch.dtype) -> None:
        """dtype: of codes."""
        rows, columns = self.codes.shape
        assert self.codes.dtype == dtype, f"codes are {self.codes.dtype}"
        assert self.exponent.dtype == torch.uint8, f"exponent is {self.exponent.dtype}"
        assert columns % MX_GROUP == 0, f"groups of {MX_GROUP} do not divide {columns} columns"
        assert self.exponent.shape == (rows, columns // MX_GROUP), (
            f"exponent {tuple(self.exponent.shape)} for {tuple(self.codes.shape)}"
        )

    def scales(self) -> Tensor:
        """What a group's values are multiplied by, float32 [N, K / 32]."""
        return decode_e8m0(self.exponent)

    def difference(self, name: str, stored: Weight) -> float:
        return relative_error(self.dequantize(), dequantize(stored))

    def divisor_range(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Exponents stay within 1 to 254."""
        exponent = self.exponent.float()
        least = (exponent.amax(1) - 254).clamp(max=0).exp2()
        return least, (exponent.amin(1) - 1).clamp(0, 126).exp2()

    def divide_rows(self, divisor: Tensor, dtype: torch.dtype) -> Self:
        exponent = self.exponent.float() - divisor.log2().round()[:, None]
        return replace(self, exponent=exponent.clamp(1, 254).to(torch.uint8))  # type: ignore[type-var]


@dataclass(frozen=True)
class MxQuantizer(Quantizer):
    """A power of two per 32 channels: the one that leaves the group's largest value the exponent of
    the element type's, and those `raised` by. Where one alone is tried, it is the next beyond 1.75 of
    its own power: beyond 448, and beyond 7, midway between 6 and what E2M1 would have next.
    """

    raised: tuple[int, ...] = (0,)

    group_size = MX_GROUP
    element_exponent: ClassVar[int]

    def fit(self, groups: Tensor, importance: Tensor | None = None) -> Scales:
        amax = extremes_of(groups).abs().amax(-1)
        mantissa, exponent = amax.frexp()
        alone = len(self.raised) == 1
        power = exponent - 1 - self.element_exponent + ((mantissa > _FULL) & alone)
        power = torch.where(amax > 0, power, 0)
        ones = torch.ones_like(amax)
        candidates = [
            Scales(torch.ldexp(ones, (power + up).clamp(*_E8M0_RANGE)), None) for up in self.raised
        ]
        return self.best(candidates, groups, importance)

    def nearest_scale(self, scale: Tensor) -> Tensor:
        return scale.log2().round().clamp(*_E8M0_RANGE).exp2()


def decode_e8m0(exponent: Tensor) -> Tensor:
    """Powers of two float32 of the bits of float8_e8m0fnu, uint8 or of that dtype: 2 ** (bits -
    127), NaN for 255."""
    return exponent.view(torch.float8_e8m0fnu).float()


def encode_e8m0(scale: Tensor) -> Tensor:
    """Bits uint8 of powers of two float32."""
    return (scale.frexp().exponent - 1 + E8M0_BIAS).to(torch.uint8)
