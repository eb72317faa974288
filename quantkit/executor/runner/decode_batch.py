"""The rows of a decode step, on the host and on the device.

Rows are kept from step to step, because most of what they say stays the same. On a device that
captures steps, the next step is also launched before the host knows the sampled tokens (async
decoding): nearly every sequence goes on, so the device starts the next forward pass over the same
sequences while the host reads tokens, finishes sequences, schedules and informs the other ranks.
The row of a sequence that ended is ignored. What such a pass writes to the cache is what would have
been written anyway, before a new owner of the blocks writes there. With drafts, the device knows
the accepted ones and the new ones, so their verification is launched, too.

The small index computations for this are one Triton launch each on a GPU (decode_batch_triton.py);
PyTorch takes about ten short ones.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from quantkit_kernels.backends import why_unusable
from torch import Tensor

from quantkit.common.devices import to_device
from quantkit.executor.cache.cache import PagedCache
from quantkit.executor.runner.attention_context import DecodeContext
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.models.ngram_table import read_by_ids


class DecodeRows(NamedTuple):
    """Inputs of a decode pass on the host: token_ids [B], positions [B], slots [B] int64 (where the
    tokens are written), tables [B, n] int32 (blocks); states int64 [B], places in the cache's
    per-sequence states, for models that have some. before int64 [B, n]: ids before each token, the
    last first, -1 where there are none, for models with n-gram tables."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    tables: np.ndarray
    states: np.ndarray = np.zeros(0, dtype=np.int64)
    before: np.ndarray = np.zeros((0, 0), dtype=np.int64)

    def padded(self, rows: int, width: int) -> "DecodeRows":
        """With padding rows, which belong to block 0, and tables of `width` blocks."""

        def pad(array: np.ndarray, *shape: int) -> np.ndarray:
            out = np.zeros(shape, dtype=array.dtype)
            out[tuple(map(slice, array.shape))] = array
            return out

        token_ids, positions, slots, states = (
            pad(one, rows) for one in (self.token_ids, self.positions, self.slots, self.states)
        )
        tables, before = pad(self.tables, rows, width), pad(self.before, rows, self.before.shape[1])
        return DecodeRows(token_ids, positions, slots, tables, states, before)

    def recent(self, count: int) -> Tensor:
        """As `ngram_table.recent_ids`, of the rows."""
        found = np.full((len(self.token_ids), count), -1, dtype=np.int64)
        found[:, 0] = self.token_ids
        known = self.before[:, : count - 1]
        found[: len(known), 1 : 1 + known.shape[1]] = known
        return torch.from_numpy(found)

    def context(
        self, cache: PagedCache, on_device: "DevicePositions | None" = None
    ) -> DecodeContext:
        arrays = (self.positions, self.tables, self.slots, self.states)
        positions, tables, slots, states = (
            torch.from_numpy(array).to(cache.device) for array in arrays
        )
        if on_device is not None:
            return DecodeContext(cache, on_device.positions, tables, on_device.slots, None, states)
        lengths: list[int] = (self.positions + 1).tolist()
        read = read_by_ids(self.recent, cache.device)
        return DecodeContext(cache, positions, tables, slots, lengths, states, read)


class DevicePositions(NamedTuple):
    """positions and slots int64 [B] of rows that the device knows before the host, in place of
    those of `DecodeRows`. Not for an NPU, whose operators want lengths on the host."""

    positions: Tensor
    slots: Tensor

    @classmethod
    def of(
        cls, positions: Tensor, tables: Tensor, block_size: int, limit: int
    ) -> "DevicePositions":
        """As `cache_slots`."""
        return cls(*cache_slots(positions, tables, block_size, limit))


class StepResult(NamedTuple):
    """hidden [B, H] after the final norm, logits float32 [B, vocab], greedy int64 [B]: the
    likeliest token of each row."""

    hidden: Tensor
    logits: Tensor
    greedy: Tensor

    def at(self, rows: list[int]) -> "StepResult":
        index = to_device(rows, self.hidden.device)
        return StepResult(*(part[index] for part in self))


