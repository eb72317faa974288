"""Attention of DeepSeek-V4: a window of recent tokens, and compressed KV entries for groups of
earlier tokens, all of them or those that an indexer selects.

Keys and values are one vector, shared by all heads. `rate` tokens are pooled to one entry: the mean
of their values, weighted per channel by a softmax over the tokens' weights plus a bias per
position. With overlap a token contributes two halves, one to its own group and one to the next, so
an entry pools 2 rate tokens. A token sees entries of groups that end at it or before. The operators
are quantkit_kernels/compressed.py; pooling and scores of the indexer are plain torch.

Symbols: T tokens, D head_dim, E entries, r rate.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from quantkit_kernels import (
    ChosenEntries,
    EntryPages,
    HeadNorm,
    RecentTokens,
    Rotation,
    compressed_attend,
    rotate_heads,
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


class CompressedKv(NamedTuple):
    """kv [E, D], keys of the indexer [E, index D]; numbers int64 [E]: of their groups."""

    kv: Tensor
    keys: Tensor
    numbers: Tensor


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
    def width(self) -> int:
        """Values that a token contributes."""
        return 2 * self.bias.shape[1]

    @property
    def reach(self) -> int:
        """Tokens pooled to one entry."""
        return 2 * self.rate if self.overlap else self.rate

    def __call__(self, raw: Tensor, numbers: Tensor) -> Tensor:
        """raw [n, reach, width] of the tokens of n entries, numbers int64 [n] of their groups ->
        [n, D]. The first group has no tokens before it."""
        values, weights = raw.chunk(2, dim=-1)
        if self.overlap:
            dim, r = self.gain.shape[0], self.rate
            weights = weights + torch.cat((self.bias, self.bias))
            values = torch.cat((values[:, :r, :dim], values[:, r:, dim:]), dim=1)
            weights = torch.cat((weights[:, :r, :dim], weights[:, r:, dim:]), dim=1)
            before = (numbers == 0)[:, None] & (torch.arange(2 * r, device=raw.device) < r)
            values = values.masked_fill(before[..., None], 0.0)
            weights = weights.masked_fill(before[..., None], -torch.inf)
        else:
            weights = weights + self.bias
        pooled = (values * weights.softmax(dim=1, dtype=torch.float32).to(values.dtype)).sum(dim=1)
        rotation = Rotation(*self.rope.cos_sin(numbers * self.rate), self.rope.interleaved)
        return rotate_heads(pooled[:, None], rotation, HeadNorm(self.gain, self.eps))[:, 0]


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

    def compress(self, raw: Tensor, numbers: Tensor) -> CompressedKv:
        """raw [n, reach, C] -> n entries."""
        assert self.pooling is not None, "a layer without entries"
        own = self.pooling.width
        kv = self.pooling(raw[..., :own], numbers)
        return CompressedKv(
            kv,
            self.index_pooling(raw[..., own:], numbers) if self.index_pooling else kv[:, :0],
            numbers,
        )

    def choose(
        self, inputs: CompressedInputs, positions: Tensor, index: EntryPages, count: int
    ) -> ChosenEntries | None:
        """The entries that the indexer selects for each token among the first `count`, those of its
        pages; None for all."""
        if self.index_pooling is None or count <= self.topk:
            return None
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
        products = (inputs.index_q.float() @ keys.float().mT).relu_()
        scores = (inputs.index_weights[:, None] @ products)[:, 0]
        hidden = numbers >= (positions[:, None] + 1) // self.rate
        return topk_columns(scores, hidden, self.topk, numbers if self.in_order else None)

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
    entries = compress_groups(inputs.raw, 0, 0, len(positions), attention)
    recent = RecentTokens(
        inputs.kv, torch.zeros_like(positions), max(1, len(positions)), attention.window
    )
    pages = chosen = None
    if len(entries.numbers):
        pages = EntryPages(entries.kv, entries.numbers[None], attention.rate, attention.rate)
        chosen = replace(attention, in_order=False).choose(
            inputs, positions, pages._replace(kv=entries.keys), len(entries.numbers)
        )
    return attention.attend(inputs, positions, recent, pages, chosen)


def compress_groups(
    raw: Tensor, first: int, start: int, stop: int, attention: CompressedAttention
) -> CompressedKv:
    """The entries whose groups end among the tokens start .. stop - 1. raw [n, C]: of the tokens
    first .. stop - 1, which include all that they need."""
    rate = attention.rate
    numbers = (
        torch.arange(start // rate, stop // rate, device=raw.device)
        if rate
        else torch.zeros(0, dtype=torch.int64, device=raw.device)
    )
    if not len(numbers):
        return CompressedKv(
            raw.new_zeros(0, _dim(attention.pooling)),
            raw.new_zeros(0, _dim(attention.index_pooling)),
            numbers,
        )
    assert attention.pooling is not None, "a rate without what makes entries"
    reach = attention.pooling.reach
    at = (
        (numbers[:, None] + 1) * rate - reach + torch.arange(reach, device=raw.device) - first
    ).clamp(min=0)
    return attention.compress(raw[at], numbers)


def _dim(pooling: Pooling | None) -> int:
    return 0 if pooling is None else pooling.gain.shape[0]
