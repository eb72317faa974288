"""Weights as torch_npu's operators read them: [K, N], so that x @ weight needs no transposition, and eight int4 in an int32."""

import torch
from torch import Tensor

from quantkit_kernels.weights import Int4, group_size, shape

CARRIED = 8


def carry_int4(codes: Tensor) -> Tensor:
    """int8 [.., N] in -8..7 -> int32 [.., N/8]: code i * 8 + j in bits 4 j .. 4 j + 3, two's complement."""
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

    w = (code - zero_point) * scale here and (code + offset) * scale there. The scale is rounded to `dtype`, as the operators demand: exact
    for bf16 scales in bf16, while AWQ's fp16 scales lose three bits there.
    """
    scale = weight.scale.T.to(dtype).contiguous()
    offset = torch.zeros_like(scale) if weight.zero_point is None else -weight.zero_point.T.to(dtype).contiguous()
    return carry_int4(weight.codes.T), scale, offset


def antiquant_group(weight: Int4) -> int:
    """antiquant_group_size: 0 (per channel) where one group is the whole row."""
    group = group_size(weight)
    return 0 if group == shape(weight)[1] else group
