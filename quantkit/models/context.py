"""How a forward pass attends: over whole sequences here, over a cache in the executor.

Tokens of all sequences are concatenated in [T, ...]. The model computes queries, keys and values;
the context knows which tokens see which, and where earlier ones are cached.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Protocol

import quantkit_kernels
import torch
from quantkit_kernels import (
    CodeSteps,
    DeltaInputs,
    DeltaWeights,
    IndexKeys,
    IndexNorm,
    KeySteps,
    Norms,
    Rotation,
    TopTokens,
    gqa_prepare,
    index_prepare,
    mla_prepare,
)
from quantkit_kernels.codes import (
    CodedIndexKeys,
    decode,
    decoded,
    empty_index_keys,
    empty_keys,
    empty_latents,
    encode_index,
)
from quantkit_kernels.reference.delta import attend_sequence
from quantkit_kernels.reference.prompts import attend_by_blocks, attend_one
from torch import Tensor
from torch.nn import functional as F

from quantkit.common.errors import QuantkitError
from quantkit.models.compressed_attention import (
    Carried,
    CompressedAttention,
    CompressedInputs,
    attend_full_sequence,
)
from quantkit.models.latent_window import (
    LatentWindow,
    VisibleTokens,
    attend_latent_window,
    window_mask,
)
from quantkit.models.ngram_table import NgramRows, read_by_ids, recent_ids
from quantkit.models.pooled_index import IndexPooling, PooledInputs, select_in_text
from quantkit.models.rope import Rope
from quantkit.models.short_conv import Shifted, shifted_sequences, short_convolve
from quantkit.models.sparse import (
    IndexerInputs,
    attend_selected,
    attend_selected_heads,
    concat_selected,
    select_topk,
    visible_tokens,
)
from quantkit.models.weights import LinearOp, PrologOp

Product = Callable[[Tensor, Tensor], Tensor]
"""x [..., K], w [N, K] -> x w^T."""


class Context(Protocol):
    positions: Tensor
    """[T] int64, the position of each token in its sequence."""

    def rotation(self, rope: Rope) -> Rotation:
        """cos, sin float32 [T, rope.dim / 2] of the tokens' positions."""

    def rotate(self, rope: Rope, x: Tensor) -> Tensor:
        """x [T, heads, rope.dim] rotated by the tokens' positions."""

    def store_mla(self, layer: int, qkv_a: Tensor, norms: Norms, rope: Rope) -> Tensor:
        """Multi-head latent attention, first part: norms the query part [q_lora] of qkv_a [T,
        q_lora + kv_lora + rope.dim], which is returned, and caches the normed latent and the
        rotated key for `attend_mla` of this layer."""

    def query_mla(
        self, layer: int, qkv_a: Tensor, norms: Norms, q_b: LinearOp, rope: Rope
    ) -> Tensor:
        """`store_mla`, followed by `q_b` on its result."""

    def select(
        self, layer: int, inputs: IndexerInputs, norm: IndexNorm, rope: Rope, topk: int
    ) -> None:
        """Sparse attention, between the parts: caches the indexer's keys, normed and rotated, and
        selects for each token the `topk` tokens of its sequence, up to itself, with the highest
        scores; used by `attend_mla` until the next call."""

    def select_pooled(self, layer: int, inputs: PooledInputs, pooling: IndexPooling) -> None:
        """As `select`, by groups of tokens (pooled_index.py)."""

    def attend_mla(
        self, layer: int, q: Tensor, kv_b: Tensor, rope: Rope, scale: float, topk: int = 0
    ) -> Tensor:
        """Second part: q [T, heads, nope + rope.dim] with its rotary part not yet rotated, kv_b
        [heads, nope + v, kv_lora] -> [T, heads, v]. topk: attend only to the tokens that `select`
        found last; 0 for all."""

    def attend_latent_window(self, layer: int, q: Tensor, attention: LatentWindow) -> Tensor:
        """As `attend_mla`, over a window or selected tokens, and learned tokens: q [T, heads, nope
        + rope.dim] -> [T, heads, v]."""

    def convolve(self, layer: int, part: int, x: Tensor, kernel: Tensor) -> Tensor:
        """x [T, C] plus a causal convolution by kernel float32 [C, K] over each sequence
        (short_conv.py). part: which of the layer's convolutions."""

    def shifted(self, layer: int, part: int, x: Tensor, reach: int) -> Shifted:
        """x [T, C] of the tokens before each, of which the layer keeps the last `reach`, each
        itself included. part: which of the layer's such inputs."""

    def decode_mla(
        self, layer: int, x: Tensor, prolog: PrologOp, rope: Rope, scale: float
    ) -> Tensor | None:
        """Both parts and the projections before them, x [T, H] -> [T, heads, v], in one fused
        operator; None where this pass does not support it."""

    def store_gqa(
        self, layer: int, qkv: Tensor, kv_heads: int, head_dim: int, norms: Norms | None, rope: Rope
    ) -> Tensor:
        """Grouped-query attention, first part: qkv [T, (heads + 2 * kv_heads) * head_dim] holds
        queries, keys and values. Returns the queries [T, heads, head_dim], normed where there are
        norms, and rotated; caches keys, processed likewise, and values for `attend_gqa`."""

    def attend_gqa(
        self,
        layer: int,
        q: Tensor,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
        topk: int = 0,
    ) -> Tensor:
        """Second part: q [T, heads, head_dim] -> [T, heads, head_dim]; adjacent heads share keys.
        window: tokens that each sees, itself included; 0 for all. sinks float32 [heads]: score of a
        virtual key without a value that all tokens see. topk: as in `attend_mla`."""

    def attend_compressed(
        self, layer: int, inputs: CompressedInputs, attention: CompressedAttention
    ) -> Tensor:
        """Attention over a window and the compressed KV of a sequence -> [T, heads, head_dim]."""

    def ngrams(self, token_ids: Tensor, rows: NgramRows) -> Tensor:
        """What each of the tokens [T] reads of a table, by its id and those before it in its
        sequence: [T, rows.width]."""

    def attend_delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
        """Linear attention, starting from the state of each sequence before these tokens -> [T,
        value heads * value_dim], normed and gated."""


