"""The indexer of sparse attention in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from quantkit_kernels.codes import CodedIndexKeys, IndexKeys, encode_index, store_index_keys
from quantkit_kernels.hadamard import block_hadamard
from quantkit_kernels.indexer import IndexNorm, IndexPages, TopTokens
from quantkit_kernels.paged import Rotation
from quantkit_kernels.reference.functional import rotated

_PRODUCTS = 1 << 25
"""Of heads and keys, held at once in float32."""


def index_prepare(
    q: Tensor, k: Tensor, norm: IndexNorm, rotation: Rotation, cache: IndexKeys, slots: Tensor
) -> Tensor:
    width = k.shape[1:]
    normed = (
        F.rms_norm(k.float(), width, norm.gain, norm.eps)
        if norm.shift is None
        else F.layer_norm(k.float(), width, norm.gain, norm.shift, norm.eps)
    )
    keys, queries = (_first_rotated(one, rotation) for one in (normed.to(k.dtype)[:, None], q))
    if isinstance(cache, CodedIndexKeys):
        keys, queries = (block_hadamard(one, one.shape[-1]) for one in (keys, queries))
    store_index_keys(cache, slots, keys[:, 0])
    return queries


def _first_rotated(x: Tensor, rotation: Rotation) -> Tensor:
    rotary_dim = 2 * rotation.cos.shape[1]
    return torch.cat((rotated(x[..., :rotary_dim], rotation), x[..., rotary_dim:]), dim=-1)


def index_topk(
    q: Tensor, weights: Tensor, pages: IndexPages, positions: Tensor, topk: int
) -> TopTokens:
    keys, table, unit = pages.keys, pages.block_table, None
    if isinstance(keys, CodedIndexKeys):
        keys, unit = keys
        q, scales = encode_index(q)
        weights = weights * scales
    size = keys.shape[1]
    seen = table.shape[1] * size
    count, shared = min(topk, seen), len(table) == 1
    step = max(1, _PRODUCTS // (seen * q.shape[1]))
    places, found = torch.arange(seen, device=q.device), []
    for first in range(0, len(q), step):
        part = slice(first, first + step)
        rows = table if shared else table[part]
        products = (q[part].float() @ keys[rows].flatten(1, 2).float().mT).relu_()
        scores = (weights[part, None] @ products)[:, 0]
        if unit is not None:
            scores *= unit[rows].flatten(1, 2)
        hidden = places > positions[part, None]
        chosen = highest(scores.masked_fill_(hidden, -torch.inf), count) & ~hidden
        at = torch.where(chosen, places, seen - 1).topk(count, dim=1, largest=False).values
        blocks = rows.expand(len(at), -1).gather(1, at // size)
        found.append((at.int(), (blocks * size + at % size).int()))
    columns, slots = (torch.cat(side) for side in zip(*found))
    return TopTokens(columns, slots, (positions + 1).clamp(max=count).int())


def highest(scores: Tensor, count: int) -> Tensor:
    """Which columns are the `count` highest of each row, the first of equal ones: bool [T, S]."""
    least = scores.topk(count, dim=1).values[:, -1:]
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(1) <= count - above.sum(1, keepdim=True)))
