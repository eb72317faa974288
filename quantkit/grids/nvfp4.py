"""NVFP4: E2M1 values, an e4m3 scale per 16 input channels, one float32 scale per tensor.

    w ~ e2m1[code] * scale[group] * global_scale          global_scale = amax(W) / (6 * 448)
                                                          scale = amax_g / 6 / global_scale
    x ~ e2m1[code] * scale[group] / divisor               divisor = 6 * 448 / (4 amax(x)),
                                                          amax(x) of calibration

Linears that an engine fuses (gate and up; q_a and kv_a) must share the global scale: take
`global_scale` of the amax over both and pass it in.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.grids.base import (
    Scales,
    Weight,
    extremes_of,
    relative_error,
)
from quantkit.grids.e2m1 import E2M1_MAX, Fp4Grid, Fp4Quantizer, Fp4Weight
from quantkit.grids.int_groups import scale_divisor_range

if TYPE_CHECKING:
    from quantkit_kernels import Weight as KernelWeight

FP4_GROUP = 16
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
INPUT_HEADROOM = 4.0
"""Times that an input may be larger than any of calibration before it saturates. A power of two
changes no other rounding: e4m3 has room for it as long as a group's largest value is not below amax
/ 7168."""
_NEIGHBOURS = (0, -1, 1, -2, 2, 3, 4)
"""e4m3 codes around amax / 6 that a fit tries: from a quarter below to a half above, which is amax
/ 4."""


@dataclass(frozen=True)
class Nvfp4Grid(Fp4Grid):
    """activation_bits: 4 where the inputs of the linears are rounded to NVFP4 too, under a scale
    per tensor that is stored with the weight."""

    group_size: int = FP4_GROUP
    activation_bits: int = 16

    @property
    def label(self) -> str:
        return "nvfp4" if self.activation_bits == 16 else f"nvfp4-w4a{self.activation_bits}"

    @property
    def has_input_scales(self) -> bool:
        return self.activation_bits == 4

    @property
    def engine_name(self) -> str:
        return "nvfp4" if self.activation_bits == 16 else "nvfp4-w4a4"

    def quantizer(
        self, amax: Tensor, scale_dtype: torch.dtype, fit_points: int
    ) -> "Nvfp4Quantizer":
        return Nvfp4Quantizer(global_scale(amax), _NEIGHBOURS[: max(fit_points, 1)])


@dataclass(frozen=True, eq=False)
class Nvfp4Weight(Fp4Weight):
    """w = e2m1[codes] * scale * global_scale, a scale per row and group of 16 input channels.

    codes uint8 [N, K] in 0..15, bit 3 the sign; scale float8_e4m3fn [N, K / 16]; global_scale
    float32 [], a multiplier.
    input_divisor: where inputs are rounded to NVFP4 too, what the scales of their groups are
    divided by, float32 []; None where they are not. It is a divisor because rounding begins with it
    (`quantkit_kernels.round_to_nvfp4`).
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor
    input_divisor: Tensor | None = None

    group_size = FP4_GROUP

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        assert self.codes.dtype == torch.uint8, f"codes are {self.codes.dtype}"
        assert self.scale.dtype == torch.float8_e4m3fn, f"scale is {self.scale.dtype}"
        assert self.scale.shape == (rows, columns // FP4_GROUP), (
            f"scale {tuple(self.scale.shape)} for codes {tuple(self.codes.shape)}"
        )
        assert columns % FP4_GROUP == 0, f"groups of {FP4_GROUP} do not divide {columns} columns"
        for name, value in (
            ("global_scale", self.global_scale),
            ("input_divisor", self.input_divisor),
        ):
            assert value is None or value.shape == (), f"{name} has shape {tuple(value.shape)}"
            assert value is None or value.dtype == torch.float32, f"{name} is {value.dtype}"

    @property
    def grid(self) -> Nvfp4Grid:
        return Nvfp4Grid(activation_bits=16 if self.input_divisor is None else 4)

    def scales(self) -> Tensor:
        return self.scale.float() * self.global_scale

    def kernel_weight(
        self, dtype: torch.dtype, activation_bits: int = 16, *, in_groups: bool = False
    ) -> "KernelWeight":
        """Weight-only, or rounding its inputs where it brings a divisor for them."""
        from quantkit_kernels import Fp4

        return Fp4(self.codes, self.scale, self.global_scale, self.input_divisor)

    def difference(self, name: str, stored: Weight) -> float:
        other = Nvfp4Weight.of(stored)
        assert torch.equal(self.codes, other.codes), f"codes of {name} differ"
        assert torch.equal(self.scale.view(torch.uint8), other.scale.view(torch.uint8)), (
            f"scales of {name} differ"
        )
        if not bool(torch.isfinite(other.global_scale)):
            raise QuantkitError(
                f"the global scale of {name} has no reciprocal in FP32",
                "the checkpoint is damaged: download it again",
            )
        return relative_error(self.global_scale, other.global_scale)

    def divisor_range(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return scale_divisor_range(self.scale.float(), torch.finfo(self.scale.dtype))

    def divide_rows(self, divisor: Tensor, dtype: torch.dtype) -> "Nvfp4Weight":
        scale = self.scale.float() / divisor[:, None]
        return replace(self, scale=scale.to(self.scale.dtype))


@dataclass(frozen=True)
class Nvfp4Quantizer(Fp4Quantizer):
    """E2M1 with an e4m3 scale per 16 channels under `global_scale` float32 [] or [..., N].

    `fit` starts from amax / 6 and tries the e4m3 values `neighbours` codes away: a smaller scale
    clips the largest value and is finer for the rest, a larger one lets it fall on 4 instead of 6.
    """

    global_scale: Tensor
    neighbours: tuple[int, ...] = (0,)

    group_size = FP4_GROUP

    def fit(self, groups: Tensor, importance: Tensor | None = None) -> Scales:
        amax = extremes_of(groups).abs().amax(-1)
        base = (amax / E2M1_MAX / self.global_scale).clamp(E4M3_MIN, E4M3_MAX)
        base = torch.where(amax > 0, base, torch.ones_like(base)).to(torch.float8_e4m3fn)
        # Positive e4m3 values are ordered as their bits are, so a neighbour is one bit pattern
        # away.
        bits = base.view(torch.int8).to(torch.int16)
        candidates = []
        for offset in self.neighbours:
            scale = (bits + offset).clamp(1, 0x7E).to(torch.int8).view(torch.float8_e4m3fn)
            candidates.append(Scales(scale.float() * self.global_scale, None))
        return self.best(candidates, groups, importance)

    def nearest_scale(self, scale: Tensor) -> Tensor:
        codes = (scale / self.global_scale).clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
        return codes.float() * self.global_scale

    def for_group_batch(self) -> "Nvfp4Quantizer":
        if self.global_scale.dim() == 0:
            return self
        return replace(self, global_scale=self.global_scale.unsqueeze(-2))

    def encode(self, values: Tensor, scales: Scales) -> Nvfp4Weight:
        """All rows of one tensor share one global scale."""
        multiplier = self.global_scale.flatten()[0]
        scale = (scales.scale / multiplier).to(torch.float8_e4m3fn)
        return Nvfp4Weight(self.codes(values, scales), scale, multiplier)


def global_scale(amax: Tensor) -> Tensor:
    """Multiplier float32 [] for a tensor, or fused siblings, whose largest magnitude is `amax`:
    amax / 2688, 1 for zeros.

    Computed as the reciprocal of 2688 / amax, the divisor compressed-tensors stores: such a value
    survives being inverted twice, so the same weight is stored exactly in formats that keep the
    multiplier and in those that keep the divisor.
    """
    divisor = E2M1_MAX * E4M3_MAX / amax.float()
    scale = divisor.reciprocal()
    return torch.where(amax > 0, scale, torch.ones_like(scale))


def input_divisor(amax: Tensor) -> Tensor:
    """Divisor float32 [...] of inputs whose largest magnitudes were `amax`, 1 for zeros: 2688 / (4
    amax), one that survives being inverted twice, too."""
    return global_scale(INPUT_HEADROOM * amax).reciprocal()
