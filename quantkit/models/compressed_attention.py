"""Attention of DeepSeek-V4 and V4.1: a window of recent tokens, and compressed KV entries for groups
of earlier tokens, all of them or those that an indexer selects.

Keys and values are one vector, shared by all heads. `rate` tokens are pooled to one entry: the mean
of their values, weighted per channel by a softmax over the tokens' weights plus a bias per
position. With overlap a token contributes two halves, one to its own group and one to the next, so
an entry pools 2 rate tokens. A token sees entries of groups that end at it or before. The operators
are quantkit_kernels/compressed.py, and those of the indexer indexer.py.

In V4.1 a few layers have entries, and index keys made of them, which the layers after them read;
some layers select among them, and the others read what was selected last. From some layer on, the
selection is among the best blocks of entries that this layer found.

Symbols: T tokens, D head_dim, E entries, r rate.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from quantkit_kernels import (
    ChosenEntries,
    EntryPages,
    EntryPool,
    HeadNorm,
    IndexPages,
    RecentTokens,
    Rotation,
    compressed_attend,
    index_topk,
    pool_entries,
    rotate_heads,
)
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.rope import Rope
from quantkit.models.sparse import index_scores, topk_columns

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


class IndexKeys(NamedTuple):
    """Index keys made of entries: weight [index D, D] of an entry before its rotation, normed with
    gain [index D] and eps, and rotated as the entry is."""

    weight: Tensor
    gain: Tensor
    eps: float

    def of(self, entries: Tensor, rotation: Rotation) -> Tensor:
        """entries [n, D], rotated -> [n, index D]."""
        plain = rotate_heads(entries[:, None], rotation, back=True)
        norm = HeadNorm(self.gain, self.eps)
        return rotate_heads(F.linear(plain, self.weight), rotation, norm)[:, 0]


class Candidates(NamedTuple):
    """Blocks of `size` entries, of which the `most` with the best one are selected among, and that
    of a token's last entry. found: by this layer, for those after it."""

    most: int
    size: int
    found: bool


class SharedEntries(NamedTuple):
    """How a layer reads entries that several share. layer: whose they are; rate: of them; keys: in
    that layer, how index keys are made; selects: whether this layer selects, else it reads what was
    selected last; candidates: what its selection is limited to, or finds."""

    layer: int
    rate: int
    keys: IndexKeys | None = None
    selects: bool = False
    candidates: Candidates | None = None


@dataclass(eq=False)
class Carried:
    """What layers of a pass over one sequence, or over the rows of a step, leave to later ones.
    entries: of a whole sequence, by layer, with their index keys; chosen: the last selection;
    blocks bool [T, n]: candidates."""

    entries: dict[int, tuple[EntryPages, EntryPages]] = field(default_factory=dict)
    chosen: ChosenEntries | None = None
    blocks: Tensor | None = None


