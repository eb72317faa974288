"""Cache of compressed attention (models/compressed_attention.py): pages of compressed KV, and the
last tokens of each running sequence (sequence_state.py).

The compressed KV of a group of tokens lies in the block of the group's last token, so there are as
many pages as blocks of other caches. That of rejected drafts is overwritten before a token sees it.
Block 0 is never allocated: padding rows of a captured batch write there.
"""

import torch
from torch import Tensor

from quantkit.executor.cache.sequence_state import RotatingCache
from quantkit.models.architecture import CompressedCache
from quantkit.models.compressed_attention import (
    CompressedAttention,
    CompressedInputs,
    CompressedKv,
    buffer_index,
    compress_groups,
)


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

    def attend_chunk(
        self,
        layer: int,
        inputs: CompressedInputs,
        attention: CompressedAttention,
        start: int,
        blocks: Tensor,
        place: int,
    ) -> Tensor:
        """The tokens from `start` on of a sequence with these blocks -> [T, heads, head_dim]."""
        stop, rate = start + len(inputs.kv), attention.rate
        first = max(0, start - attention.window + 1)
        kv = self._window.chunk(buffer_index(layer, 0), place, first, start, inputs.kv)
        compressed = compress_groups(inputs.raw, start, 0, 0, attention)
        if attention.pooling is not None:
            begin = max(0, (start // rate + 1) * rate - attention.pooling.reach)
            raw = self._window.chunk(buffer_index(layer, 1), place, begin, start, inputs.raw)
            self._write(layer, compress_groups(raw, begin, start, stop, attention), blocks, rate)
            compressed = self._read(layer, self._span(0, stop // rate), blocks, rate)
        return attention.attend(
            inputs, self._span(start, stop), kv, self._span(first, stop), compressed
        )

    def attend_rows(
        self,
        layer: int,
        inputs: CompressedInputs,
        attention: CompressedAttention,
        positions: Tensor,
        tables: Tensor,
        places: Tensor,
    ) -> Tensor:
        """Tokens at positions [B] of sequences with block tables [B, n] and places [B]; those of
        one sequence have rising positions -> [B, heads, head_dim]."""
        window, rate = attention.window, attention.rate
        kv = self._window.rows(buffer_index(layer, 0), places, positions, inputs.kv, window)
        at = positions[:, None] - torch.arange(window - 1, -1, -1, device=self._device)
        compressed = CompressedKv(kv[:, :0], kv[:, :0], at[:, :0])
        if attention.pooling is not None:
            raw = self._window.rows(
                buffer_index(layer, 1), places, positions, inputs.raw, attention.pooling.reach
            )
            numbers = positions // rate
            # Written to block 0 unless a group ends here.
            new = attention.compress(raw, numbers)
            address = self._addresses(numbers[:, None], tables, rate)[:, 0].where(
                (positions + 1) % rate == 0, 0
            )
            self._kv[layer][address], self._index[layer][address] = new.kv, new.keys
            compressed = self._visible(layer, inputs, attention, positions, tables)
        return attention.attend(inputs, positions, kv, at, compressed)

    def _visible(
        self,
        layer: int,
        inputs: CompressedInputs,
        attention: CompressedAttention,
        positions: Tensor,
        tables: Tensor,
    ) -> CompressedKv:
        """Compressed KV of all rows; the selected top k where there are more."""
        rate = attention.rate
        numbers = torch.arange(
            tables.shape[1] * self._block_size // rate, device=self._device
        ).expand(len(positions), -1)
        if attention.index_pooling is not None and numbers.shape[1] > attention.topk:
            index = self._index[layer][self._addresses(numbers, tables, rate)]
            numbers = numbers.gather(1, attention.select(inputs, positions, index, numbers))
        return self._gather(layer, self._addresses(numbers, tables, rate), numbers)

    def _gather(self, layer: int, addresses: Tensor, numbers: Tensor) -> CompressedKv:
        return CompressedKv(self._kv[layer][addresses], self._index[layer][addresses], numbers)

    def _read(self, layer: int, numbers: Tensor, blocks: Tensor, rate: int) -> CompressedKv:
        return self._gather(layer, self._addresses(numbers[None], blocks[None], rate)[0], numbers)

    def _write(self, layer: int, compressed: CompressedKv, blocks: Tensor, rate: int) -> None:
        addresses = self._addresses(compressed.numbers[None], blocks[None], rate)[0]
        self._kv[layer][addresses], self._index[layer][addresses] = compressed.kv, compressed.keys

    def _addresses(self, numbers: Tensor, tables: Tensor, rate: int) -> Tensor:
        """numbers int64 [B, E] of groups, tables [B, n] of blocks -> rows of the pages [B, E], any
        row for a group that ends after the table."""
        place = ((numbers + 1) * rate - 1) // self._block_size
        blocks = tables.long().gather(1, place.clamp(max=tables.shape[1] - 1))
        return blocks * self._rows(rate) + numbers - place * self._block_size // rate

    def _rows(self, rate: int) -> int:
        """Groups per block."""
        return -(-self._block_size // rate)

    def _span(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self._device)
