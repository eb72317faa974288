"""Products by an int4 weight by the project's C++: few rows over packed codes (int4_rows.cpp), and
blocks of them expanded for many (int4.cpp)."""

import torch
from torch import Tensor

from quantkit_kernels.cpu.build import once

BLOCK = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32
"""Rows that are packed together."""


def pack(codes: Tensor) -> Tensor:
    """int8 [N, K] in -8..7, N even -> uint8 [N, K / 2] as int4.cpp says."""
    n, k = codes.shape
    whole, stored = n // BLOCK * BLOCK, (codes + 8).contiguous().view(torch.uint8)
    halves = stored[:whole].view(-1, 2, BLOCK // 2, k).unbind(1)
    pairs = stored[whole:].view(-1, 2, k).unbind(1)
    bytes_ = [(low | high << 4).mT.flatten() for low, high in (halves, pairs)]
    return torch.cat(bytes_).view(n, k // 2)


def expand(
    packed: Tensor,
    scale: Tensor,
    offset: Tensor,
    group: int,
    start: int,
    stop: int,
    dtype: torch.dtype,
) -> Tensor:
    """Rows start .. stop of a weight [N, K], start a multiple of BLOCK. scale, offset float32
    [K/group, N]. -> [stop - start, K] of bfloat16 or float32; its transpose is contiguous."""
    n, k = scale.shape[1], scale.shape[0] * group
    out = torch.empty(k, stop - start, dtype=dtype)
    pointers = (one.data_ptr() for one in (packed, scale, offset, out))
    sizes = (start, stop, n, k, group, BLOCK, torch.get_num_threads())
    loaded = once("int4")
    assert loaded is not None, "can_be_had() was asked before"
    loaded.qk_int4_expand(*pointers, dtype == torch.bfloat16, *sizes)
    return out.T


def multiply(x: Tensor, packed: Tensor, sides: Tensor, group: int) -> Tensor:
    """x[M, K] -> [M, N], bfloat16 or float32; sides [K/group, N, 2] are scale and offset, bfloat16
    or float32. What a row gives does not depend on the others."""
    (m, k), n = x.shape, sides.shape[1]
    rows, y = x.contiguous(), torch.empty(m, n, dtype=x.dtype)
    pointers = (one.data_ptr() for one in (packed, sides, rows, y))
    halves = (x.dtype == torch.bfloat16, sides.dtype == torch.bfloat16)
    loaded = once("int4_rows")
    assert loaded is not None, "can_be_had() was asked before"
    loaded.qk_int4_rows(*pointers, *halves, m, n, k, group, BLOCK, torch.get_num_threads())
    return y


def can_be_had() -> bool:
    return once("int4") is not None and once("int4_rows") is not None
