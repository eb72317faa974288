"""Attention contexts of the executor: how the layers of a forward pass attend over the paged cache.

PrefillContext (prompt_context.py) computes several new tokens per sequence. DecodeContext computes
one token per row: the up-projection is absorbed into the query, so that the cached latent KV is
read as it is (arXiv 2405.04434, section 2.1.2). MixedContext computes both in one pass. All write
the new tokens first and then attend to the cache, so results do not depend on how a prompt was cut
into chunks.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from quantkit_kernels import (
    DeltaInputs,
    DeltaWeights,
    IndexNorm,
    IndexPages,
    KeyValues,
    PagedKeys,
    PagedLatents,
    delta_step,
    gqa_decode,
    index_topk,
    mla_decode,
)
from torch import Tensor

from quantkit.executor.cache.cache import PagedCache
from quantkit.executor.runner.prompt_context import CachedContext, PromptContext
from quantkit.models.compressed_attention import Carried, CompressedAttention, CompressedInputs
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
    shifted_rows,
    short_convolve_step,
)
from quantkit.models.sparse import (
    IndexerInputs,
    attend_selected,
    visible_tokens,
)
from quantkit.models.weights import PrologOp

Inputs = TypeVar("Inputs", Tensor, IndexerInputs, PooledInputs, DeltaInputs, CompressedInputs)


class DecodeContext(CachedContext):
    """One token per row. Rows of one sequence (drafts being verified) share its blocks and have
    rising positions.

    positions [B] int64 of the new tokens; block_table [B, n] int32 or int64; slots [B] int64, where
    the new tokens are written. A row sees positions 0 .. its own. A padding row writes to block 0
    and sees what is there; its output is not used. lengths: positions + 1 on the host, for backends
    that need them there. states int64 [B]: places in the cache's per-sequence states; with
    recurrent layers each sequence has one row.
    """

    def __init__(
        self,
        cache: PagedCache,
        positions: Tensor,
        block_table: Tensor,
        slots: Tensor,
        lengths: list[int] | None = None,
        states: Tensor | None = None,
        read_ngrams: ReadNgrams | None = None,
    ) -> None:
        super().__init__(cache, positions, slots, read_ngrams)
        self.block_table, self.states = block_table, states
        self.seq_lens, self.lengths, self.carried = positions + 1, lengths, Carried()

    def latents(self, layer: int) -> PagedLatents:
        return PagedLatents(
            self.cache.latents(layer), self.block_table, self.seq_lens, self.lengths
        )

    def select(
        self, layer: int, inputs: IndexerInputs, norm: IndexNorm, rope: Rope, topk: int
    ) -> None:
        """As `models.context.Context.select`. A captured step does not know which rows have more
        than `topk` tokens, so the width of the block tables decides."""
        queries, keys = self.prepare_index(layer, inputs, norm, rope), self.cache.index_keys(layer)
        self.selected = None
        if self.block_table.shape[1] * self.cache.block_size > topk:
            pages = IndexPages(keys, self.block_table)
            self.selected = index_topk(queries, inputs.weights, pages, self.positions, topk)

    def select_pooled(self, layer: int, inputs: PooledInputs, pooling: IndexPooling) -> None:
        """As `models.context.Context.select_pooled`, where `select` selects."""
        assert self.states is not None, "rows without state places"
        table, where = self.block_table, (self.positions, self.block_table, self.states)
        pages = self.cache.pooled_index.store_rows(layer, inputs, pooling, *where)
        sparse = table.shape[1] * self.cache.block_size > pooling.topk
        self.selected = pooling.select(inputs, self.positions, pages) if sparse else None

    def attend_mla(
        self, layer: int, q: Tensor, kv_b: Tensor, rope: Rope, scale: float, topk: int = 0
    ) -> Tensor:
        """As `models.context.Context.attend_mla`, absorbed."""
        if topk and self.selected is not None:
            return attend_selected(
                q, kv_b, self.cache_rotation(rope), self.cache.latents(layer), self.selected, scale
            )
        return mla_decode(q, kv_b, self.cache_rotation(rope), self.latents(layer), scale=scale)

    def attend_delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
        """As `models.context.Context.attend_delta`."""
        assert self.states is not None, "rows without state places"
        states = self.cache.recurrent_states.layers[layer]
        return delta_step(inputs, weights, states, self.states, self.positions)

    def attend_compressed(
        self, layer: int, inputs: CompressedInputs, attention: CompressedAttention
    ) -> Tensor:
        """As `models.context.Context.attend_compressed`."""
        assert self.states is not None, "rows without state places"
        rotation = None
        if attention.pooling is not None:
            rotation = self.rotation(attention.pooling.rope, attention.rate)
        where = (self.positions, self.block_table, self.states)
        return self.cache.compressed_kv.attend_rows(
            layer, inputs, attention, *where, self.carried, rotation
        )

    def convolve(self, layer: int, part: int, x: Tensor, kernel: Tensor) -> Tensor:
        """As `models.context.Context.convolve`."""
        assert self.states is not None, "rows without state places"
        cache, number = self.cache.rotating_cache, buffer_index(layer, part)
        visible = cache.rows(number, self.states, self.positions, x.float(), kernel.shape[1])
        return short_convolve_step(x, self.positions, visible, kernel)

    def shifted(self, layer: int, part: int, x: Tensor, reach: int) -> Shifted:
        """As `models.context.Context.shifted`."""
        assert self.states is not None, "rows without state places"
        cache, number = self.cache.rotating_cache, buffer_index(layer, part)
        return shifted_rows(
            cache.rows(number, self.states, self.positions, x, reach), self.positions
        )

    def attend_latent_window(self, layer: int, q: Tensor, attention: LatentWindow) -> Tensor:
        """As `models.context.Context.attend_latent_window`."""
        seen = (
            visible_tokens(self.selected)
            if attention.topk and self.selected is not None
            else self._last(attention.window)
        )
        return attend_latent_window(
            self.rotate_last(attention.rope, q), self.cache.latents(layer), seen, attention
        )

    def _last(self, window: int) -> VisibleTokens:
        """The last `window` tokens of each row, 0 for all."""
        size = self.cache.block_size
        room = self.block_table.shape[1] * size
        at = self.positions[:, None] - torch.arange(
            min(window or room, room), device=self.cache.device
        )
        places = at.clamp(min=0)
        return VisibleTokens(
            self.block_table.gather(1, places // size).long() * size + places % size,
            window_mask(self.positions, at, window),
        )

    def decode_mla(
        self, layer: int, x: Tensor, prolog: PrologOp, rope: Rope, scale: float
    ) -> Tensor | None:
        """As `models.context.Context.decode_mla`."""
        return prolog(x, self.cache_rotation(rope), self.slots, self.latents(layer), scale=scale)

    def attend_heads(
        self, q: Tensor, heads: KeyValues, scale: float, window: int, sinks: Tensor | None
    ) -> Tensor:
        keys, values, *scales = heads
        steps = (scales[0], scales[1]) if scales else None
        pages = PagedKeys(keys, values, self.block_table, self.seq_lens, self.lengths, steps)
        return gqa_decode(q, pages, scale=scale, window=window, sinks=sinks)


class MixedContext(CachedContext):
    """The rows of a decode batch, then the tokens of prompt chunks, over one cache: weights are
    read once for both, and each part attends by its own operators."""

    def __init__(self, decode: DecodeContext, prompts: PromptContext) -> None:
        both = (decode, prompts)
        super().__init__(
            decode.cache,
            torch.cat([one.positions for one in both]),
            torch.cat([one.slots for one in both]),
        )
        self.decode, self.prompts, self._rows = decode, prompts, len(decode.positions)

    def _parts(self, inputs: Inputs) -> Iterator[tuple[DecodeContext | PromptContext, Inputs]]:
        """The inputs, a tensor [T, ...] or a tuple of them, of the rows and of the prompts."""
        for one, part in (
            (self.decode, slice(self._rows)),
            (self.prompts, slice(self._rows, None)),
        ):
            own = inputs[part] if isinstance(inputs, Tensor) else (side[part] for side in inputs)
            yield one, own if isinstance(inputs, Tensor) else type(inputs)(*own)  # type: ignore[misc]

    def select(
        self, layer: int, inputs: IndexerInputs, norm: IndexNorm, rope: Rope, topk: int
    ) -> None:
        """As `models.context.Context.select`."""
        for one, own in self._parts(inputs):
            one.select(layer, own, norm, rope, topk)

    def select_pooled(self, layer: int, inputs: PooledInputs, pooling: IndexPooling) -> None:
        """As `models.context.Context.select_pooled`."""
        for one, own in self._parts(inputs):
            one.select_pooled(layer, own, pooling)

    def attend_mla(self, layer: int, q: Tensor, *how: Any) -> Tensor:
        """As `models.context.Context.attend_mla`: decode rows absorbed, prompts expanded."""
        return torch.cat([one.attend_mla(layer, own, *how) for one, own in self._parts(q)])

    def attend_latent_window(self, layer: int, q: Tensor, attention: LatentWindow) -> Tensor:
        """As `models.context.Context.attend_latent_window`."""
        parts = self._parts(q)
        return torch.cat([one.attend_latent_window(layer, own, attention) for one, own in parts])

    def convolve(self, layer: int, part: int, x: Tensor, kernel: Tensor) -> Tensor:
        """As `models.context.Context.convolve`."""
        return torch.cat([one.convolve(layer, part, own, kernel) for one, own in self._parts(x)])

    def shifted(self, layer: int, part: int, x: Tensor, reach: int) -> Shifted:
        """As `models.context.Context.shifted`."""
        both = [one.shifted(layer, part, own, reach) for one, own in self._parts(x)]
        return lambda steps: torch.cat([before(steps) for before in both])

    def attend_delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
        """As `models.context.Context.attend_delta`."""
        parts = self._parts(inputs)
        return torch.cat([one.attend_delta(layer, own, weights) for one, own in parts])

    def attend_compressed(
        self, layer: int, inputs: CompressedInputs, attention: CompressedAttention
    ) -> Tensor:
        """As `models.context.Context.attend_compressed`."""
        parts = self._parts(inputs)
        return torch.cat([one.attend_compressed(layer, own, attention) for one, own in parts])

    def ngrams(self, token_ids: Tensor, rows: NgramRows) -> Tensor:
        """As `models.context.Context.ngrams`."""
        return torch.cat([one.ngrams(own, rows) for one, own in self._parts(token_ids)])

    def attend_gqa(self, layer: int, q: Tensor, *how: Any, **more: Any) -> Tensor:
        """As `models.context.Context.attend_gqa`."""
        return torch.cat([one.attend_gqa(layer, own, *how, **more) for one, own in self._parts(q)])
