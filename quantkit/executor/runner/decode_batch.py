"""Rows of a decode step without guesses, kept from step to step: most of what 64 users' rows say is
what it was in the step before."""

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


class BlockTables:
    """Block tables as arrays. What is written once is kept while the same rows come again with the
    same blocks, or some more."""

    def __init__(self) -> None:
        self._array = np.zeros((0, 0), dtype=np.int32)
        self._known: list[tuple[list[int], int]] = []

    def of(self, blocks: list[list[int]]) -> np.ndarray:
        """[rows, most blocks of a row], valid until the next call. A list that is the same object
        may only have grown."""
        shape = (len(blocks), max(map(len, blocks), default=0))
        if self._array.shape != shape:
            self._array, self._known = np.zeros(shape, dtype=np.int32), [([], 0)] * len(blocks)
        for row, (own, (known, count)) in enumerate(zip(blocks, self._known)):
            if own is not known or len(own) != count:
                self._array[row, : len(own)] = own
                self._array[row, len(own) :] = 0
                self._known[row] = (own, len(own))
        return self._array


class DecodeRows(NamedTuple):
    """One decode pass on the host: token_ids [B], positions [B], slots [B] int64, tables [B, n]
    int32; states int64 [B], the sequences' places in the cache's states, for models that have
    some."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    tables: np.ndarray
    states: np.ndarray = np.zeros(0, dtype=np.int64)

    def padded(self, rows: int, width: int) -> "DecodeRows":
        """With more rows, which are nobody's and belong to block 0, and tables of `width`
        blocks."""

        def wider(array: np.ndarray, *shape: int) -> np.ndarray:
            out = np.zeros(shape, dtype=array.dtype)
            out[tuple(map(slice, array.shape))] = array
            return out

        token_ids, positions, slots, states = (
            wider(one, rows) for one in (self.token_ids, self.positions, self.slots, self.states)
        )
        return DecodeRows(token_ids, positions, slots, wider(self.tables, rows, width), states)

    def context(self, cache: PagedCache, places: "DevicePositions | None" = None) -> DecodeContext:
        arrays = (self.positions, self.tables, self.slots, self.states)
        positions, tables, slots, states = (
            torch.from_numpy(array).to(cache.device) for array in arrays
        )
        if places is not None:
            return DecodeContext(cache, places.positions, tables, places.slots, None, states)
        return DecodeContext(cache, positions, tables, slots, self.lengths, states)

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row attends to."""
        known: list[int] = (self.positions + 1).tolist()
        return known


class DevicePositions(NamedTuple):
    """positions and slots int64 [B] of rows, where the device knows them before the host does:
    instead of those of `DecodeRows`. Not for an NPU, whose operators want lengths on the host."""

    positions: Tensor
    slots: Tensor

    @classmethod
    def of(cls, places: Tensor, tables: Tensor, block_size: int, reach: int) -> "DevicePositions":
        """As `device_rows.cache_places`."""
        return cls(*cache_places(places, tables, block_size, reach))


class StepResult(NamedTuple):
    """hidden [B, H] after the final norm, logits float32 [B, vocab], greedy int64 [B]: the
    likeliest token of each row."""

    hidden: Tensor
    logits: Tensor
    greedy: Tensor

    def at(self, rows: list[int]) -> "StepResult":
        """Of these rows."""
        on_device = to_device(rows, self.hidden.device)
        return StepResult(*(part[on_device] for part in self))


