"""W4A4 linears: the weight's codes and scales as they are, activations rounded to NVFP4 row by row
in groups of 16."""

import functools
import logging

import torch
from torch import Tensor

from quantkit_kernels.linear import Linear
from quantkit_kernels.scaled_mm.layout import packed, rounded_to_nvfp4, swizzled
from quantkit_kernels.weights import Fp4, Weight, shape

_log = logging.getLogger(__name__)


class ScaledMmLinear(Linear):
    def __init__(self, weight: Fp4, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, "scaled_mm")
        self.codes = packed(weight.codes.to(device))
        self.scales = swizzled(weight.scale.to(device))
        self.factor = weight.global_scale.to(device)

    def held(self) -> list[Tensor]:
        return [self.codes, self.scales, self.factor]

    def rows(self, x: Tensor) -> Tensor:
        codes, scales, whole = rounded_to_nvfp4(x)
        y = product(packed(codes), swizzled(scales), self.codes, self.scales)
        return (y.float() * (self.factor * whole)).to(self.dtype)


def product(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x[M, K] @ W[N, K].T in bfloat16 by the card's FP4 units; both as layout.py has them."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    blocks, order = ScalingType.BlockWise1x16, SwizzleType.SWIZZLE_32_4_4
    return scaled_mm(
        x,
        weight.t(),
        x_scales,
        blocks,
        scales,
        blocks,
        swizzle_a=order,
        swizzle_b=order,
        output_dtype=torch.bfloat16,
    )


def linear(weight: Weight, dtype: torch.dtype, device: torch.device) -> Linear:
    assert isinstance(weight, Fp4), type(weight)
    _warn()
    return ScaledMmLinear(weight, dtype, device)


@functools.cache
def _warn() -> None:
    _log.warning(
        "backend scaled_mm rounds activations to NVFP4: what runs is W4A4, not what a W4A16 "
        "checkpoint was made for"
    )
