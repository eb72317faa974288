"""Sparse attention of DeepSeek-V3.2 (section 2.1 of its paper): an indexer (indexer.py) scores the
tokens before a token, and latent attention reads those with the highest scores.

score(t, s) = sum over the indexer's heads h of w[t, h] relu(q[t, h] . k[s]), in float32, in plain
torch on every device. The selected tokens are gathered and read by the operators of latent
attention over a cache. Symbols: T tokens, S tokens seen, D index_head_dim.
"""

from typing import NamedTuple

import torch
from quantkit_kernels import Latents, PagedLatents, Rotation, mla_decode
from quantkit_kernels.codes import CodedLatents
from quantkit_kernels.paged import by_slot, parts_of
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.latent_window import VisibleTokens

_FIRST_OF_EQUALS = 1e-30
"""Subtracted from a score of 0 for each position before it: less than any product."""
_SCORES = 1 << 25
"""Products of heads and keys held at once, float32."""
_GATHERED = 1 << 17
"""Cached tokens gathered at once, over all rows."""


class IndexerInputs(NamedTuple):
    """Inputs of the selection. queries [T, heads, D] and keys [T, D], rotated; weights float32 [T,
    heads], including every constant factor."""

    queries: Tensor
    keys: Tensor
    weights: Tensor


class Selected(NamedTuple):
    """The tokens that each of T tokens attends to. slots int64 [T, k]: slots in a cache with
    consecutive blocks; counts int32 [T]: how many of them are valid, from the first on."""

    slots: Tensor
    counts: Tensor

    @property
    def visible(self) -> VisibleTokens:
        """The same, for attention with learned tokens."""
        return VisibleTokens(
            self.slots,
            torch.arange(self.slots.shape[1], device=self.slots.device) < self.counts[:, None],
        )


def select_topk(
    inputs: IndexerInputs,
    positions: Tensor,
    topk: int,
    keys: Tensor,
    table: Tensor | None = None,
    *,
    in_order: bool = True,
) -> tuple[Tensor, Tensor]:
    """Positions of the tokens with the highest scores among 0 .. each token's own, int64 [T, k],
    highest first, and the number of valid ones int32 [T]; k is `topk`, or S if that is less.

    keys: of one sequence [S, D]; with a table [T, n] the blocks [num_blocks, size, D] of many
    sequences, a row of it for each token, S = n size. in_order: break ties by position
    (`topk_columns`).
    """
    seen = len(keys) if table is None else table.shape[1] * keys.shape[1]
    found, count = [], min(topk, seen)
    step = max(1, _SCORES // (seen * inputs.queries.shape[1]))
    places = torch.arange(seen, device=positions.device)
    for first in range(0, len(positions), step):
        part = slice(first, first + step)
        own = keys if table is None else keys[table[part]].flatten(1, 2)
        products = (inputs.queries[part].float() @ own.float().mT).relu_()
        scores = (inputs.weights[part, None] @ products)[:, 0]
        found.append(
            topk_columns(
                scores, places > positions[part, None], count, places if in_order else None
            )
        )
    return torch.cat(found), (positions + 1).clamp(max=count).int()


def topk_columns(scores: Tensor, hidden: Tensor, count: int, order: Tensor | None) -> Tensor:
    """Columns of the `count` highest scores of each row, highest first: scores float32 [T, S],
    hidden bool [T, S] masks columns -> int64 [T, count].

    A score is exactly 0 where all of an indexer's products are negative, as in one of 2^heads
    random cases. order [S] or [T, S]: among equal zeros the first columns are taken. None leaves
    ties to torch, which matches transformers on a whole text; but torch's choice depends on S, and
    so on chunking and batching.
    """
    if order is not None:
        scores = torch.where(scores == 0, order.float() * -_FIRST_OF_EQUALS, scores)
    return scores.masked_fill_(hidden, -torch.inf).topk(count, dim=-1).indices


def concat_selected(parts: list[tuple[Tensor, Tensor]]) -> Selected:
    """Selections of several sequences concatenated: slots [T, k] and counts [T] of each."""
    width = max(slots.shape[1] for slots, _ in parts)
    slots = torch.cat([F.pad(slots, (0, width - slots.shape[1])) for slots, _ in parts])
    return Selected(slots, torch.cat([counts for _, counts in parts]))


def attend_selected(
    q: Tensor, kv_b: Tensor, rotation: Rotation, cache: Latents, selected: Selected, scale: float
) -> Tensor:
    """As `mla_decode`, each token over the cached latents selected for it: q [T, heads, N + R] ->
    [T, heads, V]."""
    size = parts_of(cache)[0].shape[1]
    blocks = -(-selected.slots.shape[1] // size)
    slots = F.pad(selected.slots, (0, blocks * size - selected.slots.shape[1]))
    step, out = max(1, _GATHERED // (blocks * size)), []
    for first in range(0, len(q), step):
        part = slice(first, first + step)
        rows = slots[part]
        table = torch.arange(len(rows) * blocks, dtype=torch.int32, device=q.device).view(
            -1, blocks
        )
        pages = PagedLatents(_gather(cache, rows, size), table, selected.counts[part])
        part_rotation = Rotation(rotation.cos[part], rotation.sin[part], rotation.interleaved)
        out.append(mla_decode(q[part], kv_b, part_rotation, pages, scale=scale))
    return torch.cat(out)


def _gather(cache: Latents, slots: Tensor, size: int) -> Latents:
    """The tokens at `slots` [rows, k] as a cache with blocks of `size`."""
    flat = by_slot(cache)
    picked = [part[slots].flatten(0, 1).unflatten(0, (-1, size)) for part in parts_of(flat)]
    if isinstance(cache, Tensor):
        return picked[0]
    return CodedLatents(*picked) if isinstance(cache, CodedLatents) else (picked[0], picked[1])
