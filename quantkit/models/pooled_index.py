"""Selection of sparse attention by groups of tokens, as in GLM-5.3-Flash: the indexer (indexer.py)
has one key for `rate` tokens, and latent attention reads the tokens of the groups with the highest
scores, and those of a token's own group while it is not complete.

A group's key is the mean of its tokens' keys, weighted per channel by a softmax over the tokens'
weights plus a bias per position. It is normed and rotated after that, as the first token of the
group, in Qwen3.8-Flash-Next, whose grouped-query attention reads so, and neither in GLM-5.3-Flash.
Symbols: T tokens, S tokens seen, D
index_head_dim, r rate.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from quantkit_kernels import (
    EntryPages,
    EntryPool,
    IndexPages,
    RecentTokens,
    Rotation,
    TopTokens,
    index_topk,
    pool_entries,
)
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.rope import Rope
from quantkit.models.sparse import select_topk


class PooledInputs(NamedTuple):
    """Inputs of the selection. queries [T, heads, D], rotated; raw [T, 2 D]: keys, then weights of
    the tokens in their groups; weights float32 [T, heads], including every constant factor."""

    queries: Tensor
    raw: Tensor
    weights: Tensor


@dataclass(frozen=True)
class IndexPooling:
    """bias float32 [r, D]; topk: tokens selected for each token, a multiple of r, not counting its
    own group's. gain [D], eps: of the norm of keys, whose last channels `rope` then rotates; None
    where they are neither normed nor rotated."""

    bias: Tensor
    topk: int
    gain: Tensor | None = None
    eps: float = 0.0
    rope: Rope | None = None

    @property
    def rate(self) -> int:
        return len(self.bias)

    def pool(self, raw: RecentTokens, positions: Tensor, pages: EntryPages) -> None:
        """Write the keys of the groups that end at positions int64 [n]."""
        if self.rope is None:
            none = positions.new_empty(len(positions), 0, dtype=torch.float32)
            rotation = Rotation(none, none)
        else:
            angles = self.rope.cos_sin(positions, self.rate)
            rotation = Rotation(*angles, self.rope.interleaved)
        pool = EntryPool(self.bias, self.gain, self.eps, pages)
        pool_entries(raw, positions, [pool], rotation)

    def select(self, inputs: PooledInputs, positions: Tensor, pages: EntryPages) -> TopTokens:
        """The tokens that those at positions int64 [T] attend to. pages: of blocks whose size is a
        multiple of the rate."""
        keys = pages.kv.unflatten(0, (-1, pages.rows_per_block))
        last, table, size = (positions + 1) // self.rate - 1, pages.table, pages.block_size
        groups = index_topk(
            inputs.queries,
            inputs.weights,
            IndexPages(keys, table),
            last,
            self.topk // self.rate,
        )
        own = (last + 1) * self.rate
        block = (own // size).clamp(max=table.shape[1] - 1)
        blocks = table.expand(len(own), -1).gather(1, block[:, None])[:, 0]
        return tokens_of(groups, self.rate, positions, blocks * size + own % size)


def tokens_of(groups: TopTokens, rate: int, positions: Tensor, own: Tensor) -> TopTokens:
    """The tokens of the selected groups, and those of each token's own group while it is not
    complete, whose first one's slot is `own` int64 [T]."""
    steps = torch.arange(rate, device=positions.device)
    width = groups.slots.shape[1] * rate + rate - 1
    full, rest = groups.counts * rate, (positions + 1) % rate
    later = torch.arange(width, device=positions.device) - full[:, None]
    sides = []
    for side, first in ((groups.positions, positions + 1 - rest), (groups.slots, own)):
        chosen = F.pad((side[..., None] * rate + steps).flatten(1), (0, rate - 1))
        tail = torch.where(later < rest[:, None], first[:, None] + later, 0)
        sides.append(torch.where(later < 0, chosen, tail).int())
    return TopTokens(sides[0], sides[1], (full + rest).int())


def select_in_text(inputs: PooledInputs, positions: Tensor, pooling: IndexPooling) -> TopTokens:
    """As `IndexPooling.select`, for a whole text, whose slots are its positions; ties as
    transformers breaks them."""
    rate, tokens = pooling.rate, len(positions)
    ends = positions[rate - 1 :: rate]
    keys = inputs.raw.new_empty(len(ends), inputs.raw.shape[1] // 2)
    if len(ends):
        recent = RecentTokens(inputs.raw, torch.zeros_like(ends), tokens, 0)
        pooling.pool(recent, ends, EntryPages(keys, (ends // rate)[None], rate, rate))
    last = (positions + 1) // rate - 1
    groups = select_topk(inputs.queries, inputs.weights, keys, last, pooling.topk // rate)
    return tokens_of(groups, rate, positions, (last + 1) * rate)
