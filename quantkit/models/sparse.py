"""Sparse attention of DeepSeek-V3.2 (section 2.1 of its paper): an indexer (indexer.py) scores the
tokens before a token, and latent attention reads those with the highest scores, in place.

Symbols: T tokens, S tokens seen, D index_head_dim.
"""

from typing import NamedTuple

import torch
from quantkit_kernels import (
    CodedLatents,
    KeyValues,
    Latents,
    PagedKeys,
    PagedLatents,
    Rotation,
    TopTokens,
    gqa_decode,
    mla_decode,
)
from quantkit_kernels.paged import by_slot, parts_of
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.latent_window import VisibleTokens

_FIRST_OF_EQUALS = 1e-30
"""Subtracted from a score of 0 for each position before it: less than any product."""
_SCORES = 1 << 25
"""Products of heads and keys held at once, float32."""
_SELECTED, _ON_CARDS = 1 << 18, 1 << 20
"""Selected tokens read at once, which cards do not copy: so many keep products with W_UK and W_UV
busy."""


class IndexerInputs(NamedTuple):
    """Inputs of the selection. queries [T, heads, D], not yet rotated, and keys [T, D], not yet
    normed; weights float32 [T, heads], including every constant factor."""

    queries: Tensor
    keys: Tensor
    weights: Tensor


def visible_tokens(selected: TopTokens) -> VisibleTokens:
    """The same, for attention with learned tokens."""
    slots, device = selected.slots.long(), selected.slots.device
    return VisibleTokens(
        slots, torch.arange(slots.shape[1], device=device) < selected.counts[:, None]
    )


def select_topk(
    queries: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, topk: int
) -> TopTokens:
    """As `quantkit_kernels.index_topk`, for a whole text with keys [S, D], whose slots are its
    positions; highest scores first, ties as transformers breaks them."""
    seen = len(keys)
    found, count = [], min(topk, seen)
    step = max(1, _SCORES // max(1, seen * queries.shape[1]))
    places = torch.arange(seen, device=positions.device)
    for first in range(0, len(positions), step):
        part = slice(first, first + step)
        hidden = places > positions[part, None]
        found.append(topk_columns(queries[part], weights[part], keys, hidden, count, None))
    places = torch.cat(found).int()
    return TopTokens(places, places, (positions + 1).clamp(max=count).int())


def topk_columns(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    hidden: Tensor,
    count: int,
    order: Tensor | None,
) -> Tensor:
    """Columns of the `count` highest scores of each row, highest first, int64 [T, count]: queries
    [T, heads, D], weights float32 [T, heads], keys [S, D] or [T or 1, S, D]; hidden bool [T, S]
    masks columns.

    A score is exactly 0 where all of an indexer's products are negative, as in one of 2^heads
    random cases. order [S] or [T, S]: among equal zeros the first columns are taken. None leaves
    ties to torch, which matches transformers on a whole text; but torch's choice depends on S, and
    so on chunking and batching.
    """
    scores = index_scores(queries, weights, keys)
    if order is not None:
        scores = torch.where(scores == 0, order.float() * -_FIRST_OF_EQUALS, scores)
    return scores.masked_fill_(hidden, -torch.inf).topk(count, dim=-1).indices


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Scores of an indexer, float32 [T, S]: arguments as of `topk_columns`."""
    products = (queries.float() @ keys.float().mT).relu_()
    return (weights[:, None] @ products)[:, 0]


def concat_selected(parts: list[TopTokens]) -> TopTokens:
    """Selections of several sequences concatenated."""
    if len(parts) == 1:
        return parts[0]
    width = max(one.slots.shape[1] for one in parts)
    wide = [
        [F.pad(side, (0, width - side.shape[1])) for side in one[:2]] + [one.counts]
        for one in parts
    ]
    return TopTokens(*(torch.cat(sides) for sides in zip(*wide)))


def attend_selected(
    q: Tensor, kv_b: Tensor, rotation: Rotation, cache: Latents, selected: TopTokens, scale: float
) -> Tensor:
    """As `mla_decode`, each token over the cached latents selected for it: q [T, heads, N + R] ->
    [T, heads, V]. Every token of the cache is a page of its own, so that nothing is copied, except
    of caches in two tensors, whose operators read whole pages."""
    out, single = [], None if len(parts_of(cache)) == 2 else _pages_of_one(cache)
    step = max(1, (_ON_CARDS if q.is_cuda else _SELECTED) // selected.slots.shape[1])
    for first in range(0, len(q), step):
        slots, counts = (side[first : first + step] for side in selected[1:])
        cos, sin = (side[first : first + step] for side in rotation[:2])
        pages = (
            _copied(cache, slots, counts) if single is None else PagedLatents(single, slots, counts)
        )
        of_rows = Rotation(cos, sin, rotation.interleaved)
        out.append(mla_decode(q[first : first + step], kv_b, of_rows, pages, scale=scale))
    return out[0] if len(out) == 1 else torch.cat(out)


def attend_selected_heads(q: Tensor, cache: KeyValues, selected: TopTokens, scale: float) -> Tensor:
    """As `gqa_decode`, each token over the cached keys and values selected for it: q [T, heads, D]
    -> [T, heads, D]. Every token of the cache is a page of its own."""
    keys, values, *scales = (side.flatten(0, 1)[:, None] for side in cache)
    out, step = [], max(1, _SELECTED // selected.slots.shape[1])
    for first in range(0, len(q), step):
        slots, counts = (side[first : first + step] for side in selected[1:])
        by_code = (scales[0], scales[1]) if scales else None
        pages = PagedKeys(keys, values, slots, counts, scales=by_code)
        out.append(gqa_decode(q[first : first + step], pages, scale=scale))
    return out[0] if len(out) == 1 else torch.cat(out)


def _pages_of_one(cache: Latents) -> Latents:
    flat = by_slot(cache)
    if isinstance(flat, Tensor):
        return flat[:, None]
    assert isinstance(flat, CodedLatents), "not in two tensors"
    return CodedLatents(*(part[:, None] for part in flat))


def _copied(cache: Latents, slots: Tensor, counts: Tensor) -> PagedLatents:
    """The tokens at slots [T, k] of a cache in two tensors, as pages of its block size."""
    size = parts_of(cache)[0].shape[1]
    blocks = -(-slots.shape[1] // size)
    picked = F.pad(slots, (0, blocks * size - slots.shape[1]))
    latents, keys = (part[picked].flatten(0, 1).unflatten(0, (-1, size)) for part in by_slot(cache))
    table = torch.arange(len(latents), dtype=torch.int32, device=slots.device)
    return PagedLatents((latents, keys), table.view(-1, blocks), counts)