class Positions:
    """Positions of the tokens of one forward pass, and their rotary tables, computed once for all
    layers."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.selected: TopTokens | None = None
        """The tokens selected by sparse attention; None for all."""
        self._rotations: dict[tuple[Rope, int], Rotation] = {}

    @functools.cached_property
    def rows(self) -> Tensor:
        """Token numbers int64 [T]."""
        return torch.arange(len(self.positions), device=self.positions.device)

    def rotation(self, rope: Rope, group: int = 1) -> Rotation:
        """cos, sin float32 [T, rope.dim / 2] of the tokens, or of the first tokens of their
        groups."""
        if (rope, group) not in self._rotations:
            angles = rope.cos_sin(self.positions, group)
            self._rotations[rope, group] = Rotation(*angles, rope.interleaved)
        return self._rotations[rope, group]

    def rotate(self, rope: Rope, x: Tensor) -> Tensor:
        cos, sin, interleaved = self.rotation(rope)
        return quantkit_kernels.rope(x, self.rows, cos, sin, interleaved=interleaved)

    def rotate_last(self, rope: Rope, q: Tensor) -> Tensor:
        """q [T, heads, nope + rope.dim] with its rotary part rotated."""
        if not rope.dim:
            return q
        return torch.cat((q[..., : -rope.dim], self.rotate(rope, q[..., -rope.dim :])), dim=-1)

    def decode_mla(
        self, layer: int, x: Tensor, prolog: PrologOp, rope: Rope, scale: float
    ) -> Tensor | None:
        """Not supported: this pass needs keys and values, which the fused operator does not
        compute."""
        return None


def expand_latents(
    cached: Tensor, kv_b: Tensor, nope: int, product: Product = F.linear
) -> tuple[Tensor, Tensor]:
    """Latents and rotary keys [S, kv_lora + rope] -> keys [S, heads, nope + rope], values [S,
    heads, v]. kv_b as in `Context.attend_mla`."""
    heads, rows, kv_lora = kv_b.shape
    latent, k_pe = cached.split([kv_lora, cached.shape[1] - kv_lora], dim=-1)
    k_nope, v = (
        product(latent, kv_b.flatten(0, 1))
        .unflatten(-1, (heads, rows))
        .split([nope, rows - nope], dim=-1)
    )
    return torch.cat((k_nope, k_pe[:, None].expand(-1, heads, -1)), dim=-1), v


NO_CODE_SCALES: Mapping[int, CodeSteps] = {}


def cached_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of a cache for a compute dtype: the same if it has 16 bits, as the cache operators need
    it; else bfloat16."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


class CausalContext(Positions):
    """Whole sequences with causal attention and no cache beyond a layer: for calibration,
    perplexity and tests.

    codes: dtype of an 8-bit cache whose rounding is simulated. steps: static scales of the codes by
    layer, where calibrated. product: of latents and kv_b.
    """

    def __init__(
        self,
        seq_lens: list[int],
        device: torch.device | str = "cpu",
        codes: torch.dtype | None = None,
        steps: Mapping[int, CodeSteps] = NO_CODE_SCALES,
        product: Product = F.linear,
    ) -> None:
        super().__init__(torch.cat([torch.arange(n, device=device) for n in seq_lens]))
        self.seq_lens, self.codes, self.steps, self.product = seq_lens, codes, steps, product
        self.carried = [Carried() for _ in seq_lens]
        """By sequence."""

    def store_mla(self, layer: int, qkv_a: Tensor, norms: Norms, rope: Rope) -> Tensor:
        tokens, kv_lora = len(qkv_a), norms.k.shape[0]
        self.stored = qkv_a.new_empty(tokens, 1, kv_lora + rope.dim)
        if self.codes is None:
            return mla_prepare(qkv_a, norms, self.rotation(rope), self.stored, self.rows)
        room = empty_latents(
            (tokens, 1), kv_lora, rope.dim, self.codes, cached_dtype(qkv_a.dtype), qkv_a.device
        )
        step = self.steps.get(layer)
        assert not isinstance(step, KeySteps), "scales of keys and values for a latent cache"
        q_a = mla_prepare(qkv_a, norms, self.rotation(rope), room, self.rows, code_step=step)
        self.stored.copy_(decoded(room))
        return q_a

    def query_mla(
        self, layer: int, qkv_a: Tensor, norms: Norms, q_b: LinearOp, rope: Rope
    ) -> Tensor:
        return q_b(self.store_mla(layer, qkv_a, norms, rope))

    def select(
        self, layer: int, inputs: IndexerInputs, norm: IndexNorm, rope: Rope, topk: int
    ) -> None:
        self.selected, parts, start = None, [], 0
        if max(self.seq_lens) <= topk:
            return
        tokens, width = inputs.keys.shape
        index: IndexKeys = torch.empty_like(inputs.keys)[:, None]
        if self.codes is not None:
            index = empty_index_keys((tokens, 1), width, inputs.keys.device)
        queries = index_prepare(
            inputs.queries, inputs.keys, norm, self.rotation(rope), index, self.rows
        )
        if isinstance(index, CodedIndexKeys):
            queries, index = decode(*encode_index(queries)), decode(*index)
        keys = index[:, 0]
        for length in self.seq_lens:
            part = slice(start, start + length)
            own = select_topk(
                queries[part], inputs.weights[part], keys[part], self.positions[part], topk
            )
            parts.append(own._replace(slots=own.slots + start))
            start += length
        self.selected = concat_selected(parts)

    def select_pooled(self, layer: int, inputs: PooledInputs, pooling: IndexPooling) -> None:
        self.selected = None
        if max(self.seq_lens) <= pooling.topk:
            return
        parts, start = [], 0
        for length in self.seq_lens:
            part = slice(start, start + length)
            own = PooledInputs(*(side[part] for side in inputs))
            found = select_in_text(own, self.positions[part], pooling)
            parts.append(found._replace(slots=found.slots + start))
            start += length
        self.selected = concat_selected(parts)

    def attend_mla(
        self, layer: int, q: Tensor, kv_b: Tensor, rope: Rope, scale: float, topk: int = 0
    ) -> Tensor:
        if (selected := self._selected(layer, topk)) is not None:
            return attend_selected(q, kv_b, self.rotation(rope), self.stored, selected, scale)
        q = self.rotate_last(rope, q)
        k, v = expand_latents(self.stored[:, 0], kv_b, q.shape[2] - rope.dim, self.product)
        return self.attend(q, k, v, scale)

    def _selected(self, layer: int, topk: int) -> TopTokens | None:
        """The tokens that a layer attends to; None for all, where there are no more than `topk`."""
        if not 0 < topk < max(self.seq_lens):
            return None
        if self.selected is None:
            raise QuantkitError(
                f"layer {layer} attends to the tokens that the layer before it selects, and "
                f"is computed alone on {max(self.seq_lens)} tokens",
                f"use texts of at most {topk} tokens, which it sees whole",
            )
        return self.selected

    def attend_latent_window(self, layer: int, q: Tensor, attention: LatentWindow) -> Tensor:
        q = self.rotate_last(attention.rope, q)
        if (selected := self._selected(layer, attention.topk)) is not None:
            return attend_latent_window(q, self.stored, visible_tokens(selected), attention)
        out, start = [], 0
        for length in self.seq_lens:
            slots = torch.arange(start, start + length, device=q.device)
            seen = VisibleTokens(
                slots, window_mask(self.positions[slots], self.positions[slots], attention.window)
            )
            out.append(attend_latent_window(q[slots], self.stored, seen, attention))
            start += length
        return torch.cat(out)

    def convolve(self, layer: int, part: int, x: Tensor, kernel: Tensor) -> Tensor:
        parts = zip(x.split(self.seq_lens), self.positions.split(self.seq_lens))
        return torch.cat(
            [short_convolve(own, positions, own.float(), kernel) for own, positions in parts]
        )

    def shifted(self, layer: int, part: int, x: Tensor, reach: int) -> Shifted:
        padded = [F.pad(own, (0, 0, reach - 1, 0)) for own in x.split(self.seq_lens)]
        return shifted_sequences(padded, reach)

    def store_gqa(
        self, layer: int, qkv: Tensor, kv_heads: int, head_dim: int, norms: Norms | None, rope: Rope
    ) -> Tensor:
        shape = (1, len(qkv), kv_heads, head_dim)
        self.keys, self.values = qkv.new_empty(2, *shape).unbind()
        if self.codes is None:
            return gqa_prepare(qkv, norms, self.rotation(rope), (self.keys, self.values), self.rows)
        room = empty_keys(shape, self.codes, qkv.device)
        steps = self.steps.get(layer)
        assert not isinstance(steps, Tensor), "a latent's scale for keys and values"
        q = gqa_prepare(qkv, norms, self.rotation(rope), room, self.rows, code_steps=steps)
        keys, values = decode(room.keys, room.key_scales), decode(room.values, room.value_scales)
        self.keys.copy_(keys if steps is None else keys * steps.keys)
        self.values.copy_(values if steps is None else values * steps.values)
        return q

    def attend_gqa(
        self,
        layer: int,
        q: Tensor,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
        topk: int = 0,
    ) -> Tensor:
        if (selected := self._selected(layer, topk)) is not None:
            return attend_selected_heads(q, (self.keys, self.values), selected, scale)
        return self.attend(q, self.keys[0], self.values[0], scale, window, sinks)

    def attend_compressed(
        self, layer: int, inputs: CompressedInputs, attention: CompressedAttention
    ) -> Tensor:
        parts = zip(*(side.split(self.seq_lens) for side in inputs))
        return torch.cat(
            [
                attend_full_sequence(CompressedInputs(*one), attention, carried)
                for one, carried in zip(parts, self.carried)
            ]
        )

    def ngrams(self, token_ids: Tensor, rows: NgramRows) -> Tensor:
        texts = token_ids.cpu().split(self.seq_lens)

        def recent(count: int) -> Tensor:
            return torch.cat([recent_ids(text, 0, count) for text in texts])

        return read_by_ids(recent, token_ids.device)(rows)

    def attend_delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
        parts = zip(*(side.split(self.seq_lens) for side in inputs))
        return torch.cat([attend_sequence(DeltaInputs(*one), weights)[0] for one in parts])

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, e], heads a multiple of kv_heads ->
        [T, heads, e]."""
        out, start = [], 0
        for length in self.seq_lens:
            part = slice(start, start + length)
            one = (q[part], k[part], v[part])
            by_blocks = q.device.type == "cpu" and q.shape[-1] != v.shape[-1]
            if sinks is not None:
                out.append(_attend_with_sinks(*one, scale, window, sinks))
            else:
                out.append(
                    attend_by_blocks(*one, scale) if by_blocks else _attend(*one, scale, window)
                )
            start += length
        return torch.cat(out)


def _attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, sinks: Tensor
) -> Tensor:
    """As `_attend`, with sinks, which torch's attention does not support."""
    places = torch.arange(len(k), device=k.device)
    return attend_one(q, places, v.shape[-1], lambda some: (k[some], v[some]), scale, window, sinks)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Causal attention of one sequence: q [T, heads, d], k and v [T, kv_heads, ...] -> [T, heads,
    e]."""
    queries, keys, values = (t.transpose(0, 1)[None] for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    mask = None
    if 0 < window < len(q):
        mask = (
            torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril_().triu_(1 - window)
        )
    out = F.scaled_dot_product_attention(
        queries, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)
