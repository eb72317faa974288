"""MXFP4 as NVFP4: the same values, where the powers of two lie close enough together for e4m3."""

import torch
from torch import Tensor

from quantkit.grids.e2m1 import encode_e2m1
from quantkit.grids.weights import FP4_GROUP, MX_GROUP, Fp4Weight, Mxfp4Weight, decode_e2m1

_LARGEST, _SMALLEST = 8, -9
"""Exponents of the powers of two that e4m3 holds."""
_BIAS = 127
_GLOBAL = (-100, 100)
"""Exponents that a global scale may have: its reciprocal, too, is a normal number."""


def is_nvfp4(weight: Mxfp4Weight, largest: int | None = None) -> bool:
    """Whether `to_nvfp4` gives the same values, bit for bit."""
    power, multiplier = _powers(weight, largest)
    return bool((power >= _SMALLEST).all()) and multiplier == _unclamped(weight, largest)


def to_nvfp4(weight: Mxfp4Weight, largest: int | None = None) -> Fp4Weight:
    """With a scale for each half of a group and a global scale that is a power of two: the same
    codes, but for groups whose power lies more than 17 below the largest, which are rounded to the
    smallest scale there is.

    largest: the largest exponent of the tensor and its fused siblings (`largest_exponent`), which
    share a global scale; None: its own.
    """
    power, multiplier = _powers(weight, largest)
    codes, low = weight.codes, power < _SMALLEST
    if bool(low.any()):
        values = decode_e2m1(codes).unflatten(1, (-1, MX_GROUP))
        rounded = encode_e2m1(
            torch.ldexp(values, (power - _SMALLEST).clamp(max=0).unsqueeze(-1))
        ).flatten(1)
        codes = torch.where(low.repeat_interleave(MX_GROUP, 1), rounded, codes)
    scale = torch.ldexp(torch.ones_like(power, dtype=torch.float32), power.clamp(min=_SMALLEST)).to(
        torch.float8_e4m3fn
    )
    halves = scale.view(torch.uint8).repeat_interleave(MX_GROUP // FP4_GROUP, 1).view(scale.dtype)
    return Fp4Weight(codes, halves, torch.tensor(2.0**multiplier, device=scale.device))


def largest_exponent(weight: Mxfp4Weight) -> int:
    """Of the groups that are not all zeros; 127, which stands for 1, where all are."""
    zero = _zero_groups(weight)
    return _BIAS if bool(zero.all()) else int(weight.exponent.masked_fill(zero, 0).max())


def _powers(weight: Mxfp4Weight, largest: int | None) -> tuple[Tensor, int]:
    """Exponents of the scales under the global one, int32 [N, K / 32], and that of the global
    scale. Groups of zeros may have any scale."""
    multiplier = min(max(_unclamped(weight, largest), _GLOBAL[0]), _GLOBAL[1])
    power = weight.exponent.int() - _BIAS - multiplier
    return power.clamp(max=_LARGEST).masked_fill(_zero_groups(weight), 0), multiplier


def _unclamped(weight: Mxfp4Weight, largest: int | None) -> int:
    return (largest_exponent(weight) if largest is None else largest) - _BIAS - _LARGEST


def _zero_groups(weight: Mxfp4Weight) -> Tensor:
    return (weight.codes & 7).unflatten(1, (-1, MX_GROUP)).amax(-1) == 0
