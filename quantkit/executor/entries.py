"""What compressed attention keeps (models/compressed.py): pages of entries, and of each running sequence its last tokens.

An entry of a group of tokens lies in the block of the group's last token, so pages are as many as the blocks of other models' caches. A
sequence's last tokens lie in a ring, at their position modulo its length. There are two of each: a chunk of a prompt reads one and writes
the other, with the number of tokens that it is of, so that it may be computed again; a step writes its token where that already stands when
the step is computed again. Place 0 and block 0 belong to nobody: padding rows of a captured batch write there.
"""

import torch
from torch import Tensor

from quantkit.models.architecture import CompressedCache, KeyValueCache, LatentCache
from quantkit.models.compressed import CompressedAttention, CompressedInputs, Entries, new_entries


class CompressedEntries:
    """Of one model, for `places` sequences; dtype: the compute dtype."""

    def __init__(
        self, sizes: CompressedCache, num_blocks: int, block_size: int, places: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._sizes, self._block_size, self._device = sizes, block_size, device
        self._kv: list[Tensor] = []
        self._index: list[Tensor] = []
        self._recent: list[Tensor] = []
        self._raw: list[Tensor] = []
        for rate, selects in sizes.rates:
            rows = num_blocks * self._rows(rate) if rate else 0
            values, reach = sizes.raw_width(selects) if rate else 0, (2 * rate if selects else rate)
            self._kv.append(torch.zeros(rows, sizes.head_dim, dtype=dtype, device=device))
            self._index.append(torch.zeros(rows, sizes.index_dim if selects else 0, dtype=dtype, device=device))
            self._recent.append(torch.zeros(2, places + 1, sizes.window, sizes.head_dim, dtype=dtype, device=device))
            self._raw.append(torch.zeros(2, places + 1, reach, values, dtype=dtype, device=device))
        self._ends = torch.full((len(sizes.rates), 2, places + 1), -1, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        held = (*self._kv, *self._index, *self._recent, *self._raw, self._ends)
        return sum(one.numel() * one.element_size() for one in held)

    def attend_chunk(
        self, layer: int, inputs: CompressedInputs, attention: CompressedAttention, start: int, blocks: Tensor, place: int
    ) -> Tensor:
        """The tokens start .. of a sequence, whose blocks these are -> [T, heads, head_dim]."""
        stop, rate, recent, raw = start + len(inputs.kv), attention.rate, self._recent[layer], self._raw[layer]
        ends = self._ends[layer, :, place]
        which = (ends[1] == start).long()
        first = max(0, start - attention.window + 1)
        kv = torch.cat((recent[which, place, self._span(first, start) % attention.window], inputs.kv))
        begin, entries = start, new_entries(inputs.raw, start, 0, 0, attention)
        if attention.pooling is not None:
            reach = attention.pooling.reach
            begin = max(0, (start // rate + 1) * rate - reach)
            seen = torch.cat((raw[which, place, self._span(begin, start) % reach], inputs.raw))
            self._keep(layer, new_entries(seen, begin, start, stop, attention), blocks, rate)
            entries = self._read(layer, self._span(0, stop // rate), blocks, rate)
            kept = self._span(max(begin, stop - reach), stop)
            raw[1 - which, place, kept % reach] = seen[kept - begin]
        out = attention.attended(inputs, self._span(start, stop), kv, self._span(first, stop), entries)
        kept = self._span(max(first, stop - attention.window), stop)
        recent[1 - which, place, kept % attention.window] = kv[kept - first]
        if start == 0:
            ends.fill_(-1)  # of another sequence
        ends[1 - which] = stop
        return out

    def attend_rows(
        self,
        layer: int,
        inputs: CompressedInputs,
        attention: CompressedAttention,
        positions: Tensor,
        tables: Tensor,
        places: Tensor,
    ) -> Tensor:
        """One token of each of several sequences, at positions [B], with block tables [B, n] and places [B] -> [B, heads, head_dim]."""
        window, rate, recent, raw = attention.window, attention.rate, self._recent[layer], self._raw[layer]
        which = self._newest(layer, places, positions)
        recent[which, places, positions % window] = inputs.kv
        at = positions[:, None] - torch.arange(window - 1, -1, -1, device=self._device)
        kv = recent[which[:, None], places[:, None], at % window]
        entries = Entries(kv[:, :0], kv[:, :0], at[:, :0])
        if attention.pooling is not None:
            reach, numbers = attention.pooling.reach, positions // rate
            raw[which, places, positions % reach] = inputs.raw
            tokens = (numbers[:, None] + 1) * rate - reach + torch.arange(reach, device=self._device)
            made = attention.pooled(raw[which[:, None], places[:, None], tokens % reach], numbers)
            address = self._addresses(numbers[:, None], tables, rate)[:, 0].where((positions + 1) % rate == 0, 0)
            self._kv[layer][address], self._index[layer][address] = made.kv, made.keys
            entries = self._seen(layer, inputs, attention, positions, tables)
        self._ends[layer, which, places] = positions + 1
        return attention.attended(inputs, positions, kv, at, entries)

    def _newest(self, layer: int, places: Tensor, positions: Tensor) -> Tensor:
        """Which of the two holds the tokens before these positions: the one that ends there, or after this very token."""
        ends = self._ends[layer][:, places]
        fits = (ends == positions) | (ends == positions + 1)
        return (fits[1] & ~(fits[0] & (ends[0] > ends[1]))).long()

    def _seen(self, layer: int, inputs: CompressedInputs, attention: CompressedAttention, positions: Tensor, tables: Tensor) -> Entries:
        """The entries of all rows; where there are more than are seen of each, the chosen ones."""
        rate = attention.rate
        numbers = torch.arange(tables.shape[1] * self._block_size // rate, device=self._device).expand(len(positions), -1)
        if attention.index_pooling is not None and numbers.shape[1] > attention.topk:
            index = self._index[layer][self._addresses(numbers, tables, rate)]
            numbers = numbers.gather(1, attention.chosen(inputs, positions, index, numbers))
        return self._entries_at(layer, self._addresses(numbers, tables, rate), numbers)

    def _entries_at(self, layer: int, addresses: Tensor, numbers: Tensor) -> Entries:
        return Entries(self._kv[layer][addresses], self._index[layer][addresses], numbers)

    def _read(self, layer: int, numbers: Tensor, blocks: Tensor, rate: int) -> Entries:
        return self._entries_at(layer, self._addresses(numbers[None], blocks[None], rate)[0], numbers)

    def _keep(self, layer: int, entries: Entries, blocks: Tensor, rate: int) -> None:
        addresses = self._addresses(entries.numbers[None], blocks[None], rate)[0]
        self._kv[layer][addresses], self._index[layer][addresses] = entries.kv, entries.keys

    def _addresses(self, numbers: Tensor, tables: Tensor, rate: int) -> Tensor:
        """numbers int64 [B, E] of groups, tables [B, n] of blocks -> rows of the pages [B, E], any row for a group
        that ends behind the table."""
        place = ((numbers + 1) * rate - 1) // self._block_size
        blocks = tables.long().gather(1, place.clamp(max=tables.shape[1] - 1))
        return blocks * self._rows(rate) + numbers - place * self._block_size // rate

    def _rows(self, rate: int) -> int:
        """Entries that may lie in one block."""
        return -(-self._block_size // rate)

    def _span(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self._device)


def recent_bytes(cache: CompressedCache | LatentCache | KeyValueCache, places: int, dtype: torch.dtype) -> int:
    """What `CompressedEntries` will hold of the last tokens of sequences; 0 for a model without."""
    return (places + 1) * cache.held_values * dtype.itemsize if isinstance(cache, CompressedCache) else 0
