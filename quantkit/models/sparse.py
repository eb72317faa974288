"""Sparse attention as DeepSeek-V3.2 has it (its paper, section 2.1): an indexer (indexer.py) scores
the tokens before a token, and latent attention reads those that score highest.

score(t, s) = sum over the indexer's heads h of w[t, h] relu(q[t, h] . k[s]), in float32, in plain
torch on every device. What is chosen is gathered and read by the operators of latent attention that
read a cache. Symbols: T tokens, S tokens seen, D index_head_dim.
"""

from typing import NamedTuple

import torch
from quantkit_kernels import Latents, PagedLatents, Rotation, mla_decode
from quantkit_kernels.codes import CodedLatents
from quantkit_kernels.latents import by_slot, parts_of
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.latent_window import VisibleTokens

_FIRST_OF_EQUALS = 1e-30
"""Taken off a score of 0 for each place before it: less than any product is."""
_SCORES = 1 << 25
"""Products of heads and keys that are held at once, float32."""
_GATHERED = 1 << 17
"""Cached tokens that are gathered at once, over all rows."""


class IndexerInputs(NamedTuple):
    """What a layer's tokens bring to the choice. queries [T, heads, D] and keys [T, D], turned;
    weights float32 [T, heads], every constant factor in them."""

    queries: Tensor
    keys: Tensor
    weights: Tensor


class Selected(NamedTuple):
    """What each of T tokens attends to. slots int64 [T, k]: places in a cache whose blocks lie one
    after the other; counts int32 [T]: how many of them count, the first ones."""

    slots: Tensor
    counts: Tensor

    @property
    def visible(self) -> VisibleTokens:
        """The same, as attention beside learned tokens reads it."""
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
    """The positions of the tokens with the largest scores among 0 .. each token's own, int64 [T,
    k], the largest first, and how many each has, int32 [T]; k is `topk`, or S where that is less.

    keys: of one sequence [S, D]; with a table [T, n] the blocks [num_blocks, size, D] of many, a
    row of it for each token, S = n size.
    in_order: as in `topk_columns`.
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
    """Columns of the `count` largest scores of each row, the largest first: scores float32 [T, S],
    hidden bool [T, S] where they do not count -> int64 [T, count].

    Where all of an indexer's products are below 0, as in one of 2^heads of random ones, a score is
    exactly 0. order [S] or [T, S]: of such columns the first are taken. None leaves it to torch,
    and with it a whole text has what transformers chooses; but torch's choice among equals depends
    on S, and so on how a text is cut and on who is computed beside it.
    """
    if order is not None:
        scores = torch.where(scores == 0, order.float() * -_FIRST_OF_EQUALS, scores)
    return scores.masked_fill_(hidden, -torch.inf).topk(count, dim=-1).indices


def concat_selected(parts: list[tuple[Tensor, Tensor]]) -> Selected:
    """What was chosen for the tokens of several sequences, one after the other: slots [T, k] and
    counts [T] of each."""
    width = max(slots.shape[1] for slots, _ in parts)
    slots = torch.cat([F.pad(slots, (0, width - slots.shape[1])) for slots, _ in parts])
    return Selected(slots, torch.cat([counts for _, counts in parts]))


def attend_selected(
    q: Tensor, kv_b: Tensor, rotation: Rotation, cache: Latents, selected: Selected, scale: float
) -> Tensor:
    """As `mla_decode`, each token over the cached latents that were chosen for it: q [T, heads, N +
    R] -> [T, heads, V]."""
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
        pages = PagedLatents(_gathered(cache, rows, size), table, selected.counts[part])
        turned = Rotation(rotation.cos[part], rotation.sin[part], rotation.interleaved)
        out.append(mla_decode(q[part], kv_b, turned, pages, scale=scale))
    return torch.cat(out)


def _gathered(cache: Latents, slots: Tensor, size: int) -> Latents:
    """The tokens at `slots` [rows, k] as a cache of blocks of `size`."""
    flat = by_slot(cache)
    picked = [part[slots].flatten(0, 1).unflatten(0, (-1, size)) for part in parts_of(flat)]
    if isinstance(cache, Tensor):
        return picked[0]
    return CodedLatents(*picked) if isinstance(cache, CodedLatents) else (picked[0], picked[1])