@dataclass(frozen=True)
class CompressedAttention:
    """One layer's parameters. pooling: None for a layer without entries of its own; index_pooling:
    None for one that sees all entries, or whose index keys are made of them. topk: entries selected
    for each token. sinks float32 [heads]: score of a virtual key without a value. in_order: break
    ties of indexer scores by position (`sparse.topk_columns`)."""

    window: int
    scale: float
    sinks: Tensor
    pooling: Pooling | None = None
    index_pooling: Pooling | None = None
    topk: int = 0
    in_order: bool = True
    shared: SharedEntries | None = None

    @property
    def rate(self) -> int:
        if self.shared:
            return self.shared.rate
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
            rotation = Rotation(*rope.cos_sin(positions, self.rate), rope.interleaved)
        pools = [self.pooling.of(pages)]
        pools += [self.index_pooling.of(index)] if self.index_pooling else []
        pool_entries(raw, positions, pools, rotation)
        if self.shared and self.shared.keys:
            ends = (positions + 1) % self.rate == 0
            rows = pages.rows((positions // self.rate)[:, None])[:, 0].where(ends, 0)
            index.kv[rows] = self.shared.keys.of(pages.kv[rows], rotation).to(index.kv.dtype)

    def choose(
        self,
        inputs: CompressedInputs,
        positions: Tensor,
        index: EntryPages,
        count: int,
        carried: Carried,
    ) -> ChosenEntries | None:
        """The entries that the indexer selects for each token among the first `count`, those of its
        pages; None for all."""
        if self.shared is None:
            selects = self.index_pooling is not None
            return (
                self._chosen(inputs, positions, index, count)
                if selects and count > self.topk
                else None
            )
        if count <= self.topk:
            return None
        limit = self.shared.candidates
        blocks = None
        if limit and count > limit.most * limit.size:
            if limit.found:
                carried.blocks = self._best_blocks(inputs, positions, index, count, limit)
            else:
                blocks = carried.blocks
        if self.shared.selects:
            carried.chosen = self._chosen(inputs, positions, index, count, blocks)
        assert carried.chosen is not None, "a layer before this one selects"
        return carried.chosen

    def _chosen(
        self,
        inputs: CompressedInputs,
        positions: Tensor,
        index: EntryPages,
        count: int,
        blocks: Tensor | None = None,
    ) -> ChosenEntries:
        """blocks bool [T, n]: those that are selected among; None for all."""
        if self.in_order and index.block_size % self.rate == 0 and blocks is None:
            keys = index.kv.unflatten(0, (-1, index.rows_per_block))
            last, pages = (positions + 1) // self.rate - 1, IndexPages(keys, index.table)
            top = index_topk(inputs.index_q, inputs.index_weights, pages, last, self.topk)
            return ChosenEntries(top.slots, top.counts)
        numbers = torch.arange(count, device=positions.device)
        rows = index.rows(numbers.expand(len(index.table), -1))
        order = numbers if self.in_order else None
        found, seen, step = [], [], max(1, _SCORES // (count * inputs.index_q.shape[1]))
        for first in range(0, len(positions), step):
            part = slice(first, first + step)
            own, one = rows if len(rows) == 1 else rows[part], inputs.part(part)
            hidden = numbers >= (positions[part, None] + 1) // self.rate
            if blocks is not None and (limit := self.shared and self.shared.candidates):
                hidden |= ~blocks[part].repeat_interleave(limit.size, dim=1)[:, :count]
            places = topk_columns(
                one.index_q, one.index_weights, index.kv[own], hidden, self.topk, order
            )
            found.append(own.expand(len(places), -1).gather(1, places))
            seen.append((~hidden).sum(dim=1).clamp(max=self.topk))
        return ChosenEntries(torch.cat(found).int(), torch.cat(seen).int())

    def _best_blocks(
        self,
        inputs: CompressedInputs,
        positions: Tensor,
        index: EntryPages,
        count: int,
        limit: Candidates,
    ) -> Tensor:
        """Candidates of each token, bool [T, blocks], by their best entry that it sees."""
        numbers = torch.arange(count, device=positions.device)
        rows = index.rows(numbers.expand(len(index.table), -1))
        found, step = [], max(1, _SCORES // (count * inputs.index_q.shape[1]))
        for first in range(0, len(positions), step):
            part = slice(first, first + step)
            own, one = rows if len(rows) == 1 else rows[part], inputs.part(part)
            visible = (positions[part, None] + 1) // self.rate
            scores = index_scores(one.index_q, one.index_weights, index.kv[own])
            scores = scores.masked_fill(numbers >= visible, -torch.inf)
            scores = F.pad(scores, (0, -count % limit.size), value=-torch.inf)
            best = scores.unflatten(1, (-1, limit.size)).amax(dim=-1)
            block = torch.arange(best.shape[1], device=best.device)
            best = best.masked_fill(block == (visible - 1) // limit.size, torch.inf)
            top = best.topk(min(limit.most, best.shape[1]), dim=-1)
            kept = torch.zeros_like(best, dtype=torch.bool)
            found.append(kept.scatter_(1, top.indices, top.values > -torch.inf))
        return torch.cat(found)

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


def attend_full_sequence(
    inputs: CompressedInputs, attention: CompressedAttention, carried: Carried
) -> Tensor:
    """A whole sequence -> [T, heads, D]."""
    positions = torch.arange(len(inputs.kv), device=inputs.kv.device)
    first, length = torch.zeros_like(positions), max(1, len(positions))
    recent, pages, chosen = RecentTokens(inputs.kv, first, length, attention.window), None, None
    rate, shared = attention.rate, attention.shared
    if rate and len(positions) >= rate:
        ends = positions[rate - 1 :: rate]
        if attention.pooling is not None:
            widths = (inputs.kv.shape[1], inputs.index_q.shape[2])
            room = (inputs.kv.new_empty(len(ends), width) for width in widths)
            pages, index = (EntryPages(one, (ends // rate)[None], rate, rate) for one in room)
            raw = recent._replace(kv=inputs.raw, first=first[: len(ends)])
            attention.pool(raw, ends, pages, index)
        else:
            assert shared is not None, "a layer with a rate has entries or shares some"
            pages, index = carried.entries[shared.layer]
        if shared is not None:
            carried.entries[shared.layer] = pages, index
        by_torch = replace(attention, in_order=False)
        chosen = by_torch.choose(inputs, positions, index, len(ends), carried)
    return attention.attend(inputs, positions, recent, pages, chosen)
