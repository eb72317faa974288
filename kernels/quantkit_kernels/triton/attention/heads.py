"""Launches of heads_kernel.py."""

import torch
from torch import Tensor

from quantkit_kernels.triton.cards import overlapped
from quantkit_kernels.triton.launch import by_assembly

_FEWEST_ROWS, _MOST_ROWS = 8, 64
"""Of a step whose products take torch's batches longer, which wait until all before them is over
and leave several rows to be copied: on an H200, in nine layers of a rank of four of R1, 21 us with
8 rows and 58 with 32. With one row torch's are 27 us faster."""


def heads_by_kernel(rows: int, kv_b: Tensor) -> bool:
    """Whether the products with kv_b [heads, N + V, kv_lora] are `multiply_heads`."""
    return _FEWEST_ROWS <= rows <= _MOST_ROWS and kv_b.stride()[1:] == (kv_b.shape[2], 1)


def multiply_heads(x: Tensor, weight: Tensor, across: bool) -> Tensor:
    """x [rows, heads, K], its last dimension without gaps, times weight [heads, K, N], or with
    `across` [heads, N, K], a head's without
    gaps: [rows, heads, N]."""
    from quantkit_kernels.triton.attention.heads_kernel import multiply_heads as kernel

    (rows, heads, k), n = x.shape, weight.shape[1 if across else 2]
    out = torch.empty(rows, heads, n, dtype=x.dtype, device=x.device)
    columns, tokens = 32 if across else 64, 16 if rows <= 16 else 32
    kernel[(heads, -(-n // columns), -(-rows // tokens))](
        x, weight, out, rows, x.stride(0), x.stride(1), weight.stride(0), heads,
        K=k, N=n, BM=tokens, BN=columns, BK=128, ACROSS=across, STAGES=3,
        NVIDIA=by_assembly(x.device), **overlapped(x.device),
    )  # fmt: skip
    return out
