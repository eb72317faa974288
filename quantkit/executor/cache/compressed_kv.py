"""Caches of what stands for a group of tokens: the compressed KV of compressed attention
(models/compressed_attention.py) and the keys of a pooled index (models/pooled_index.py), in pages,
and the last tokens of each running sequence (sequence_state.py).

The compressed KV of a group of tokens lies in the block of the group's last token, so there are as
many pages as blocks of other caches. That of rejected drafts is overwritten before a token sees it.
Block 0 is never allocated: padding rows of a captured batch write there.
"""

from collections.abc import Iterable

import torch
from quantkit_kernels import EntryPages, RecentTokens, Rotation
from torch import Tensor

from quantkit.executor.cache.sequence_state import KeptTwice, RotatingCache
from quantkit.models.architecture import CompressedCache
from quantkit.models.compressed_attention import (
    Carried,
    CompressedAttention,
    CompressedInputs,
    buffer_index,
)
from quantkit.models.pooled_index import IndexPooling, PooledInputs


class CompressedKVCache:
    """Of one model, for `places` running sequences. dtype: the compute dtype; ahead: as of
    `RotatingCache`."""

    def __init__(
        self,
        sizes: CompressedCache,
        num_blocks: int,
        block_size: int,
        places: int,
        dtype: torch.dtype,
        device: torch.device | str,
        ahead: int = 0,
    ) -> None:
        self._block_size, self._device = block_size, device
        self._kv: list[Tensor] = []
        self._index: list[Tensor] = []
        for rate, selects in sizes.rates:
            rows = num_blocks * self._rows(rate) if rate else 0
            self._kv.append(torch.zeros(rows, sizes.head_dim, dtype=dtype, device=device))
            self._index.append(
                torch.zeros(rows, sizes.index_dim if selects else 0, dtype=dtype, device=device)
            )
        self._window = RotatingCache(sizes.window_shapes(), ahead, places, dtype, device)

    @property
    def nbytes(self) -> int:
        return self._window.nbytes + sum(one.nbytes for one in (*self._kv, *self._index))

    @property
    def kept(self) -> list[KeptTwice]:
        return self._window.kept

    def attend_chunk(
        self,
        layer: int,
        inputs: CompressedInputs,
        attention: CompressedAttention,
        start: int,
        blocks: Tensor,
        place: int,
        carried: Carried,
    ) -> Tensor:
        """The tokens from `start` on of a sequence with these blocks -> [T, heads, head_dim]."""
        stop, positions = start + len(inputs.kv), self._span(start, start + len(inputs.kv))
        first = max(0, start - attention.window + 1)
        kv = self._window.chunk(buffer_index(layer, 0), place, first, start, inputs.kv)
        recent = RecentTokens(kv, torch.full_like(positions, -first), stop, attention.window)
        pages = chosen = None
        if rate := attention.rate:
            pages, index = self._pages(layer, attention, blocks[None])
            if attention.pooling is not None:
                begin = max(0, (start // rate + 1) * rate - attention.pooling.reach)
                raw = self._window.chunk(buffer_index(layer, 1), place, begin, start, inputs.raw)
                ends = self._span(start // rate, stop // rate) * rate + rate - 1
                tokens = RecentTokens(raw, torch.full_like(ends, -begin), stop, 0)
                attention.pool(tokens, ends, pages, index)
            chosen = attention.choose(inputs, positions, index, stop // rate, carried)
        return attention.attend(inputs, positions, recent, pages, chosen)

    def attend_rows(
        self,
        layer: int,
        inputs: CompressedInputs,
        attention: CompressedAttention,
        positions: Tensor,
        tables: Tensor,
        places: Tensor,
        carried: Carried,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Tokens at positions [B] of sequences with block tables [B, n] and places [B]; those of
        one sequence have rising positions -> [B, heads, head_dim]. rotation: by the first token of
        each one's group."""
        recent = self._window.step(buffer_index(layer, 0), places, positions, inputs.kv)
        window = RecentTokens(*recent, attention.window)
        pages = chosen = None
        if attention.rate:
            pages, index = self._pages(layer, attention, tables)
            if attention.pooling is not None:
                raw = self._window.step(buffer_index(layer, 1), places, positions, inputs.raw)
                attention.pool(RecentTokens(*raw, 0), positions, pages, index, rotation)
            chosen = attention.choose(inputs, positions, index, index.most, carried)
        return attention.attend(inputs, positions, window, pages, chosen)

    def _pages(
        self, layer: int, attention: CompressedAttention, table: Tensor
    ) -> tuple[EntryPages, EntryPages]:
        """The entries that the layer reads, and keys of their indexer."""
        rate = attention.rate
        layer = attention.shared.layer if attention.shared else layer
        return (
            EntryPages(self._kv[layer], table, self._block_size, rate),
            EntryPages(self._index[layer], table, self._block_size, rate),
        )

    def _rows(self, rate: int) -> int:
        """Groups per block."""
        return -(-self._block_size // rate)

    def _span(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self._device)


class PooledIndexCache:
    """Of the layers with these numbers, for `places` running sequences. rate: tokens of a group,
    which divide block_size; width: of a key. dtype: the compute dtype."""

    def __init__(
        self,
        layers: Iterable[int],
        rate: int,
        width: int,
        num_blocks: int,
        block_size: int,
        places: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        numbers, rows = [*layers], num_blocks * (block_size // rate)
        self._keys = {
            layer: torch.zeros(rows, width, dtype=dtype, device=device) for layer in numbers
        }
        sizes = dict.fromkeys(numbers, (rate, 2 * width))
        self._recent = RotatingCache(sizes, 0, places, dtype, device)
        self._rate, self._block_size, self._device = rate, block_size, device

    @property
    def nbytes(self) -> int:
        return self._recent.nbytes + sum(one.nbytes for one in self._keys.values())

    @property
    def kept(self) -> list[KeptTwice]:
        return self._recent.kept

    def store_chunk(
        self,
        layer: int,
        inputs: PooledInputs,
        pooling: IndexPooling,
        start: int,
        blocks: Tensor,
        place: int,
    ) -> EntryPages:
        """Keys of the groups that end in the tokens from `start` on of a sequence with these blocks
        -> all of its keys."""
        first, stop, rate = start // self._rate, start + len(inputs.raw), self._rate
        raw = self._recent.chunk(layer, place, first * rate, start, inputs.raw)
        ends = torch.arange(first, stop // rate, device=self._device) * rate + rate - 1
        pages = self._pages(layer, blocks[None, : -(-stop // self._block_size)])
        tokens = RecentTokens(raw, torch.full_like(ends, -first * rate), stop, 0)
        pooling.pool(tokens, ends, pages)
        return pages

    def store_rows(
        self,
        layer: int,
        inputs: PooledInputs,
        pooling: IndexPooling,
        positions: Tensor,
        tables: Tensor,
        places: Tensor,
    ) -> EntryPages:
        """The same for a token of each sequence, at positions [B] with block tables [B, n]."""
        recent = self._recent.step(layer, places, positions, inputs.raw)
        pages = self._pages(layer, tables)
        pooling.pool(RecentTokens(*recent, 0), positions, pages)
        return pages

    def _pages(self, layer: int, table: Tensor) -> EntryPages:
        return EntryPages(self._keys[layer], table, self._block_size, self._rate)
