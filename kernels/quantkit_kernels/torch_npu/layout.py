"""Weights as torch_npu's operators read them: [K, N], so that x @ weight needs no transposition,
and eight int4 in an int32."""

import torch
from torch import Tensor

from quantkit_kernels.torch_npu.rules import NARROW_INPUTS
from quantkit_kernels.weights import Int4, NarrowInt8, group_size, shape

CARRIED = 8


def carry_int4(codes: Tensor) -> Tensor:
    """int8 [.., N] in -8..7 -> int32 [.., N/8]: code i * 8 + j in bits 4 j .. 4 j + 3, two's
    complement."""
    nibbles = codes.to(torch.int32).contiguous().unflatten(-1, (-1, CARRIED)) & 15
    carriers = torch.zeros_like(nibbles[..., 0])
    for place, nibble in enumerate(nibbles.unbind(-1)):
        carriers |= nibble << (4 * place)
    return carriers


def uncarry_int4(carriers: Tensor) -> Tensor:
    """The inverse of `carry_int4`: int8 [.., N]."""
    places = [(carriers << (28 - 4 * place)) >> 28 for place in range(CARRIED)]
    return torch.stack(places, dim=-1).flatten(-2).to(torch.int8)


def int4_tensors(weight: Int4, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Carriers int32 [K, N/8], scale and offset [K/g, N] of `dtype`.

    w = (code - zero_point) * scale here and (code + offset) * scale there. The scale is rounded to
    `dtype`, as the operators demand: exact for bf16 scales in bf16, while AWQ's fp16 scales lose
    three bits there.
    """
    scale = weight.scale.T.to(dtype).contiguous()
    offset = (
        torch.zeros_like(scale)
        if weight.zero_point is None
        else -weight.zero_point.T.to(dtype).contiguous()
    )
    return carry_int4(weight.codes.T), scale, offset


def is_carried(weight: NarrowInt8) -> bool:
    """Whether the grouped product of int8 by int4 takes it; else it is held as int8."""
    n, k = shape(weight)
    return n % CARRIED == 0 and k <= NARROW_INPUTS


def narrow_tensors(weight: NarrowInt8) -> tuple[Tensor, Tensor, Tensor]:
    """Carriers int32 [K, N/8], scale int64 [1, N] and bias float32 [N] of the grouped product of
    int8 by int4.

    A scale is the bits of a float32, as the operator's uint64 wants it. The operator splits a code
    of x into 16 h + l + 8, h and l of four bits, and multiplies 16 h + l: the bias is what 8 adds,
    8 times the sum of a column's scaled weights.
    """
    scale = weight.scale.flatten()
    bias = 8 * weight.codes.double().sum(dim=1) * scale.double()
    return (
        carry_int4(weight.codes.T),
        scale.view(torch.int32).to(torch.int64).unsqueeze(0),
        bias.float(),
    )


def antiquant_group(weight: Int4) -> int:
    """antiquant_group_size: 0 (per channel) where one group is the whole row."""
    group = group_size(weight)
    return 0 if group == shape(weight)[1] else group
