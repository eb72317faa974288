"""Products by an int4 weight that torch packed for its own operator, by the project's C++: few rows
over what is packed (int4_rows.cpp), and blocks of it expanded for many (int4.cpp)."""

import functools

import torch
from torch import Tensor

from quantkit_kernels.cpu.build import once

BLOCK = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32
"""Rows that torch packs together."""


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
    assert loaded is not None, "packed_as_known() was asked before"
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
    assert loaded is not None, "packed_as_known() was asked before"
    loaded.qk_int4_rows(*pointers, *halves, m, n, k, group, BLOCK, torch.get_num_threads())
    return y


@functools.cache
def packed_as_known() -> bool:
    """Whether torch packs here as int4.cpp says, which no documentation promises, and the libraries
    can be had: tried once a process."""
    if once("int4") is None or once("int4_rows") is None:
        return False
    n, k, group = BLOCK + 48, 64, 32
    codes = (
        torch.arange(n * k, dtype=torch.int32).mul_(7919).remainder_(251).remainder_(16).view(n, k)
    )  # no row as another
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    ones = torch.ones(k // group, n)
    return torch.equal(expand(packed, ones, 8 * ones, group, 0, n, torch.float32), codes.float())
