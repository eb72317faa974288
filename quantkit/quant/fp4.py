"""NVFP4: E2M1 values, an e4m3 scale per 16 input channels, one float32 scale per tensor.

    w ~ e2m1[code] * scale[group] * global_scale          global_scale = amax(W) / (6 * 448), scale = amax_g / 6 / global_scale

Linears that an engine fuses (gate and up; q_a and kv_a) must share the global scale: take `global_scale` of the amax over
both and pass it in. Rounding is to nearest, ties to the even code, as ModelOpt and compressed-tensors do.
"""

import torch
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.quant.weights import FP4_GROUP, Fp4Weight
from quantkit.quant.weights import decode_e2m1 as decode_e2m1  # the inverse of encode_e2m1, kept with the values

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 codes uint8 0..15 of float32 values; beyond 6 saturates, and -0.0 is code 0."""
    magnitude = x.abs()
    # Midpoints between neighbours. At a tie the even code wins, which is the lower one at every other midpoint.
    codes = (magnitude > 0.25).to(torch.uint8)
    codes += magnitude >= 0.75
    codes += magnitude > 1.25
    codes += magnitude >= 1.75
    codes += magnitude > 2.5
    codes += magnitude >= 3.5
    codes += magnitude > 5.0
    return codes.bitwise_or_((x < 0).to(torch.uint8).mul_(8))


def global_scale(amax: Tensor) -> Tensor:
    """Multiplier float32 [] for a tensor, or fused siblings, whose largest magnitude is `amax`: amax / 2688, 1 for zeros.

    Computed as the reciprocal of 2688 / amax, the divisor compressed-tensors stores: such a value survives being inverted
    twice, so the same weight is stored exactly in formats that keep the multiplier and in those that keep the divisor.
    """
    divisor = E2M1_MAX * E4M3_MAX / amax.float()
    scale = divisor.reciprocal()
    return torch.where(amax > 0, scale, torch.ones_like(scale))


def fp4_scale(groups: Tensor, global_scale: Tensor) -> Tensor:
    """e4m3 scales of groups float32 [..., 16] -> float8_e4m3fn [...]; a group of zeros gets 1 (ModelOpt's rule)."""
    amax = groups.abs().amax(dim=-1)
    scale = (amax / E2M1_MAX / global_scale).clamp(E4M3_MIN, E4M3_MAX)
    return torch.where(amax > 0, scale, torch.ones_like(scale)).to(torch.float8_e4m3fn)


def round_fp4(w: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Nearest codes: w float32 [N, K], scale float8_e4m3fn [N, G] -> uint8 [N, K]."""
    step = scale.float() * global_scale
    return encode_e2m1(w.unflatten(1, (scale.shape[1], -1)) / step.unsqueeze(-1)).flatten(-2)


def quantize_fp4(w: Tensor, *, global_scale: Tensor | None = None) -> Fp4Weight:
    """Round W float32 [N, K] to the nearest NVFP4 values. `global_scale` is the one shared with fused siblings, if any."""
    columns = w.shape[1]
    if columns % FP4_GROUP:
        raise QuantkitError(f"FP4 groups of {FP4_GROUP} do not divide {columns} input channels", "leave this weight unquantized")
    w = w.float()
    multiplier = _own_global_scale(w) if global_scale is None else global_scale
    scale = fp4_scale(w.unflatten(1, (-1, FP4_GROUP)), multiplier)
    return Fp4Weight(round_fp4(w, scale, multiplier), scale, multiplier)


def _own_global_scale(w: Tensor) -> Tensor:
    return global_scale(w.abs().amax())
