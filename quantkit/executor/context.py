"""How the executor's forward attends: over the paged cache.

PrefillContext computes several new tokens per sequence: keys and values are expanded from the latents, which costs least arithmetic.
DecodeContext computes one token per row: the up-projection is absorbed into the query, so that the cached latent is read as it is
(arXiv 2405.04434, section 2.1.2). Both write the new tokens first and then attend to what the cache holds, so that a result does not
depend on how a prompt was cut into chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from quantkit_kernels import doubled_angles, mla_decode, mla_prepare, pairs_apart
from torch import Tensor
from torch.nn import functional as F

from quantkit.executor.cache import PagedCache
from quantkit.models.context import Positions, expand_latents
from quantkit.models.rope import Rope
from quantkit.models.weights import PrologOp

KEY_CHUNK = 4096
"""Keys expanded at a time in prefill: bounds memory whatever the context (an R1 layer's keys and values take 0.34 GB in bfloat16)."""

Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Cached tokens [S, width] -> keys [S, heads, d] and values [S, heads, v] in the compute dtype."""


@dataclass(frozen=True)
class Chunk:
    """New tokens start .. start + length - 1 of a sequence whose cache is in `blocks` [n] int64."""

    start: int
    length: int
    blocks: Tensor


class CachedContext(Positions):
    """New tokens and where they go: positions and slots [T] int64."""

    def __init__(self, cache: PagedCache, positions: Tensor, slots: Tensor) -> None:
        super().__init__(positions)
        self.cache, self.slots = cache, slots
        self._doubled: dict[Rope, tuple[Tensor, Tensor]] = {}

    def cache_angles(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos, sin of the tokens as operators over this cache read them, computed once for all layers."""
        if not self.cache.parts:
            return self.angles(rope)
        if rope not in self._doubled:
            self._doubled[rope] = doubled_angles(*self.angles(rope), self.cache.dtype)
        return self._doubled[rope]

    def store_mla(self, layer: int, qkv_a: Tensor, q_norm: Tensor, kv_norm: Tensor, eps: float, rope: Rope) -> Tensor:
        """As `models.context.Context.store_mla`."""
        cached, angles = self.cache.layers[layer], self.cache_angles(rope)
        return mla_prepare(qkv_a, q_norm, kv_norm, *angles, cached, self.slots, eps=eps, interleaved=rope.interleaved)


class PrefillContext(CachedContext):
    """Tokens of several chunks lie flat; each sees its sequence's cached tokens and, causally, its own chunk."""

    def __init__(self, cache: PagedCache, chunks: list[Chunk]) -> None:
        spans = [torch.arange(chunk.start, chunk.start + chunk.length, device=cache.device) for chunk in chunks]
        size = cache.block_size
        slots = torch.cat([chunk.blocks[span // size] * size + span % size for chunk, span in zip(chunks, spans)])
        super().__init__(cache, torch.cat(spans), slots)
        self.chunks = chunks

    def attend_mla(self, layer: int, q: Tensor, kv_b: Tensor, rope: Rope, scale: float) -> Tensor:
        """As `models.context.Context.attend_mla`."""

        def expand(cached: Tensor) -> tuple[Tensor, Tensor]:
            return expand_latents(cached.to(q.dtype), kv_b, q.shape[2] - rope.dim)

        q = self.rotate_last(rope, q)
        if self.cache.parts and rope.interleaved:  # the keys' channels lie so
            q = torch.cat((q[..., : -rope.dim], pairs_apart(q[..., -rope.dim :])), dim=-1)
        return self._attend_chunks(layer, q, expand, scale)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As `models.context.Context.attend`."""
        self.cache.write(layer, self.slots, torch.cat((k.flatten(1), v.flatten(1)), dim=-1))
        return self._attend_chunks(layer, q, _split_heads(q, k, v), scale)

    def _attend_chunks(self, layer: int, q: Tensor, expand: Expand, scale: float) -> Tensor:
        """q [T, heads, d] -> [T, heads, v], chunk by chunk."""
        out, row = [], 0
        for chunk in self.chunks:
            cached = self.cache.read(layer, chunk.blocks, chunk.start + chunk.length)
            out.append(_attend_causal(q[row : row + chunk.length], cached, expand, scale))
            row += chunk.length
        return torch.cat(out)


class DecodeContext(CachedContext):
    """One token per row. Rows of one sequence (drafted tokens being verified) share its blocks and have rising positions.

    positions [B] int64 of the new tokens; block_table [B, n] int32 or int64; slots [B] int64, where the new tokens are written.
    A row's token sees positions 0 .. its own. A padding row writes to block 0 and sees what is there; its output is not read.
    lengths: positions + 1 on the host, for backends that want them there.
    """

    def __init__(self, cache: PagedCache, positions: Tensor, block_table: Tensor, slots: Tensor, lengths: list[int] | None = None) -> None:
        super().__init__(cache, positions, slots)
        self.block_table = block_table
        self.seq_lens, self.lengths = positions + 1, lengths

    def attend_mla(self, layer: int, q: Tensor, kv_b: Tensor, rope: Rope, scale: float) -> Tensor:
        """As `models.context.Context.attend_mla`, absorbed."""
        cached, angles = self.cache.layers[layer], self.cache_angles(rope)
        table, seq_lens = self.block_table, self.seq_lens
        return mla_decode(q, kv_b, *angles, cached, table, seq_lens, scale=scale, interleaved=rope.interleaved, lengths=self.lengths)

    def decode_mla(self, layer: int, x: Tensor, prolog: PrologOp, rope: Rope, scale: float) -> Tensor | None:
        """As `models.context.Context.decode_mla`."""
        where = (self.cache.layers[layer], self.slots, self.block_table, self.seq_lens)
        return prolog(x, *self.cache_angles(rope), *where, scale=scale, lengths=self.lengths)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As `models.context.Context.attend`: the rows' caches side by side, padded to the longest."""
        self.cache.write(layer, self.slots, torch.cat((k.flatten(1), v.flatten(1)), dim=-1))
        cached = self.cache.layers[layer][self.block_table].flatten(1, 2)
        seen_k, seen_v = _split_heads(q, k, v)(cached)
        visible = torch.arange(cached.shape[1], device=q.device) < self.seq_lens[:, None]
        # What lies beyond a sequence may be anything, NaN included: masked as a score and zeroed as a value.
        seen_v = seen_v.masked_fill(~visible[:, :, None, None], 0.0)
        mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
        seen_k = seen_k.masked_fill(~visible[:, :, None, None], 0.0)
        attended = F.scaled_dot_product_attention(
            q[:, :, None], seen_k.transpose(1, 2), seen_v.transpose(1, 2), attn_mask=mask[:, None, None], scale=scale
        )
        return attended[:, :, 0]


def _split_heads(q: Tensor, k: Tensor, v: Tensor) -> Expand:
    """Expansion of grouped-query attention: cached keys and values repeated for the query heads that share them."""
    width, kv_heads = k.shape[1] * k.shape[2], k.shape[1]
    repeats = q.shape[1] // kv_heads

    def expand(cached: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = cached.to(q.dtype).split([width, cached.shape[-1] - width], dim=-1)
        split = [side.unflatten(-1, (kv_heads, -1)).repeat_interleave(repeats, dim=-2) for side in (keys, values)]
        return split[0], split[1]

    return expand


def _attend_causal(q: Tensor, cached: Tensor, expand: Expand, scale: float) -> Tensor:
    """q [T, heads, d] of the last T of the cached tokens [S, width] -> [T, heads, v]."""
    new, seen = q.shape[0], cached.shape[0]
    if seen <= KEY_CHUNK:
        k, v = expand(cached)
        mask = None if new == seen else torch.ones(new, seen, dtype=torch.bool, device=q.device).tril_(seen - new)
        sides = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out = F.scaled_dot_product_attention(sides[0], sides[1], sides[2], attn_mask=mask, is_causal=mask is None, scale=scale)
        return out[0].transpose(0, 1)
    return _attend_long(q, cached, expand, scale)


def _attend_long(q: Tensor, cached: Tensor, expand: Expand, scale: float) -> Tensor:
    """As `_attend_causal` over any number of keys: parts of KEY_CHUNK keys, merged by their log-sum-exp (online softmax)."""
    new, seen = q.shape[0], cached.shape[0]
    queries = q.float().transpose(0, 1) * scale  # [heads, T, d]
    last = torch.arange(seen - new, seen, device=q.device)[:, None]
    best = torch.full((*queries.shape[:2], 1), float("-inf"), device=q.device)
    total: Tensor = torch.zeros_like(best)
    weighted: Tensor = torch.zeros((), device=q.device)
    for start in range(0, seen, KEY_CHUNK):
        k, v = expand(cached[start : start + KEY_CHUNK])
        scores = queries @ k.float().permute(1, 2, 0)  # [heads, T, part]
        keys = torch.arange(start, start + k.shape[0], device=q.device)
        scores.masked_fill_(keys > last, float("-inf"))
        # The first part holds position 0, which every query sees: `top` is always finite.
        top = torch.maximum(best, scores.amax(dim=-1, keepdim=True))
        weights, shrink = scores.sub_(top).exp_(), (best - top).exp()
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        weighted = weighted * shrink + weights @ v.float().transpose(0, 1)
        best = top
    return (weighted / total).transpose(0, 1).to(q.dtype)
