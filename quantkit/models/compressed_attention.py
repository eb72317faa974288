"""Attention of DeepSeek-V4: a window of recent tokens, and compressed KV entries for groups of
earlier tokens, all of them or those that an indexer selects.

Keys and values are one vector, shared by all heads. `rate` tokens are pooled to one entry: the mean
of their values, weighted per channel by a softmax over the tokens' weights plus a bias per
position. With overlap a token contributes two halves, one to its own group and one to the next, so
an entry pools 2 rate tokens. A token sees entries of groups that end at it or before. Plain torch,
scores in float32.

Symbols: T tokens, D head_dim, E entries, W window, r rate.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from quantkit_kernels import float32_linear, rms_norm, rope
from torch import Tensor

from quantkit.models.rope import Rope
from quantkit.models.sparse import topk_columns

_SCORES = 1 << 25
"""Products of heads and keys held at once, float32."""


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
    """kv [E, D], keys of the indexer [E, index D], or [B, E, ...] of several rows; numbers int64
    [E] or [B, E]: of their groups."""

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
        return rotate_last(
            rms_norm(pooled, self.gain, self.eps)[:, None], self.rope, numbers * self.rate
        )[:, 0]


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

    def select(
        self, inputs: CompressedInputs, positions: Tensor, index: Tensor, numbers: Tensor
    ) -> Tensor:
        """Indices into the last dimension of `numbers` of the entries with the highest scores for
        each token, int64 [T, topk]; entries that a token does not see come last."""
        products = (inputs.index_q.float() @ index.float().mT).relu_()
        scores = (inputs.index_weights[:, None] @ products)[:, 0]
        return topk_columns(
            scores,
            ~self._is_complete(positions, numbers),
            self.topk,
            numbers if self.in_order else None,
        )

    def _is_complete(self, positions: Tensor, numbers: Tensor) -> Tensor:
        return numbers < (positions[:, None] + 1) // self.rate

    def attend(
        self,
        inputs: CompressedInputs,
        positions: Tensor,
        recent: Tensor,
        places: Tensor,
        entries: CompressedKv,
    ) -> Tensor:
        """Tokens at positions int64 [T] over recent kv [S, D], or [T, S, D] per token, at positions
        `places` int64 [S] or [T, S], and over entries -> [T, heads, D]. A negative place is
        unused."""
        own = places.dim() == 2
        count = recent.shape[-2] + entries.kv.shape[-2]
        step, out = max(1, _SCORES // (count * inputs.q.shape[1])), []
        for first in range(0, len(positions), step):
            rows = slice(first, first + step)
            seen = CompressedKv(*(side[rows] for side in entries)) if own else entries
            keys, at = (recent[rows], places[rows]) if own else (recent, places)
            out.append(self._attend(inputs.part(rows), positions[rows], keys, at, seen))
        return torch.cat(out)

    def _attend(
        self,
        inputs: CompressedInputs,
        positions: Tensor,
        recent: Tensor,
        places: Tensor,
        entries: CompressedKv,
    ) -> Tensor:
        distance = positions[:, None] - places
        visible = torch.cat(
            (
                (distance >= 0) & (distance < self.window) & (places >= 0),
                self._visible(inputs, positions, entries),
            ),
            dim=1,
        )
        keys = torch.cat((recent, entries.kv), dim=-2) if entries.kv.shape[-2] else recent
        scores = (inputs.q @ keys.mT).float() * self.scale
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        sinks = self.sinks.expand(len(scores), -1)[..., None]
        shares = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
        return shares.to(keys.dtype) @ keys

    def _visible(
        self, inputs: CompressedInputs, positions: Tensor, entries: CompressedKv
    ) -> Tensor:
        """Which entries each token sees, bool [T, E]."""
        count = entries.kv.shape[-2]
        if not count:
            return positions.new_zeros(len(positions), 0, dtype=torch.bool)
        seen = self._is_complete(positions, entries.numbers)
        if self.index_pooling is None or count <= self.topk:
            return seen
        places = self.select(inputs, positions, entries.keys, entries.numbers)
        return seen & torch.zeros_like(seen).scatter_(1, places, True)


def buffer_index(layer: int, part: int) -> int:
    """Index of a layer's buffer of last tokens: part 0 are keys, part 1 the inputs of compressed
    KV."""
    return 2 * layer + part


def rotate_last(x: Tensor, by: Rope, positions: Tensor, back: bool = False) -> Tensor:
    """x [T, heads, D] with its last `by.dim` channels rotated by positions [T], or back."""
    cos, sin = by.cos_sin(positions)
    rows = torch.arange(len(x), device=x.device)
    last = rope(
        x[..., -by.dim :].contiguous(), rows, cos, -sin if back else sin, interleaved=by.interleaved
    )
    return torch.cat((x[..., : -by.dim], last), dim=-1)


def attend_full_sequence(inputs: CompressedInputs, attention: CompressedAttention) -> Tensor:
    """A whole sequence -> [T, heads, D]."""
    positions = torch.arange(len(inputs.kv), device=inputs.kv.device)
    entries = compress_groups(inputs.raw, 0, 0, len(positions), attention)
    return replace(attention, in_order=False).attend(
        inputs, positions, inputs.kv, positions, entries
    )


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


def indexer_weights(x: Tensor, gate: Tensor, heads: int, dim: int) -> Tensor:
    """Weights of the indexer's heads for each token, including every constant factor, float32 [T,
    heads]."""
    return float32_linear(x, gate) * (heads * dim) ** -0.5
