"""How the executor's forward attends: over the paged cache.

PrefillContext computes several new tokens per sequence: keys and values are expanded from the
latents, which costs least arithmetic. DecodeContext computes one token per row: the up-projection
is absorbed into the query, so that the cached latent is read as it is (arXiv 2405.04434, section
2.1.2). Both write the new tokens first and then attend to what the cache holds, so that a result
does not depend on how a prompt was cut into chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from quantkit_kernels import (
    Norms,
    PagedKeys,
    PagedLatents,
    Prompts,
    Rotation,
    doubled_angles,
    gqa_decode,
    gqa_prefill,
    gqa_prepare,
    mla_decode,
    mla_prefill,
    mla_prepare,
    mla_queries,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from quantkit.executor.cache.cache import PagedCache
from quantkit.models.compressed_attention import CompressedAttention, CompressedInputs
from quantkit.models.context import Positions
from quantkit.models.delta_rule import (
    DeltaInputs,
    DeltaState,
    DeltaWeights,
    attend_sequence,
    attend_step,
)
from quantkit.models.latent_window import (
    LatentWindow,
    VisibleTokens,
    attend_latent_window,
    window_mask,
)
from quantkit.models.rope import Rope
from quantkit.models.short_conv import buffer_index, short_convolve, short_convolve_step
from quantkit.models.sparse import (
    IndexerInputs,
    Selected,
    attend_selected,
    concat_selected,
    select_topk,
)
from quantkit.models.weights import LinearOp, PrologOp


@dataclass(frozen=True)
class Chunk:
    """New tokens start .. start + length - 1 of a sequence whose cache is in `blocks` [n] int64.
    state: its place in the cache's states."""

    start: int
    length: int
    blocks: Tensor
    state: int = 0


