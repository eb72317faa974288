"""What compressed attention keeps (models/compressed_attention.py): pages of entries, and of each
running sequence its last tokens (recent.py).

An entry of a group of tokens lies in the block of the group's last token, so pages are as many as
the blocks of other models' caches. An entry of tokens that were guessed wrong is written again
before a token sees it. Block 0 belongs to nobody: padding rows of a captured batch write there.
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
    """Of one model, for `places` sequences; dtype: the compute dtype; ahead: as `RotatingCache` has
    it."""

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
        self._recent = RotatingCache(sizes.window_shapes(), ahead, places, dtype, device)

    @property
    def nbytes(self) -> int:
        return self._recent.nbytes + sum(one.nbytes for one in (*self._kv, *self._index))

    def attend_chunk(
        self,
        layer: int,
        inputs: CompressedInputs,
        attention: CompressedAttention,
        start: int,
        blocks: Tensor,
        place: int,
    ) -> Tensor:
        """The tokens start .. of a sequence, whose blocks these are -> [T, heads, head_dim]."""
        stop, rate = start + len(inputs.kv), attention.rate
        first = max(0, start - attention.window + 1)
        kv = self._recent.chunk(buffer_index(layer, 0), place, first, start, inputs.kv)
        entries = compress_groups(inputs.raw, start, 0, 0, attention)
        if attention.pooling is not None:
            begin = max(0, (start // rate + 1) * rate - attention.pooling.reach)
            seen = self._recent.chunk(buffer_index(layer, 1), place, begin, start, inputs.raw)
            self._keep(layer, compress_groups(seen, begin, start, stop, attention), blocks, rate)
            entries = self._read(layer, self._span(0, stop // rate), blocks, rate)
        return attention.attend(
            inputs, self._span(start, stop), kv, self._span(first, stop), entries
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
        """Tokens at positions [B] of several sequences, with block tables [B, n] and places [B];
        those of one sequence have rising positions -> [B, heads, head_dim]."""
        window, rate = attention.window, attention.rate
        kv = self._recent.rows(buffer_index(layer, 0), places, positions, inputs.kv, window)
        at = positions[:, None] - torch.arange(window - 1, -1, -1, device=self._device)
        entries = CompressedKv(kv[:, :0], kv[:, :0], at[:, :0])
        if attention.pooling is not None:
            seen = self._recent.rows(
                buffer_index(layer, 1), places, positions, inputs.raw, attention.pooling.reach
            )
            numbers = positions // rate
            made = attention.compress(seen, numbers)  # of a group that ends here; else nobody's
            address = self._addresses(numbers[:, None], tables, rate)[:, 0].where(
                (positions + 1) % rate == 0, 0
            )
            self._kv[layer][address], self._index[layer][address] = made.kv, made.keys
            entries = self._seen(layer, inputs, attention, positions, tables)
        return attention.attend(inputs, positions, kv, at, entries)

    def _seen(
        self,
        layer: int,
        inputs: CompressedInputs,
        attention: CompressedAttention,
        positions: Tensor,
        tables: Tensor,
    ) -> CompressedKv:
        """The entries of all rows; where there are more than are seen of each, the chosen ones."""
        rate = attention.rate
        numbers = torch.arange(
            tables.shape[1] * self._block_size // rate, device=self._device
        ).expand(len(positions), -1)
        if attention.index_pooling is not None and numbers.shape[1] > attention.topk:
            index = self._index[layer][self._addresses(numbers, tables, rate)]
            numbers = numbers.gather(1, attention.select(inputs, positions, index, numbers))
        return self._entries_at(layer, self._addresses(numbers, tables, rate), numbers)

    def _entries_at(self, layer: int, addresses: Tensor, numbers: Tensor) -> CompressedKv:
        return CompressedKv(self._kv[layer][addresses], self._index[layer][addresses], numbers)

    def _read(self, layer: int, numbers: Tensor, blocks: Tensor, rate: int) -> CompressedKv:
        return self._entries_at(
            layer, self._addresses(numbers[None], blocks[None], rate)[0], numbers
        )

    def _keep(self, layer: int, entries: CompressedKv, blocks: Tensor, rate: int) -> None:
        addresses = self._addresses(entries.numbers[None], blocks[None], rate)[0]
        self._kv[layer][addresses], self._index[layer][addresses] = entries.kv, entries.keys

    def _addresses(self, numbers: Tensor, tables: Tensor, rate: int) -> Tensor:
        """numbers int64 [B, E] of groups, tables [B, n] of blocks -> rows of the pages [B, E], any
        row for a group that ends behind the table."""
        place = ((numbers + 1) * rate - 1) // self._block_size
        blocks = tables.long().gather(1, place.clamp(max=tables.shape[1] - 1))
        return blocks * self._rows(rate) + numbers - place * self._block_size // rate

    def _rows(self, rate: int) -> int:
        """CompressedKv that may lie in one block."""
        return -(-self._block_size // rate)

    def _span(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self._device)
