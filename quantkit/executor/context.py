"""How the executor's forward attends: over the paged cache.

PrefillContext computes several new tokens per sequence: keys and values are expanded from the latents, which costs least arithmetic.
DecodeContext computes one token per row: the up-projection is absorbed into the query, so that the cached latent is read as it is
(arXiv 2405.04434, section 2.1.2). Both write the new tokens first and then attend to what the cache holds, so that a result does not
depend on how a prompt was cut into chunks.
"""

from dataclasses import dataclass

import torch
from quantkit_kernels import Prompts, doubled_angles, gqa_decode, gqa_prefill, gqa_prepare, mla_decode, mla_prefill, mla_prepare
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from quantkit.executor.cache import PagedCache
from quantkit.models.context import Positions
from quantkit.models.rope import Rope
from quantkit.models.weights import PrologOp


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
        """cos, sin of the tokens as operators over cached latents read them, computed once for all layers."""
        if not self.cache.parts:
            return self.angles(rope)
        if rope not in self._doubled:
            self._doubled[rope] = doubled_angles(*self.angles(rope), self.cache.dtype)
        return self._doubled[rope]

    def store_mla(self, layer: int, qkv_a: Tensor, q_norm: Tensor, kv_norm: Tensor, eps: float, rope: Rope) -> Tensor:
        """As `models.context.Context.store_mla`."""
        cached, angles = self.cache.layers[layer], self.cache_angles(rope)
        return mla_prepare(qkv_a, q_norm, kv_norm, *angles, cached, self.slots, eps=eps, interleaved=rope.interleaved)

    def store_gqa(
        self,
        layer: int,
        qkv: Tensor,
        kv_heads: int,
        head_dim: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        rope: Rope,
    ) -> Tensor:
        """As `models.context.Context.store_gqa`."""
        tensors = (qkv, q_norm, k_norm, *self.angles(rope), *self.cache.heads(layer, head_dim), self.slots)
        return gqa_prepare(*tensors, eps=eps, interleaved=rope.interleaved)


class PrefillContext(CachedContext):
    """Tokens of several chunks lie flat; each sees its sequence's cached tokens and, causally, its own chunk."""

    def __init__(self, cache: PagedCache, chunks: list[Chunk]) -> None:
        spans = [torch.arange(chunk.start, chunk.start + chunk.length, device=cache.device) for chunk in chunks]
        size = cache.block_size
        slots = torch.cat([chunk.blocks[span // size] * size + span % size for chunk, span in zip(chunks, spans)])
        super().__init__(cache, torch.cat(spans), slots)
        self.chunks = chunks
        tables = pad_sequence([chunk.blocks for chunk in chunks], batch_first=True)
        self.prompts = Prompts.of([(chunk.start, chunk.length) for chunk in chunks], tables)

    def attend_mla(self, layer: int, q: Tensor, kv_b: Tensor, rope: Rope, scale: float) -> Tensor:
        """As `models.context.Context.attend_mla`."""
        cached, angles = self.cache.layers[layer], self.angles(rope)
        return mla_prefill(q, kv_b, *angles, cached, self.prompts, scale=scale, interleaved=rope.interleaved)

    def attend_gqa(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """As `models.context.Context.attend_gqa`."""
        return gqa_prefill(q, *self.cache.heads(layer, q.shape[2]), self.prompts, scale=scale)


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

    def attend_gqa(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """As `models.context.Context.attend_gqa`."""
        keys, values = self.cache.heads(layer, q.shape[2])
        return gqa_decode(q, keys, values, self.block_table, self.seq_lens, scale=scale, lengths=self.lengths)
