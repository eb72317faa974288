"""The indexer of sparse attention (DeepSeek-V3.2, section 2.1 of its paper): which cached tokens a
token attends to.

score(t, s) = sum over heads h of weight[t, h] relu(q[t, h] . k[s]), in float32; a token attends to
the `topk` tokens with the highest scores among 0 .. its own position, the first of equal ones.
Keys may be FP8 codes with a scale for each token, as in DeepSeek-V3.2's own inference code: a
Hadamard matrix then spreads keys and q over their channels first, q is rounded likewise, with a
scale for each token and head, and codes are multiplied.
Symbols: T tokens, H heads, D channels of a head, R of them rotated.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import FLOAT_DTYPES, INDEX_DTYPES, check_tensor, require
from quantkit_kernels.codes import CodedIndexKeys, IndexKeys
from quantkit_kernels.paged import Rotation, check_rotation


class IndexNorm(NamedTuple):
    """The norm of index keys: gain float32 [D]; shift float32 [D] of a LayerNorm, None of an
    RMSNorm."""

    gain: Tensor
    shift: Tensor | None
    eps: float


class IndexPages(NamedTuple):
    """Index keys of many sequences. keys: float [num_blocks, block_size, D], or codes. block_table
    int [T, n], or [1, n] of one sequence: token t of a row is in block block_table[row, t //
    block_size]. Entries past the sequence must name some block."""

    keys: IndexKeys
    block_table: Tensor


class TopTokens(NamedTuple):
    """The tokens that each of T tokens attends to, in the order of their positions. positions, slots
    int32 [T, k]: in the token's sequence, and in its pages; counts int32 [T]: how many are valid,
    from the first on."""

    positions: Tensor
    slots: Tensor
    counts: Tensor


def index_prepare(
    q: Tensor,
    k: Tensor,
    norm: IndexNorm,
    rotation: Rotation,
    cache: IndexKeys,
    slots: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Rotate the first R channels of q float [T, H, D] -> [T, H, D]; norm k [T, D] of q's dtype,
    rotate it likewise, and store it in rows slots int64 [T] of cache float [num_blocks, block_size,
    D], contiguous. For a cache of codes, D a power of two, both are then multiplied by
    `hadamard_matrix(D)`."""
    check_tensor("q", q, (None, None, None), FLOAT_DTYPES)
    tokens, _, width = q.shape
    check_tensor("k", k, (tokens, width), (q.dtype,))
    check_tensor("norm.gain", norm.gain, (width,), (torch.float32,))
    if norm.shift is not None:
        check_tensor("norm.shift", norm.shift, (width,), (torch.float32,))
    rotary = check_rotation(rotation, tokens)
    require(rotary <= width, f"cos: {rotary} channels to rotate, q has {width}")
    _check_keys("cache", cache, width)
    require(isinstance(cache, CodedIndexKeys) or cache.is_contiguous(), "cache: not contiguous")
    check_tensor("slots", slots, (tokens,), (torch.int64,))
    found = backends.find("index_prepare", backend, q.device)
    result: Tensor = found.index_prepare(q, k, norm, rotation, cache, slots)
    return result


def index_topk(
    q: Tensor,
    weights: Tensor,
    pages: IndexPages,
    positions: Tensor,
    topk: int,
    *,
    backend: str = "auto",
) -> TopTokens:
    """The tokens that each of T tokens attends to, min(topk, tokens in a row of the table) at most.

    q float [T, H, D], of `index_prepare`; weights float32 [T, H], with every constant factor;
    positions int64 [T] of the tokens.
    """
    check_tensor("q", q, (None, None, None), FLOAT_DTYPES)
    tokens, heads, width = q.shape
    check_tensor("weights", weights, (tokens, heads), (torch.float32,))
    _check_keys("keys", pages.keys, width)
    check_tensor("block_table", pages.block_table, (None, None), INDEX_DTYPES)
    require(
        len(pages.block_table) in (1, tokens),
        f"block_table: {len(pages.block_table)} rows, expected 1 or {tokens}",
    )
    check_tensor("positions", positions, (tokens,), (torch.int64,))
    require(topk > 0, f"topk: {topk}, expected at least 1")
    found = backends.find("index_topk", backend, q.device)
    result: TopTokens = found.index_topk(q, weights, pages, positions, topk)
    return result


def _check_keys(name: str, keys: IndexKeys, width: int) -> None:
    if isinstance(keys, CodedIndexKeys):
        require(width & (width - 1) == 0, f"{name}: {width} channels, expected a power of two")
        check_tensor(f"{name}.codes", keys.codes, (None, None, width), (torch.float8_e4m3fn,))
        check_tensor(f"{name}.scales", keys.scales, (*keys.codes.shape[:2],), (torch.float32,))
        require(all(part.is_contiguous() for part in keys), f"{name}: not contiguous")
    else:
        check_tensor(name, keys, (None, None, width), FLOAT_DTYPES)