class BlockTables:
    """Block tables as one array, reused while the same rows come again with the same blocks, or
    some more."""

    def __init__(self) -> None:
        self._array = np.zeros((0, 0), dtype=np.int32)
        self._written: list[tuple[list[int], int]] = []

    def of(self, blocks: list[list[int]]) -> np.ndarray:
        """[rows, most blocks of a row], valid until the next call. A list that is the same object
        as in the last call may only have grown."""
        shape = (len(blocks), max(map(len, blocks), default=0))
        if self._array.shape != shape:
            self._array = np.zeros(shape, dtype=np.int32)
            self._written = [([], 0)] * len(blocks)
        for row, (own, (written, count)) in enumerate(zip(blocks, self._written)):
            if own is not written or len(own) != count:
                self._array[row, : len(own)] = own
                self._array[row, len(own) :] = 0
                self._written[row] = (own, len(own))
        return self._array


class DecodeBatch:
    """Rows of a decode step without drafts, one per sequence. If the same sequences come again in
    the same blocks, each one token longer, only what has changed is written."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.sequences: list[Sequence] = []
        self._blocks: list[list[int]] = []
        """Each sequence's own list: it grows, and is another one after a preemption."""
        self._rows: DecodeRows | None = None
        self.counts: list[tuple[Sequence, int]] = []
        """(sequence, 1) for each; the same list while the sequences are the same."""

    def keep(self, sequences: list[Sequence], rows: DecodeRows) -> DecodeRows:
        """Copies the tables, whose memory is reused."""
        self.sequences, self._blocks = list(sequences), [one.blocks for one in sequences]
        self.counts = [(one, 1) for one in sequences]
        self._rows = rows._replace(tables=rows.tables.copy())
        return self._rows

    def next(self, sequences: list[Sequence], in_flight: int = 0) -> DecodeRows | None:
        """The rows, one token further; valid until the next call. None if they must be built anew
        and kept. in_flight: newest tokens of each sequence that only the device has; the rows'
        token ids are stale then."""
        if self._rows is None or sequences != self.sequences:
            return None
        last, positions, slots, tables, states, before = self._rows
        positions = positions + 1
        if [one.num_cached + in_flight for one in sequences] != positions.tolist() or [
            one.blocks for one in sequences
        ] != self._blocks:
            return None
        slots = slots + 1
        for row in np.flatnonzero(positions % self._block_size == 0).tolist():
            blocks = sequences[row].blocks
            if len(blocks) > tables.shape[1] or len(blocks) * self._block_size <= positions[row]:
                return None
            tables[row, : len(blocks)] = blocks
            slots[row] = blocks[positions[row] // self._block_size] * self._block_size
        token_ids = np.array([one.token_ids[-1] for one in sequences], dtype=np.int64)
        if before.size:
            before = np.column_stack((last, before[:, :-1]))
        self._rows = DecodeRows(token_ids, positions, slots, tables, states, before)
        return self._rows


class AsyncDecode(NamedTuple):
    """A decode pass in flight, one row per sequence; only the device has the token ids of
    `rows`."""

    sequences: list[Sequence]
    rows: DecodeRows
    result: StepResult

    def select(self, sequences: list[Sequence]) -> tuple[DecodeRows, StepResult]:
        """Of the sequences that went on, in their order, now that their tokens are known."""
        rows, result = self.rows, self.result
        if sequences != self.sequences:
            row_of = {sequence: row for row, sequence in enumerate(self.sequences)}
            kept = [row_of[sequence] for sequence in sequences]
            rows, result = DecodeRows(*(part[kept] for part in rows)), result.at(kept)
        return rows._replace(
            token_ids=np.array([one.token_ids[-1] for one in sequences], dtype=np.int64)
        ), result


class AsyncVerification(NamedTuple):
    """A verification pass in flight: the newest token of each sequence and its drafts, `each` rows
    per sequence; only the device has tokens and positions."""

    sequences: list[Sequence]
    each: int
    result: StepResult

    def select(self, sequences: list[Sequence]) -> StepResult:
        """Of the newest tokens and the drafts of the sequences that went on, in their order. A
        sequence's drafts are all drafts of this pass or the first of them."""
        first = {sequence: row * self.each for row, sequence in enumerate(self.sequences)}
        kept = [
            first[sequence] + i for sequence in sequences for i in range(1 + len(sequence.drafts))
        ]
        return self.result if kept == list(range(len(self.result.greedy))) else self.result.at(kept)


def accepted(table: Tensor, sampled: Tensor) -> Tensor:
    """table int64 [B, 2 + most]: of each sequence the row of its newest token, its length, and its
    drafts, padded with -1. sampled int64 [R]: the token sampled after each row. Returns the fields
    of `drafter.DeviceAcceptance`, int64 [3, B]."""
    if has_triton(sampled.device):
        from quantkit.executor.runner.decode_batch_triton import accepted as kernel

        return kernel(table, sampled)
    return accepted_in_torch(table, sampled)


def accepted_in_torch(table: Tensor, sampled: Tensor) -> Tensor:
    first, newest, drafts = table[:, 0], table[:, 1], table[:, 2:]
    rows = first[:, None] + torch.arange(drafts.shape[1], device=sampled.device)
    same = sampled[rows.clamp(max=len(sampled) - 1)] == drafts
    count = same.long().cumprod(dim=1).sum(dim=1)
    return torch.stack((count, first + count, newest + count))


def next_rows(table: Tensor, sampled: Tensor, drafted: Tensor, block_size: int) -> Tensor:
    """Token ids, positions and slots of the next verification pass, int64 [3, B * each]: the newest
    token of each sequence and its drafts.

    table int32 [B, 2 + n]: of each sequence the row of its newest token in the last pass, its
    length, and its blocks. sampled int64 [R]: the tokens sampled in that pass. drafted int64
    [each * B]: accepted drafts of each sequence, then the new drafts, one row of sequences after
    the other.
    """
    if has_triton(sampled.device):
        from quantkit.executor.runner.decode_batch_triton import next_rows as kernel

        return kernel(table, sampled, drafted, block_size)
    return next_rows_in_torch(table, sampled, drafted, block_size)


def next_rows_in_torch(table: Tensor, sampled: Tensor, drafted: Tensor, block_size: int) -> Tensor:
    number = len(table)
    each, (count, drafts) = len(drafted) // number, (drafted[:number], drafted[number:])
    tokens = torch.cat((sampled[table[:, 0] + count], drafts)).view(each, number).t()
    positions = (table[:, 1] + count)[:, None] + torch.arange(each, device=sampled.device)
    blocks = table[:, 2:].gather(1, positions // block_size).long()
    slots = blocks * block_size + positions % block_size
    return torch.stack((tokens, positions, slots)).view(3, -1)


def cache_slots(positions: Tensor, tables: Tensor, block_size: int, limit: int) -> Tensor:
    """Positions and slots, int64 [2, B], of positions int64 [B] in sequences with block tables
    int32 [B, n]. From `limit` on, or without a block, a row is padding: it is written to block 0
    and sees what the tables have."""
    if has_triton(positions.device):
        from quantkit.executor.runner.decode_batch_triton import cache_slots as kernel

        return kernel(positions, tables, block_size, limit)
    return cache_slots_in_torch(positions, tables, block_size, limit)


def cache_slots_in_torch(positions: Tensor, tables: Tensor, block_size: int, limit: int) -> Tensor:
    end = min(limit, tables.shape[1] * block_size)
    clamped = positions.clamp(max=end - 1)
    blocks = tables.gather(1, (clamped // block_size)[:, None])[:, 0].long()
    return torch.stack(
        (clamped, torch.where(positions < end, blocks, 0) * block_size + positions % block_size)
    )


@functools.cache
def has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and why_unusable("likeliest", "triton", device) is None
