"""Weights as the Triton kernels read them: steps of 128 input features, one after the other, and of
each step all output features.

    4 bits   int16 [E, K/128, P, N, C]: the words of a step; word j of part p has the codes of features 32 i + C p + j, i = 0..3.
             int4: C = 32, P = 1, code + 8 in bits 4 i .. 4 i + 3. FP4: C = 16, P = 2, bits as
             bfloat16 has them, shifted right by 3 i (sign 15, magnitude 8..6), but plane 3, which
             has sign, exponents and mantissa in bits 14, 13, 11 and 10
    int8     int8 [E, K/128, N, 128]; w8a16 the same
    scales   of a step and output feature. w8a16: float32 [E, K/g, N], groups of g at most 128.
             int4: 32 bits a group, scale as float16 and zero point + 8: int32 [E, K/128, N] for
             groups of 128, int64 for 64, int64 [E, K/128, 2, N] for 32. FP4: int64, a byte a group, 5 bits of
             exponent and 3 of mantissa

N is padded to whole strips of 64 rows, K to whole steps; what is added decodes to zero. Everything
here is plain torch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.weights import W8A16, Fp4, Int4, Int8, Weight, group_size, shape

SPAN, STRIP = 128, 64
FP4_SCALE_BIAS, FP4_FACTOR = 16, 2.0**45
"""Codes are decoded to 2^-126 of their value and scales to 2^81 times theirs; the row's scale makes
up for both."""


class PackedSteps(NamedTuple):
    """One weight, or those of all experts with a leading dimension. row_scale float32 [N]."""

    codes: Tensor
    scales: Tensor
    row_scale: Tensor


def pack(weight: Weight) -> PackedSteps:
    n, k = shape(weight)
    below, right = -n % STRIP, -k % SPAN
    if isinstance(weight, Int8):
        codes = _byte_steps(weight.codes, below, right)
        return PackedSteps(
            codes,
            torch.zeros(1, dtype=torch.int32, device=codes.device),
            F.pad(weight.scale[:, 0], (0, below)),
        )
    if isinstance(weight, W8A16):
        return _pack_w8a16(weight, below, right)
    if isinstance(weight, Int4):
        return _pack_int4(weight, below, right)
    assert isinstance(weight, Fp4), type(weight)
    return _pack_fp4(weight, below, right)


def group_of(weight: Weight) -> int:
    """Input features of a scale as they are packed; 0 for int8, whose rows have one."""
    if isinstance(weight, W8A16):
        return SPAN if weight.scale.shape[1] == 1 else min(group_size(weight), SPAN)
    return group_size(weight) if isinstance(weight, Int4) else 16 if isinstance(weight, Fp4) else 0


def _byte_steps(codes: Tensor, below: int, right: int) -> Tensor:
    """int8 [N, K] -> [K/128, N, 128], padded with zeros."""
    return F.pad(codes, (0, right, 0, below)).unflatten(1, (-1, SPAN)).transpose(0, 1).contiguous()


def _pack_w8a16(weight: W8A16, below: int, right: int) -> PackedSteps:
    columns = (weight.codes.shape[1] + right) // group_of(weight)
    if weight.scale.shape[1] == 1:
        scale = weight.scale.expand(-1, columns)
    else:
        copies = group_size(weight) // group_of(weight)
        scale = weight.scale.repeat_interleave(copies, dim=1)
        scale = F.pad(scale, (0, columns - scale.shape[1]))
    scales = F.pad(scale, (0, 0, 0, below)).T.contiguous()
    ones = torch.ones(len(weight.codes) + below, device=scales.device)
    return PackedSteps(_byte_steps(weight.codes, below, right), scales, ones)


def _planes(codes: Tensor, columns: int) -> Tensor:
    """int32 [N, K] -> [K/128, P, N, C, plane]."""
    return codes.view(codes.shape[0], -1, 4, 32 // columns, columns).permute(1, 3, 0, 4, 2)


def _signed(words: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
    """Numbers 0 .. 2^bits - 1 as the same bits of a signed type."""
    return torch.where(words >= 1 << (bits - 1), words - (1 << bits), words).to(dtype)


def _pack_int4(weight: Int4, below: int, right: int) -> PackedSteps:
    group, per_step = group_size(weight), SPAN // group_size(weight)
    zero = (
        torch.zeros_like(weight.scale) if weight.zero_point is None else weight.zero_point.float()
    )
    # float16 holds the scales of fp16 and bf16 checkpoints exactly once a power of two per row has
    # brought them into its range.
    exponent = torch.frexp(weight.scale.amax(dim=1, keepdim=True)).exponent
    scale = F.pad(
        torch.ldexp(weight.scale, 12 - exponent), (0, -(weight.scale.shape[1]) % per_step, 0, below)
    ).to(torch.float16)
    zero = F.pad(zero + 8, (0, scale.shape[1] - zero.shape[1], 0, below))
    halves = scale.view(torch.int16).to(torch.int32) & 0xFFFF
    groups = (halves | (zero.to(torch.int32) << 16)).unflatten(
        1, (-1, per_step)
    )  # [N, K/128, groups of a step]
    if group == 128:
        scales = groups[..., 0].T.contiguous()
    else:
        wide = (
            groups.unflatten(2, (-1, 2)).contiguous().view(torch.int64)[..., 0]
        )  # little endian: the first group is in the low bits
        scales = wide.permute(1, 2, 0).contiguous()
        scales = scales[:, 0].contiguous() if group == 64 else scales
    planes = _planes(F.pad(weight.codes.to(torch.int32) + 8, (0, right, 0, below)), 32)
    words = sum((planes[..., i] << (4 * i) for i in range(4)), torch.zeros_like(planes[..., 0]))
    row_scale = F.pad(
        torch.ldexp(torch.ones_like(weight.scale[:, 0]), exponent[:, 0] - 12), (0, below)
    )
    return PackedSteps(_signed(words, torch.int16, 16).contiguous(), scales, row_scale)


def _pack_fp4(weight: Fp4, below: int, right: int) -> PackedSteps:
    n = weight.codes.shape[0]
    scale = weight.scale.float()
    # A scale of zero has no exponent: its codes become zeros instead.
    alive = (scale > 0).repeat_interleave(16, dim=1)
    codes = F.pad(
        torch.where(alive, weight.codes, torch.zeros_like(weight.codes)).to(torch.int32),
        (0, right, 0, below),
    )
    planes = _planes(codes, 16)
    sign, magnitude = planes >> 3, planes & 7
    words = torch.zeros_like(planes[..., 0])
    for i in range(3):
        words |= (sign[..., i] << (15 - 3 * i)) | (magnitude[..., i] << (6 - 3 * i))
    words |= (
        (sign[..., 3] << 14) | ((magnitude[..., 3] >> 2) << 13) | ((magnitude[..., 3] & 3) << 10)
    )
    mantissa, exponent = torch.frexp(torch.where(scale > 0, scale, torch.ones_like(scale)))
    bits = ((exponent - 1 + FP4_SCALE_BIAS) << 3) | ((mantissa * 2 - 1) * 8).to(torch.int32)
    groups = (
        F.pad(bits.to(torch.uint8), (0, right // 16, 0, below)).unflatten(1, (-1, 8)).contiguous()
    )
    scales = groups.view(torch.int64)[..., 0].T.contiguous()
    row_scale = F.pad((weight.global_scale * FP4_FACTOR).expand(n), (0, below))
    return PackedSteps(_signed(words, torch.int16, 16).contiguous(), scales, row_scale)