class CachedContext(Positions):
    """New tokens and where they go: positions and slots [T] int64."""

    def __init__(self, cache: PagedCache, positions: Tensor, slots: Tensor) -> None:
        super().__init__(positions)
        self.cache, self.slots = cache, slots
        self._doubled: dict[Rope, Rotation] = {}

    def cache_rotation(self, rope: Rope) -> Rotation:
        """cos, sin of the tokens as operators over cached latents read them, computed once for all
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

    def store_index(self, layer: int, keys: Tensor) -> Tensor:
        """The layer's index keys [num_blocks, block_size, D], with those of the new tokens [T,
        D]."""
        index = self.cache.index_keys(layer)
        index.flatten(0, 1).index_copy_(0, self.slots, keys.to(index.dtype))
        return index

    def store_gqa(
        self, layer: int, qkv: Tensor, kv_heads: int, head_dim: int, norms: Norms | None, rope: Rope
    ) -> Tensor:
        """As `models.context.Context.store_gqa`."""
        steps, stored = self.cache.key_steps(layer), self.cache.heads(layer, head_dim)
        q = gqa_prepare(qkv, norms, self.rotation(rope), stored, self.slots, code_steps=steps)
        return q if steps is None else times_steps(q, steps.keys)

    def read_values(self, layer: int, attended: Tensor) -> Tensor:
        """What came of the values [T, heads, D], which are kept over their steps where these are
        known."""
        steps = self.cache.key_steps(layer)
        return attended if steps is None else times_steps(attended, steps.values)


class PromptContext(CachedContext):
    """New tokens of several sequences lie flat; each sees its sequence's cached tokens and,
    causally, the new ones.

    chunks: what they are of, for layers with a state; others do not ask.
    """

    def __init__(
        self,
        cache: PagedCache,
        positions: Tensor,
        slots: Tensor,
        prompts: Prompts,
        chunks: Sequence[Chunk] = (),
    ) -> None:
        super().__init__(cache, positions, slots)
        self.prompts, self.chunks = prompts, chunks

    def select(self, layer: int, inputs: IndexerInputs, topk: int) -> None:
        """As `models.context.Context.select`."""
        index, size, self.selected = (
            self.store_index(layer, inputs.keys).flatten(0, 1),
            self.cache.block_size,
            None,
        )
        if max(chunk.start + chunk.length for chunk in self.chunks) <= topk:
            return
        parts, row = [], 0
        for chunk in self.chunks:
            part, at = (
                slice(row, row + chunk.length),
                torch.arange(chunk.start + chunk.length, device=self.cache.device),
            )
            slots = chunk.blocks[at // size] * size + at % size
            places, counts = select_topk(
                IndexerInputs(*(side[part] for side in inputs)),
                self.positions[part],
                topk,
                index[slots],
            )
            parts.append((slots[places], counts))
            row += chunk.length
        self.selected = concat_selected(parts)

    def attend_mla(
        self, layer: int, q: Tensor, kv_b: Tensor, rope: Rope, scale: float, topk: int = 0
    ) -> Tensor:
        """As `models.context.Context.attend_mla`."""
        if topk and self.selected is not None:
            return attend_selected(
                q, kv_b, self.cache_rotation(rope), self.cache.latents(layer), self.selected, scale
            )
        return mla_prefill(
            q, kv_b, self.rotation(rope), self.cache.latents(layer), self.prompts, scale=scale
        )

    def attend_delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
        """As `models.context.Context.attend_delta`, sequence after sequence."""
        states, out = self.cache.need_states(), []
        for chunk, one in zip(
            self.chunks,
            zip(*(side.split([chunk.length for chunk in self.chunks]) for side in inputs)),
        ):
            place, before = (
                torch.tensor([number], device=self.cache.device)
                for number in (chunk.state, chunk.start)
            )
            kept, which = states.read(layer, place, before)
            attended, state = attend_sequence(
                DeltaInputs(*one), weights, DeltaState(*(side[0] for side in kept))
            )
            states.write(layer, place, before + chunk.length, [side[None] for side in state], which)
            out.append(attended)
        return torch.cat(out)

    def convolve(self, layer: int, part: int, x: Tensor, kernel: Tensor) -> Tensor:
        """As `models.context.Context.convolve`, sequence after sequence."""
        recent, number, out = self.cache.need_recent(), buffer_index(layer, part), []
        lengths = [chunk.length for chunk in self.chunks]
        for chunk, own, positions in zip(
            self.chunks, x.split(lengths), self.positions.split(lengths)
        ):
            first = max(0, chunk.start - kernel.shape[1] + 1)
            out.append(
                short_convolve(
                    own,
                    positions,
                    recent.chunk(number, chunk.state, first, chunk.start, own.float()),
                    kernel,
                )
            )
        return torch.cat(out)

    def attend_latent_window(self, layer: int, q: Tensor, attention: LatentWindow) -> Tensor:
        """As `models.context.Context.attend_latent_window`."""
        q, cached, size, window = (
            self.rotate_last(attention.rope, q),
            self.cache.latents(layer),
            self.cache.block_size,
            attention.window,
        )
        if attention.topk and self.selected is not None:
            return attend_latent_window(q, cached, self.selected.visible, attention)
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
        """As `models.context.Context.attend_compressed`, sequence after sequence."""
        entries, out, row = self.cache.need_entries(), [], 0
        for chunk in self.chunks:
            part = inputs.part(slice(row, row + chunk.length))
            out.append(
                entries.attend_chunk(layer, part, attention, chunk.start, chunk.blocks, chunk.state)
            )
            row += chunk.length
        return torch.cat(out)

    def attend_gqa(
        self, layer: int, q: Tensor, scale: float, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        """As `models.context.Context.attend_gqa`."""
        heads = self.cache.heads(layer, q.shape[2])
        return self.read_values(
            layer, gqa_prefill(q, heads, self.prompts, scale=scale, window=window, sinks=sinks)
        )


class PrefillContext(PromptContext):
    """Chunks of prompts, of any lengths."""

    def __init__(self, cache: PagedCache, chunks: Sequence[Chunk]) -> None:
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
        super().__init__(cache, torch.cat(spans), slots, prompts, chunks)


class DecodeContext(CachedContext):
    """One token per row. Rows of one sequence (drafted tokens being verified) share its blocks and
    have rising positions.

    positions [B] int64 of the new tokens; block_table [B, n] int32 or int64; slots [B] int64, where
    the new tokens are written. A row's token sees positions 0 .. its own. A padding row writes to
    block 0 and sees what is there; its output is not read.
    lengths: positions + 1 on the host, for backends that want them there. states int64 [B]: the
    sequences' places in the cache's states; a sequence of a model with a recurrence has one row
    then.
    """

    def __init__(
        self,
        cache: PagedCache,
        positions: Tensor,
        block_table: Tensor,
        slots: Tensor,
        lengths: list[int] | None = None,
        states: Tensor | None = None,
    ) -> None:
        super().__init__(cache, positions, slots)
        self.block_table, self.states = block_table, states
        self.seq_lens, self.lengths = positions + 1, lengths

    def latents(self, layer: int) -> PagedLatents:
        return PagedLatents(
            self.cache.latents(layer), self.block_table, self.seq_lens, self.lengths
        )

    def select(self, layer: int, inputs: IndexerInputs, topk: int) -> None:
        """As `models.context.Context.select`. Which rows have more than `topk` tokens a captured
        step does not know: tables as wide as that decide."""
        index, size, self.selected = (
            self.store_index(layer, inputs.keys),
            self.cache.block_size,
            None,
        )
        if self.block_table.shape[1] * size > topk:
            places, counts = select_topk(inputs, self.positions, topk, index, self.block_table)
            slots = self.block_table.gather(1, places // size).long() * size + places % size
            self.selected = Selected(slots, counts)

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
        assert self.states is not None, "rows without places in the states"
        states = self.cache.need_states()
        kept, which = states.read(layer, self.states, self.positions)
        attended, state = attend_step(inputs, weights, DeltaState(*kept))
        states.write(layer, self.states, self.positions + 1, state, which)
        return attended

    def attend_compressed(
        self, layer: int, inputs: CompressedInputs, attention: CompressedAttention
    ) -> Tensor:
        """As `models.context.Context.attend_compressed`."""
        assert self.states is not None, "rows without places in the states"
        return self.cache.need_entries().attend_rows(
            layer, inputs, attention, self.positions, self.block_table, self.states
        )

    def convolve(self, layer: int, part: int, x: Tensor, kernel: Tensor) -> Tensor:
        """As `models.context.Context.convolve`."""
        assert self.states is not None, "rows without places in the states"
        recent, number = self.cache.need_recent(), buffer_index(layer, part)
        seen = recent.rows(number, self.states, self.positions, x.float(), kernel.shape[1])
        return short_convolve_step(x, self.positions, seen, kernel)

    def attend_latent_window(self, layer: int, q: Tensor, attention: LatentWindow) -> Tensor:
        """As `models.context.Context.attend_latent_window`."""
        seen = (
            self.selected.visible
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

    def attend_gqa(
        self, layer: int, q: Tensor, scale: float, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        """As `models.context.Context.attend_gqa`."""
        keys, values, *scales = self.cache.heads(layer, q.shape[2])
        pages = PagedKeys(
            keys,
            values,
            self.block_table,
            self.seq_lens,
            self.lengths,
            (scales[0], scales[1]) if scales else None,
        )
        return self.read_values(
            layer, gqa_decode(q, pages, scale=scale, window=window, sinks=sinks)
        )


def times_steps(x: Tensor, steps: Tensor) -> Tensor:
    """x [T, heads, D] times the steps [kv_heads, D] of the head that each shares, in x's dtype."""
    return (x.unflatten(1, (len(steps), -1)).float() * steps[:, None]).flatten(1, 2).to(x.dtype)


