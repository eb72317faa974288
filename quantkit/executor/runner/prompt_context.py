"""Attention of prompts over the paged cache: several new tokens per sequence, whose keys and values
are expanded from latent KV, which needs the least arithmetic; and what decoding shares with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from quantkit_kernels import (
    DeltaInputs,
    DeltaSpan,
    DeltaSpans,
    DeltaWeights,
    IndexNorm,
    IndexPages,
    KeyValues,
    Norms,
    Prompts,
    Rotation,
    delta_prefill,
    doubled_angles,
    gqa_prefill,
    gqa_prepare,
    index_prepare,
    index_topk,
    mla_prefill,
    mla_prepare,
    mla_queries,
    takes_selected,
)
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from quantkit.executor.cache.cache import PagedCache
from quantkit.models.compressed_attention import Carried, CompressedAttention, CompressedInputs
from quantkit.models.context import Positions
from quantkit.models.latent_window import (
    LatentWindow,
    VisibleTokens,
    attend_latent_window,
    window_mask,
)
from quantkit.models.ngram_table import NgramRows, ReadNgrams
from quantkit.models.pooled_index import IndexPooling, PooledInputs
from quantkit.models.rope import Rope
from quantkit.models.short_conv import (
    Shifted,
    buffer_index,
    shifted_sequences,
    short_convolve,
)
from quantkit.models.sparse import (
    IndexerInputs,
    attend_selected,
    attend_selected_heads,
    concat_selected,
    visible_tokens,
)
from quantkit.models.weights import LinearOp

_MOST_EXPANDED = 12288
"""Cached tokens of a pass up to which attention of prompts to selected ones expands all latents and
masks: on an H200 as fast there as absorbed attention to 2,048 of them, at 8,192 in a third of its
time."""


@dataclass(frozen=True)
class Chunk:
    """New tokens start .. start + length - 1 of a sequence with cache blocks [n] int64. state: its
    place in the cache's per-sequence states."""

    start: int
    length: int
    blocks: Tensor
    state: int = 0


class CachedContext(Positions):
    """positions and slots [T] int64 of the new tokens. read_ngrams: for models with tables.
    attend_heads: `attend_gqa` to all cached keys and values."""

    attend_heads: Callable[[Tensor, KeyValues, float, int, Tensor | None], Tensor]

    def __init__(
        self,
        cache: PagedCache,
        positions: Tensor,
        slots: Tensor,
        read_ngrams: ReadNgrams | None = None,
    ) -> None:
        super().__init__(positions)
        self.cache, self.slots, self._read_ngrams = cache, slots, read_ngrams
        self._doubled: dict[Rope, Rotation] = {}

    def cache_rotation(self, rope: Rope) -> Rotation:
        """cos, sin of the tokens in the layout of operators on latent KV, computed once for all
        layers."""
        rotation = self.rotation(rope)
        if not self.cache.doubles_angles:
            return rotation
        if rope not in self._doubled:
            self._doubled[rope] = Rotation(
                *doubled_angles(rotation.cos, rotation.sin, self.cache.dtype), rope.interleaved
            )
        return self._doubled[rope]

    def store_mla(self, layer: int, qkv_a: Tensor, norms: Norms, rope: Rope) -> Tensor:
        """As `models.context.Context.store_mla`."""
        step = self.cache.latent_step(layer)
        return mla_prepare(
            qkv_a,
            norms,
            self.cache_rotation(rope),
            self.cache.latents(layer),
            self.slots,
            code_step=step,
        )

    def query_mla(
        self, layer: int, qkv_a: Tensor, norms: Norms, q_b: LinearOp, rope: Rope
    ) -> Tensor:
        """As `models.context.Context.query_mla`."""
        where = (self.cache_rotation(rope), self.cache.latents(layer), self.slots)
        return mla_queries(qkv_a, norms, *where, q_b, code_step=self.cache.latent_step(layer))

    def prepare_index(
        self, layer: int, inputs: IndexerInputs, norm: IndexNorm, rope: Rope
    ) -> Tensor:
        """Cache the index keys of the new tokens -> their queries [T, heads, D], rotated."""
        keys, rotation = self.cache.index_keys(layer), self.rotation(rope)
        return index_prepare(inputs.queries, inputs.keys, norm, rotation, keys, self.slots)

    def store_gqa(
        self, layer: int, qkv: Tensor, kv_heads: int, head_dim: int, norms: Norms | None, rope: Rope
    ) -> Tensor:
        """As `models.context.Context.store_gqa`."""
        steps, stored = self.cache.key_steps(layer), self.cache.heads(layer, head_dim)
        q = gqa_prepare(qkv, norms, self.rotation(rope), stored, self.slots, code_steps=steps)
        return q if steps is None else scale_heads(q, steps.keys)

    def ngrams(self, token_ids: Tensor, rows: NgramRows) -> Tensor:
        """As `models.context.Context.ngrams`."""
        assert self._read_ngrams is not None, "a pass whose ids the host knows"
        return self._read_ngrams(rows)

    def attend_gqa(
        self,
        layer: int,
        q: Tensor,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
        topk: int = 0,
    ) -> Tensor:
        """As `models.context.Context.attend_gqa`. Values cached as codes are multiplied by their
        scales afterwards."""
        heads, steps = self.cache.heads(layer, q.shape[2]), self.cache.key_steps(layer)
        if topk and self.selected is not None:
            attended = attend_selected_heads(q, heads, self.selected, scale)
        else:
            attended = self.attend_heads(q, heads, scale, window, sinks)
        return attended if steps is None else scale_heads(attended, steps.values)


