"""NVFP4: E2M1 values, an e4m3 scale per 16 input channels, one float32 scale per tensor.

    w ~ e2m1[code] * scale[group] * global_scale          global_scale = amax(W) / (6 * 448), scale = amax_g / 6 / global_scale
    x ~ e2m1[code] * scale[group] / divisor               divisor = 6 * 448 / (4 amax(x)), amax(x) of calibration

Linears that an engine fuses (gate and up; q_a and kv_a) must share the global scale: take
`global_scale` of the amax over both and pass it in. Rounding is to nearest, ties to the even code,
as ModelOpt and compressed-tensors do.
"""

import torch
from torch import Tensor

from quantkit.grids.weights import (
    decode_e2m1 as decode_e2m1,
)  # the inverse of encode_e2m1, kept with the values

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
INPUT_HEADROOM = 4.0
"""Times that an input may be larger than any of calibration before it saturates. A power of two
changes no other rounding: e4m3 has room for it as long as a group's largest value is not below amax
/ 7168."""


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