class MixedContext(CachedContext):
    """The rows of `answers`, then the tokens of `prompts`, both over one cache."""

    def __init__(self, answers: DecodeContext, prompts: PromptContext) -> None:
        both = (answers, prompts)
        super().__init__(
            answers.cache,
            torch.cat([one.positions for one in both]),
            torch.cat([one.slots for one in both]),
        )
        self.answers, self.prompts, self._rows = answers, prompts, len(answers.positions)

    def select(self, layer: int, inputs: IndexerInputs, topk: int) -> None:
        """As `models.context.Context.select`."""
        answers, prompts = (
            IndexerInputs(*one)
            for one in zip(*(side.tensor_split([self._rows]) for side in inputs))
        )
        self.answers.select(layer, answers, topk)
        self.prompts.select(layer, prompts, topk)

    def attend_mla(
        self, layer: int, q: Tensor, kv_b: Tensor, rope: Rope, scale: float, topk: int = 0
    ) -> Tensor:
        """As `models.context.Context.attend_mla`: answers absorbed, prompts expanded."""
        answers = self.answers.attend_mla(layer, q[: self._rows], kv_b, rope, scale, topk)
        return torch.cat(
            (answers, self.prompts.attend_mla(layer, q[self._rows :], kv_b, rope, scale, topk))
        )

    def attend_latent_window(self, layer: int, q: Tensor, attention: LatentWindow) -> Tensor:
        """As `models.context.Context.attend_latent_window`."""
        answers = self.answers.attend_latent_window(layer, q[: self._rows], attention)
        return torch.cat(
            (answers, self.prompts.attend_latent_window(layer, q[self._rows :], attention))
        )

    def convolve(self, layer: int, part: int, x: Tensor, kernel: Tensor) -> Tensor:
        """As `models.context.Context.convolve`."""
        answers = self.answers.convolve(layer, part, x[: self._rows], kernel)
        return torch.cat((answers, self.prompts.convolve(layer, part, x[self._rows :], kernel)))

    def attend_delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
        """As `models.context.Context.attend_delta`."""
        answers, prompts = (
            DeltaInputs(*one) for one in zip(*(side.tensor_split([self._rows]) for side in inputs))
        )
        return torch.cat(
            (
                self.answers.attend_delta(layer, answers, weights),
                self.prompts.attend_delta(layer, prompts, weights),
            )
        )

    def attend_compressed(
        self, layer: int, inputs: CompressedInputs, attention: CompressedAttention
    ) -> Tensor:
        """As `models.context.Context.attend_compressed`."""
        answers, prompts = inputs.part(slice(self._rows)), inputs.part(slice(self._rows, None))
        return torch.cat(
            (
                self.answers.attend_compressed(layer, answers, attention),
                self.prompts.attend_compressed(layer, prompts, attention),
            )
        )

    def attend_gqa(
        self, layer: int, q: Tensor, scale: float, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        """As `models.context.Context.attend_gqa`."""
        answers = self.answers.attend_gqa(layer, q[: self._rows], scale, window, sinks)
        return torch.cat(
            (answers, self.prompts.attend_gqa(layer, q[self._rows :], scale, window, sinks))
        )
