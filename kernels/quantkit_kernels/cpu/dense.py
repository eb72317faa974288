"""Few rows by an unquantized weight on a CPU, by the project's C++ (dense.cpp), where torch's
product is slower than memory."""

import torch
from torch import Tensor

from quantkit_kernels.cpu.build import level_of, once
from quantkit_kernels.cpu.units import has_unit

_ROWS = {torch.bfloat16: 32, torch.float32: 16}
"""Up to how many the C++ is faster (4864 x 896, one core with AVX-512 and no bfloat16, ms, C++ /
torch: bf16 M=1 1.0/1.5, M=8 2.6/4.0, M=32 6.3/9.0; float32 M=1 1.5/1.5, M=8 2.5/5.4, M=16 4.0/4.6,
M=24 5.4/5.3; with bfloat16, 49152 x 576, bf16 M=1 2.8/6.4, M=8 3.0/8.1, M=32 13/14, M=48 20/18)."""
_BYTES = {torch.bfloat16: 1 << 15, torch.float32: 4 << 20}
"""Of the smallest weight: a float32 one that stays in a cache torch multiplies as fast."""


def multiplies(weight: Tensor) -> bool:
    """Whether the C++ is for this weight [N, K], in the dtype it has, on this processor."""
    if (
        weight.device.type != "cpu"
        or weight.dtype not in _ROWS
        or weight.nbytes < _BYTES[weight.dtype]
        or not weight.is_contiguous()
    ):
        return False
    pairs = level_of("dense") == "BF16" and not torch.cpu._is_amx_tile_supported()
    if weight.dtype == torch.bfloat16 and has_unit(torch.bfloat16) and not pairs:
        return False
    return once("dense") is not None


def most_rows(dtype: torch.dtype) -> int:
    return _ROWS[dtype]


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x[M, K] @ weight[N, K].T -> [M, N], all of one dtype, float32 inside. What a row gives does
    not depend on the others."""
    rows = x.contiguous()
    y = torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype)
    sizes = (x.dtype == torch.bfloat16, rows.shape[0], *weight.shape, torch.get_num_threads())
    loaded = once("dense")
    assert loaded is not None, "multiplies(weight) was asked before"
    loaded.qk_dense_rows(weight.data_ptr(), rows.data_ptr(), y.data_ptr(), *sizes)
    return y
