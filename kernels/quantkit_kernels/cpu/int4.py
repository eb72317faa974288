"""Blocks of an int4 weight that torch packed for its own operator, expanded by the project's C++ (int4.cpp): for products of many rows."""

import functools

import torch
from torch import Tensor

from quantkit_kernels.cpu.build import library, why_no_library

BLOCK = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32
"""Rows that torch packs together."""


def expand(packed: Tensor, scale: Tensor, offset: Tensor, group: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows start .. stop of a weight [N, K], start a multiple of BLOCK. scale, offset float32 [K/group, N]. -> [stop - start, K] of
    bfloat16 or float32; its transpose is contiguous."""
    n, k = scale.shape[1], scale.shape[0] * group
    out = torch.empty(k, stop - start, dtype=dtype)
    pointers = (one.data_ptr() for one in (packed, scale, offset, out))
    sizes = (start, stop, n, k, group, BLOCK, torch.get_num_threads())
    library("int4").qk_int4_expand(*pointers, dtype == torch.bfloat16, *sizes)
    return out.T


@functools.cache
def packed_as_known() -> bool:
    """Whether torch packs here as int4.cpp says, which no documentation promises, and the library can be had: tried once a process."""
    if why_no_library("int4") is not None:
        return False
    n, k, group = BLOCK + 48, 64, 32
    codes = torch.arange(n * k, dtype=torch.int32).mul_(7919).remainder_(16).view(n, k)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    ones = torch.ones(k // group, n)
    return torch.equal(expand(packed, ones, 8 * ones, group, 0, n, torch.float32), codes.float())