class PromptContext(CachedContext):
    """New tokens of several sequences, concatenated; each sees its sequence's cached tokens and,
    causally, the new ones. chunks: the sequences, for layers that prefill sequence by sequence;
    delta_spans: for linear attention, if not those of the chunks."""

    def __init__(
        self,
        cache: PagedCache,
        positions: Tensor,
        slots: Tensor,
        prompts: Prompts,
        chunks: Sequence[Chunk] = (),
        delta_spans: DeltaSpans | None = None,
        read_ngrams: ReadNgrams | None = None,
    ) -> None:
        super().__init__(cache, positions, slots, read_ngrams)
        self.prompts, self.chunks, self._delta_spans = prompts, chunks, delta_spans
        self.carried = [Carried() for _ in chunks]

    def select(
        self, layer: int, inputs: IndexerInputs, norm: IndexNorm, rope: Rope, topk: int
    ) -> None:
        """As `models.context.Context.select`."""
        queries, keys = self.prepare_index(layer, inputs, norm, rope), self.cache.index_keys(layer)
        self.selected = None
        if max(chunk.start + chunk.length for chunk in self.chunks) <= topk:
            return
        parts, row = [], 0
        for chunk in self.chunks:
            part, seen = slice(row, row + chunk.length), chunk.start + chunk.length
            table = chunk.blocks[None, : -(-seen // self.cache.block_size)]
            parts.append(
                index_topk(
                    queries[part],
                    inputs.weights[part],
                    IndexPages(keys, table),
                    self.positions[part],
                    topk,
                )
            )
            row += chunk.length
        self.selected = concat_selected(parts)

    def select_pooled(self, layer: int, inputs: PooledInputs, pooling: IndexPooling) -> None:
        """As `models.context.Context.select_pooled`, sequence by sequence."""
        cache, parts, row = self.cache.pooled_index, [], 0
        sparse = max(chunk.start + chunk.length for chunk in self.chunks) > pooling.topk
        for chunk in self.chunks:
            part = slice(row, row + chunk.length)
            own = PooledInputs(*(side[part] for side in inputs))
            where = (chunk.start, chunk.blocks, chunk.state)
            pages = cache.store_chunk(layer, own, pooling, *where)
            if sparse:
                parts.append(pooling.select(own, self.positions[part], pages))
            row += chunk.length
        self.selected = concat_selected(parts) if sparse else None

    def attend_mla(
        self, layer: int, q: Tensor, kv_b: Tensor, rope: Rope, scale: float, topk: int = 0
    ) -> Tensor:
        """As `models.context.Context.attend_mla`."""
        selected, cached = self.selected if topk else None, self.cache.latents(layer)
        seen = sum(start + length for start, length in self.prompts.spans) if selected else 0
        if selected and (seen > _MOST_EXPANDED or not takes_selected(q, kv_b, rope.dim, seen)):
            return attend_selected(q, kv_b, self.cache_rotation(rope), cached, selected, scale)
        return mla_prefill(
            q, kv_b, self.rotation(rope), cached, self.prompts, scale=scale, selected=selected
        )

    def attend_delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
        """As `models.context.Context.attend_delta`."""
        if self._delta_spans is None:
            spans = [DeltaSpan(one.state, one.start, one.length) for one in self.chunks]
            self._delta_spans = DeltaSpans.of(spans, self.cache.device)
        states = self.cache.recurrent_states.layers[layer]
        return delta_prefill(inputs, weights, states, self._delta_spans)

    def convolve(self, layer: int, part: int, x: Tensor, kernel: Tensor) -> Tensor:
        """As `models.context.Context.convolve`, sequence by sequence."""
        cache, number, out = self.cache.rotating_cache, buffer_index(layer, part), []
        lengths = [chunk.length for chunk in self.chunks]
        for chunk, own, positions in zip(
            self.chunks, x.split(lengths), self.positions.split(lengths)
        ):
            first = max(0, chunk.start - kernel.shape[1] + 1)
            out.append(
                short_convolve(
                    own,
                    positions,
                    cache.chunk(number, chunk.state, first, chunk.start, own.float()),
                    kernel,
                )
            )
        return torch.cat(out)

    def shifted(self, layer: int, part: int, x: Tensor, reach: int) -> Shifted:
        """As `models.context.Context.shifted`."""
        cache, number, padded = self.cache.rotating_cache, buffer_index(layer, part), []
        for chunk, own in zip(self.chunks, x.split([chunk.length for chunk in self.chunks])):
            first = max(0, chunk.start - reach + 1)
            seen = cache.chunk(number, chunk.state, first, chunk.start, own)
            padded.append(F.pad(seen, (0, 0, reach - 1 - (chunk.start - first), 0)))
        return shifted_sequences(padded, reach)

    def attend_latent_window(self, layer: int, q: Tensor, attention: LatentWindow) -> Tensor:
        """As `models.context.Context.attend_latent_window`."""
        q, cached, size, window = (
            self.rotate_last(attention.rope, q),
            self.cache.latents(layer),
            self.cache.block_size,
            attention.window,
        )
        if attention.topk and self.selected is not None:
            return attend_latent_window(q, cached, visible_tokens(self.selected), attention)
        out, row = [], 0
        for chunk in self.chunks:
            part, first = (
                slice(row, row + chunk.length),
                max(0, chunk.start - window + 1) if window else 0,
            )
            at = torch.arange(first, chunk.start + chunk.length, device=self.cache.device)
            seen = VisibleTokens(
                chunk.blocks[at // size] * size + at % size,
                window_mask(self.positions[part], at, window),
            )
            out.append(attend_latent_window(q[part], cached, seen, attention))
            row += chunk.length
        return torch.cat(out)

    def attend_compressed(
        self, layer: int, inputs: CompressedInputs, attention: CompressedAttention
    ) -> Tensor:
        """As `models.context.Context.attend_compressed`, sequence by sequence."""
        cache, out, row = self.cache.compressed_kv, [], 0
        for chunk, carried in zip(self.chunks, self.carried):
            part = inputs.part(slice(row, row + chunk.length))
            where = (chunk.start, chunk.blocks, chunk.state)
            out.append(cache.attend_chunk(layer, part, attention, *where, carried))
            row += chunk.length
        return torch.cat(out)

    def attend_heads(
        self, q: Tensor, heads: KeyValues, scale: float, window: int, sinks: Tensor | None
    ) -> Tensor:
        return gqa_prefill(q, heads, self.prompts, scale=scale, window=window, sinks=sinks)


class PrefillContext(PromptContext):
    """Prompt chunks of any lengths."""

    def __init__(
        self, cache: PagedCache, chunks: Sequence[Chunk], read_ngrams: ReadNgrams | None = None
    ) -> None:
        spans = [
            torch.arange(chunk.start, chunk.start + chunk.length, device=cache.device)
            for chunk in chunks
        ]
        size = cache.block_size
        slots = torch.cat(
            [chunk.blocks[span // size] * size + span % size for chunk, span in zip(chunks, spans)]
        )
        tables = pad_sequence([chunk.blocks for chunk in chunks], batch_first=True)
        prompts = Prompts.of([(chunk.start, chunk.length) for chunk in chunks], tables)
        super().__init__(cache, torch.cat(spans), slots, prompts, chunks, read_ngrams=read_ngrams)


def scale_heads(x: Tensor, steps: Tensor) -> Tensor:
    """x [T, heads, D] times the scales [kv_heads, D] of each head's KV head, in x's dtype."""
    return (x.unflatten(1, (len(steps), -1)).float() * steps[:, None]).flatten(1, 2).to(x.dtype)
