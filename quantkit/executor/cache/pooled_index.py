"""Cache of pooled index keys (models/pooled_index.py): pages of keys, one for a group of tokens, and
the inputs of the last group of each running sequence (sequence_state.py)."""

from collections.abc import Iterable

import torch
from quantkit_kernels import EntryPages, RecentTokens
from torch import Tensor

from quantkit.executor.cache.sequence_state import RotatingCache
from quantkit.models.pooled_index import IndexPooling, PooledInputs


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