class DecodeBatch:
    """One row a sequence. Where the same sequences come again in the same blocks, each a token
    further, only what has changed is written anew."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self.answers: list[Sequence] = []
        self._blocks: list[list[int]] = []
        """Of each, as the sequence itself has them: the list grows, and is another one once the
        sequence was computed again elsewhere."""
        self._rows: DecodeRows | None = None
        self.counts: list[tuple[Sequence, int]] = []
        """The sequences, each with its one row; the same list while they are the same."""

    def keep(self, answers: list[Sequence], rows: DecodeRows) -> DecodeRows:
        """As they are in the tables' own memory."""
        self.answers, self._blocks = list(answers), [one.blocks for one in answers]
        self.counts = [(one, 1) for one in answers]
        self._rows = rows._replace(tables=rows.tables.copy())
        return self._rows

    def next(self, answers: list[Sequence], unread: int = 0) -> DecodeRows | None:
        """Valid until the next call; None where the rows are to be made anew, and kept. unread:
        newest tokens of each that the device has and the sequence has not; the rows' tokens are
        then not known."""
        if self._rows is None or answers != self.answers:
            return None
        _, before, slots, tables, states = self._rows
        positions = before + 1
        if [one.num_cached + unread for one in answers] != positions.tolist() or [
            one.blocks for one in answers
        ] != self._blocks:
            return None
        slots = slots + 1
        for row in np.flatnonzero(positions % self._size == 0).tolist():
            blocks = answers[row].blocks
            if len(blocks) > tables.shape[1] or len(blocks) * self._size <= positions[row]:
                return None
            tables[row, : len(blocks)] = blocks
            slots[row] = blocks[positions[row] // self._size] * self._size
        token_ids = np.array([one.token_ids[-1] for one in answers], dtype=np.int64)
        self._rows = DecodeRows(token_ids, positions, slots, tables, states)
        return self._rows


class AsyncDecode(NamedTuple):
    """answers: whose newest tokens it computes, a row each; the tokens of `rows` are the device's
    alone."""

    answers: list[Sequence]
    rows: DecodeRows
    result: StepResult

    def of(self, answers: list[Sequence]) -> tuple[DecodeRows, StepResult]:
        """Of those of its answers that went on, in their order, now that their tokens are known."""
        rows, result = self.rows, self.result
        if answers != self.answers:
            row_of = {sequence: row for row, sequence in enumerate(self.answers)}
            kept = [row_of[sequence] for sequence in answers]
            rows, result = DecodeRows(*(part[kept] for part in rows)), result.at(kept)
        return rows._replace(
            token_ids=np.array([one.token_ids[-1] for one in answers], dtype=np.int64)
        ), result


class AsyncVerification(NamedTuple):
    """answers: whose newest tokens it computes, and the guesses behind them, `each` rows of
    everyone; tokens and places are the device's alone."""

    answers: list[Sequence]
    each: int
    result: StepResult

    def of(self, answers: list[Sequence]) -> StepResult:
        """Of the newest tokens and the drafts of those of its answers that went on, in their order:
        a sequence's drafts are guesses of this pass, or the first of them."""
        first = {sequence: row * self.each for row, sequence in enumerate(self.answers)}
        kept = [
            first[sequence] + i for sequence in answers for i in range(1 + len(sequence.drafts))
        ]
        return self.result if kept == list(range(len(self.result.greedy))) else self.result.at(kept)


def accepted(known: Tensor, chosen: Tensor) -> Tensor:
    """known int64 [B, 2 + most]: of each sequence the row of its newest token, how many tokens it
    has, and its guesses, -1 where there is none -> the three of `accepted.Accepted`, int64 [3,
    B]."""
    if by_kernel(chosen.device):
        from quantkit.executor.runner.decode_batch_triton import accepted as launched

        return launched(known, chosen)
    return accepted_by_operators(known, chosen)


def accepted_by_operators(known: Tensor, chosen: Tensor) -> Tensor:
    first, newest, guesses = known[:, 0], known[:, 1], known[:, 2:]
    behind = first[:, None] + torch.arange(guesses.shape[1], device=chosen.device)
    same = chosen[behind.clamp(max=len(chosen) - 1)] == guesses
    right = same.long().cumprod(dim=1).sum(dim=1)
    return torch.stack((right, first + right, newest + right))


def next_rows(known: Tensor, chosen: Tensor, guessed: Tensor, block_size: int) -> Tensor:
    """Token ids, places in their sequences and slots of the pass behind: int64 [3, B * each], every
    sequence's newest token and the new guesses behind it.

    known int32 [B, 2 + n]: of each sequence the row of its newest token in the pass that was, how
    many tokens it had, and its blocks.
    chosen int64 [R]: the tokens chosen in that pass. guessed int64 [each * B]: how many guesses
    were right, then the new ones, one row of sequences after the other.
    """
    if by_kernel(chosen.device):
        from quantkit.executor.runner.decode_batch_triton import next_rows as launched

        return launched(known, chosen, guessed, block_size)
    return next_rows_by_operators(known, chosen, guessed, block_size)


def next_rows_by_operators(
    known: Tensor, chosen: Tensor, guessed: Tensor, block_size: int
) -> Tensor:
    number = len(known)
    each, (right, guesses) = len(guessed) // number, (guessed[:number], guessed[number:])
    tokens = torch.cat((chosen[known[:, 0] + right], guesses)).view(each, number).t()
    places = (known[:, 1] + right)[:, None] + torch.arange(each, device=chosen.device)
    slots = known[:, 2:].gather(1, places // block_size).long() * block_size + places % block_size
    return torch.stack((tokens, places, slots)).view(3, -1)


def cache_places(places: Tensor, tables: Tensor, block_size: int, reach: int) -> Tensor:
    """Positions and slots, int64 [2, B], of places int64 [B] in sequences whose blocks are in
    tables int32 [B, n]. Those from `reach` on, and those without a block, are nobody's: they lie in
    block 0, and see what the tables have."""
    if by_kernel(places.device):
        from quantkit.executor.runner.decode_batch_triton import cache_places as launched

        return launched(places, tables, block_size, reach)
    return cache_places_by_operators(places, tables, block_size, reach)


def cache_places_by_operators(
    places: Tensor, tables: Tensor, block_size: int, reach: int
) -> Tensor:
    end = min(reach, tables.shape[1] * block_size)
    within = places.clamp(max=end - 1)
    found = tables.gather(1, (within // block_size)[:, None])[:, 0].long()
    return torch.stack(
        (within, torch.where(places < end, found, 0) * block_size + places % block_size)
    )


@functools.cache
def by_kernel(device: torch.device) -> bool:
    """Whether Triton runs on this device."""
    return device.type == "cuda" and why_unusable("likeliest", "triton", device) is None
