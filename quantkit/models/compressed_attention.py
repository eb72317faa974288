"""Attention of DeepSeek-V4: a window of recent tokens, and compressed KV entries for groups of
earlier tokens, all of them or those that an indexer selects.

Keys and values are one vector, shared by all heads. `rate` tokens are pooled to one entry: the mean
of their values, weighted per channel by a softmax over the tokens' weights plus a bias per
position. With overlap a token contributes two halves, one to its own group and one to the next, so
an entry pools 2 rate tokens. A token sees entries of groups that end at it or before. The operators
are quantkit_kernels/compressed.py, and those of the indexer indexer.py.

Symbols: T tokens, D head_dim, E entries, r rate.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from quantkit_kernels import (
    ChosenEntries,
    EntryPages,
    EntryPool,
    IndexPages,
    RecentTokens,
    Rotation,
    compressed_attend,
    index_topk,
    pool_entries,
)
from torch import Tensor

from quantkit.models.rope import Rope
from quantkit.models.sparse import topk_columns

_SCORES = 1 << 25
"""Products of an indexer's heads and keys held at once, float32."""


class CompressedInputs(NamedTuple):
    """Inputs of a layer's tokens. q [T, heads, D] and kv [T, D], rotated; raw [T, C]: values and
    pooling weights of the compressed KV, then the same for the indexer's; index_q [T, index heads,
    index D], rotated; index_weights float32 [T, index heads]. Parts that a layer lacks have width
    0."""

    q: Tensor
    kv: Tensor
    raw: Tensor
    index_q: Tensor
    index_weights: Tensor

    def part(self, rows: slice) -> "CompressedInputs":
        return CompressedInputs(*(side[rows] for side in self))


@dataclass(frozen=True)
class Pooling:
    """Pooling of compressed KV entries. bias [r, D], or [r, 2 D] with overlap; gain [D] and eps of
    the norm after it; rope: an entry is rotated as its group's first token."""

    rate: int
    overlap: bool
    bias: Tensor
    gain: Tensor
    eps: float
    rope: Rope

    @property
    def reach(self) -> int:
        """Tokens pooled to one entry."""
        return 2 * self.rate if self.overlap else self.rate

    def of(self, pages: EntryPages) -> EntryPool:
        return EntryPool(self.bias, self.gain, self.eps, pages)


@dataclass(frozen=True)
class CompressedAttention:
    """One layer's parameters. pooling: None for a layer with a window only; index_pooling: None for
    one that sees all entries. topk: entries selected for each token. sinks float32 [heads]: score
    of a virtual key without a value. in_order: break ties of indexer scores by position
    (`sparse.topk_columns`)."""

    window: int
    scale: float
    sinks: Tensor
    pooling: Pooling | None = None
    index_pooling: Pooling | None = None
    topk: int = 0
    in_order: bool = True

    @property
    def rate(self) -> int:
        return self.pooling.rate if self.pooling else 0

    def pool(
        self,
        raw: RecentTokens,
        positions: Tensor,
        pages: EntryPages,
        index: EntryPages,
        rotation: Rotation | None = None,
    ) -> None:
        """Write the entries of groups that end at positions int64 [n], and keys of the indexer.
        rotation: of the groups' first tokens, where known."""
        assert self.pooling is not None, "a layer without entries"
        if rotation is None:
            rope = self.pooling.rope
            firsts = positions // self.rate * self.rate
            rotation = Rotation(*rope.cos_sin(firsts), rope.interleaved)
        pools = [self.pooling.of(pages)]
        pools += [self.index_pooling.of(index)] if self.index_pooling else []
        pool_entries(raw, positions, pools, rotation)

    def choose(
        self, inputs: CompressedInputs, positions: Tensor, index: EntryPages, count: int
    ) -> ChosenEntries | None:
        """The entries that the indexer selects for each token among the first `count`, those of its
        pages; None for all."""
        if self.index_pooling is None or count <= self.topk:
            return None
        if self.in_order and index.block_size % self.rate == 0:
            keys = index.kv.unflatten(0, (-1, index.rows_per_block))
            last, pages = (positions + 1) // self.rate - 1, IndexPages(keys, index.table)
            top = index_topk(inputs.index_q, inputs.index_weights, pages, last, self.topk)
            return ChosenEntries(top.slots, top.counts)
        numbers = torch.arange(count, device=positions.device)
        rows = index.rows(numbers.expand(len(index.table), -1))
        found, step = [], max(1, _SCORES // (count * inputs.index_q.shape[1]))
        for first in range(0, len(positions), step):
            part = slice(first, first + step)
            own = rows if len(rows) == 1 else rows[part]
            places = self._select(inputs.part(part), positions[part], index.kv[own], numbers)
            found.append(own.expand(len(places), -1).gather(1, places))
        seen = ((positions + 1) // self.rate).clamp(max=self.topk)
        return ChosenEntries(torch.cat(found).int(), seen.int())

    def _select(
        self, inputs: CompressedInputs, positions: Tensor, keys: Tensor, numbers: Tensor
    ) -> Tensor:
        """Places in numbers [E] of the entries with the highest scores for each token, int64 [T,
        topk]; entries that a token does not see come last. keys [T or 1, E, index D]."""
        hidden = numbers >= (positions[:, None] + 1) // self.rate
        order = numbers if self.in_order else None
        return topk_columns(inputs.index_q, inputs.index_weights, keys, hidden, self.topk, order)

    def attend(
        self,
        inputs: CompressedInputs,
        positions: Tensor,
        recent: RecentTokens,
        pages: EntryPages | None,
        chosen: ChosenEntries | None,
    ) -> Tensor:
        """Tokens at positions int64 [T] -> [T, heads, D]."""
        return compressed_attend(
            inputs.q, positions, recent, pages, chosen, self.sinks, scale=self.scale
        )


def buffer_index(layer: int, part: int) -> int:
    """Index of a layer's buffer of last tokens: part 0 are keys, part 1 the inputs of compressed
    KV."""
    return 2 * layer + part


def attend_full_sequence(inputs: CompressedInputs, attention: CompressedAttention) -> Tensor:
    """A whole sequence -> [T, heads, D]."""
    positions = torch.arange(len(inputs.kv), device=inputs.kv.device)
    first, length = torch.zeros_like(positions), max(1, len(positions))
    recent, pages, chosen = RecentTokens(inputs.kv, first, length, attention.window), None, None
    rate, pooling = attention.rate, attention.pooling
    if pooling is not None and len(positions) >= rate:
        ends = positions[rate - 1 :: rate]
        widths = (inputs.kv.shape[1], inputs.index_q.shape[2])
        room = (inputs.kv.new_empty(len(ends), width) for width in widths)
        pages, index = (EntryPages(one, (ends // rate)[None], rate, rate) for one in room)
        attention.pool(recent._replace(kv=inputs.raw, first=first[: len(ends)]), ends, pages, index)
        chosen = replace(attention, in_order=False).choose(inputs, positions, index, len(ends))
    return attention.attend(inputs, positions, recent, pages, chosen)
