"""What comes around attention of a decode step: the shares of a row merged, and products with a matrix of each head."""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.triton.cards import multiprocessors, overlapped
from quantkit_kernels.triton.launch import by_assembly
from quantkit_kernels.triton.rows import power_of_two

FEW_ROWS = 64
"""Up to which torch's product of a batch, which waits until all before it is over, takes longer."""
_AT_ONCE, _COLUMNS = 32, 128
"""Shares that a program has in registers, and its columns."""
_SHARES, _LATENT_AT_ONCE, _LATENT_COLUMNS = 16, 64, 64
"""The same of latents cut in so many shares or more, which have few rows: more programs, and all of their loads at once."""
_MOST_MERGED, _VALUES = 64, 32
"""Of one row: most shares that are merged where they are multiplied by W_UV, and numbers of the product that a program has, which reads all
shares of its head: with more rows, or programs that do not fit the card at once, one launch merges and another multiplies."""


class RowShares(NamedTuple):
    """What programs that share rows found: partial float32 [rows, heads, splits, D], the logarithms to base 2 of their sums found
    [rows, heads, splits], and room for the result [rows, heads, D]; which it is already where splits is 1."""

    partial: Tensor
    found: Tensor
    out: Tensor
    splits: int
    latent: bool


def merged(shares: RowShares) -> Tensor:
    """[rows, heads, D]."""
    from quantkit_kernels.triton.attention.decode_kernel import merge

    partial, found, out, splits, latent = shares
    if splits == 1:
        return out
    rows, heads, width = out.shape
    most, padded = power_of_two(splits), power_of_two(max(16, width))
    at_once, columns = (_LATENT_AT_ONCE, _LATENT_COLUMNS) if latent and most >= _SHARES else (_AT_ONCE, _COLUMNS)
    columns = min(columns, padded)
    grid = (rows * heads, -(-width // columns))
    shape = {"D": width, "COLUMNS": columns, "SPLITS": most, "AT_ONCE": min(at_once, most)}
    merge[grid](partial, found, out, splits, **shape, **overlapped(out.device))
    return out


def merged_values(shares: RowShares, w_uv: Tensor) -> Tensor:
    """Times w_uv [heads, V, D], a head's without gaps: [rows, heads, V]."""
    from quantkit_kernels.triton.attention.decode_kernel import merge_values

    rows, heads, width = shares.out.shape
    count = w_uv.shape[1]
    programs = heads * -(-count // _VALUES)
    if rows > 1 or not 1 < shares.splits <= _MOST_MERGED or programs > 2 * multiprocessors(w_uv.device):
        return multiply_heads(merged(shares), w_uv, across=True)
    product = torch.empty(1, heads, count, dtype=w_uv.dtype, device=w_uv.device)
    merge_values[(heads, -(-count // _VALUES))](
        shares.partial, shares.found, w_uv, product, shares.splits, w_uv.stride(0),
        D=width, D_PADDED=power_of_two(max(16, width)), V=count, VALUES=_VALUES, SPLITS=power_of_two(shares.splits),
        NVIDIA=by_assembly(w_uv.device), num_warps=8, **overlapped(w_uv.device),
    )  # fmt: skip
    return product


def multiply_heads(x: Tensor, weight: Tensor, across: bool) -> Tensor:
    """x [rows, heads, K], its last dimension without gaps, times weight [heads, K, N], or with `across` [heads, N, K], a head's without
    gaps: [rows, heads, N]."""
    from quantkit_kernels.triton.attention.heads_kernel import multiply_heads as kernel

    (rows, heads, k), n = x.shape, weight.shape[1 if across else 2]
    out = torch.empty(rows, heads, n, dtype=x.dtype, device=x.device)
    columns, tokens = 32 if across else 64, 16 if rows <= 16 else 32
    kernel[(heads, -(-n // columns), -(-rows // tokens))](
        x, weight, out, rows, x.stride(0), x.stride(1), weight.stride(0), heads,
        K=k, N=n, BM=tokens, BN=columns, BK=128, ACROSS=across, STAGES=3, NVIDIA=by_assembly(x.device), **overlapped(x.device),
    )  # fmt: skip
    return out
