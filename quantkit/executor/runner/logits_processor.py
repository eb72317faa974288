"""Logits processors: biases, penalties, a minimum length and grammars, applied before sampling.

Every row is processed for the tokens before it, drafts included, so that sampled tokens with drafts
are those without. A row after a rejected draft does not matter: its token is not kept. Token counts
of each request are kept on the device, where each step adds its tokens; all rows are processed
together. Grammar masks are written by a thread while the step runs, and copied to the device once.
"""

import os
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.common.devices import to_device
from quantkit.executor.scheduler.sequence import Sequence

_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))


class LogitsProcessor:
    """For one engine's requests, over `vocab` tokens. Memory: 9 bytes per token id for each request
    with biases or penalties."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._vocab, self._device = vocab, device
        self._slots: dict[Sequence, int] = {}
        self._num_counted: list[int] = []
        """By slot: tokens of its sequence that the tables contain."""
        self._output_counts = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._seen = torch.zeros(0, vocab, dtype=torch.bool, device=device)
        """Token ids of prompt and output."""
        self._bias = torch.zeros(0, vocab, device=device)

    def process(
        self,
        logits: Tensor,
        counts: Items[tuple[Sequence, int]],
        eos_ids: frozenset[int],
        first_masks: dict[Sequence, int],
        allowed: Tensor | None,
    ) -> Tensor:
        """logits float32 [R, V] of sequences with so many consecutive rows each; returned as they
        are if no request alters them. first_masks, allowed: as `GrammarMasks.result`. Rows of a
        sequence with a fault are not masked.
        """
        penalized: list[tuple[Sequence, int, int]] = []
        too_early: list[tuple[int, int]] = []
        masked: list[tuple[int, int]] = []
        row = 0
        for sequence, count in counts:
            if sequence.alters_logits:
                penalized.append((sequence, row, count))
            if sequence.params.min_new_tokens:
                too_early += _early_ends(sequence, row, count, eos_ids)
            if allowed is not None and sequence in first_masks and sequence.fault is None:
                masked += [(row + i, first_masks[sequence] + i) for i in range(count)]
            row += count
        if not (penalized or too_early or masked):
            return logits
        processed = logits.clone()
        if penalized:
            self._penalize(processed, penalized)
        if too_early:
            rows, tokens = to_device(too_early, self._device).T
            processed[rows, tokens] = float("-inf")
        if masked:
            rows, masks = to_device(masked, self._device).T
            assert allowed is not None, "rows are masked by it"
            processed[rows] = processed[rows].masked_fill_(~allowed[masks], float("-inf"))
        return processed

    def _penalize(self, logits: Tensor, penalized: list[tuple[Sequence, int, int]]) -> None:
        """Biases and penalties, in place: the repetition penalty over prompt and output, then
        presence and frequency penalties over the output. penalized: (sequence, first row,
        rows)."""
        self._count([sequence for sequence, _, _ in penalized])
        places: list[tuple[int, int]] = []
        penalties: list[tuple[float, float, float]] = []
        drafts: list[tuple[int, int]] = []
        for sequence, first, count in penalized:
            params = sequence.params
            drafts += [
                (len(places) + i, draft) for i in range(1, count) for draft in sequence.drafts[:i]
            ]
            places += [(row, self._slots[sequence]) for row in range(first, first + count)]
            penalties += [
                (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            ] * count
        rows, slots = to_device(places, self._device).T
        repetition, presence, frequency = to_device(penalties, self._device).T.unsqueeze(-1)
        values = logits[rows] + self._bias[slots]
        outputs, seen = self._output_counts[slots], self._seen[slots]
        if drafts:
            of_row, tokens = to_device(drafts, self._device).T
            outputs.index_put_((of_row, tokens), outputs.new_ones(()), accumulate=True)
            seen[of_row, tokens] = True
        values = torch.where(
            seen, torch.where(values > 0, values / repetition, values * repetition), values
        )
        logits[rows] = values - torch.where(outputs > 0, presence + frequency * outputs, 0.0)

    def _count(self, sequences: list[Sequence]) -> None:
        """Add the tokens that are new since the last step to the tables."""
        new: list[int] = []
        for sequence in sequences:
            slot = self._slots.get(sequence)
            if slot is None:
                slot = self._new_slot(sequence)
            new += [
                slot * self._vocab + token
                for token in sequence.token_ids[self._num_counted[slot] :]
            ]
            self._num_counted[slot] = len(sequence.token_ids)
        if new:
            at = to_device(new, self._device)
            self._output_counts.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))
            self._seen.view(-1)[at] = True

    def _new_slot(self, sequence: Sequence) -> int:
        """A slot with the sequence's prompt and biases; frees those of finished sequences."""
        self._slots = {one: slot for one, slot in self._slots.items() if one.finish_reason is None}
        used = set(self._slots.values())
        slot = next(number for number in range(len(used) + 1) if number not in used)
        if slot == len(self._output_counts):
            more = max(4, slot)
            self._output_counts, self._seen, self._bias = (
                torch.cat((table, table.new_zeros(more, self._vocab)))
                for table in (self._output_counts, self._seen, self._bias)
            )
            self._num_counted += [0] * more
        self._slots[sequence], self._num_counted[slot] = slot, sequence.prompt_len
        for table in (self._output_counts, self._seen, self._bias):
            table[slot].zero_()
        self._seen[slot, to_device(sequence.token_ids[: sequence.prompt_len], self._device)] = True
        if sequence.params.logit_bias:
            ids, values = zip(*sequence.params.logit_bias)
            self._bias[slot].index_add_(
                0, to_device(ids, self._device), to_device(values, self._device)
            )
        return slot


def _early_ends(
    sequence: Sequence, row: int, count: int, eos_ids: frozenset[int]
) -> list[tuple[int, int]]:
    """(row, token) of tokens that would end the output before min_new_tokens."""
    missing = sequence.params.min_new_tokens - (len(sequence.token_ids) - sequence.prompt_len)
    ends = eos_ids | set(sequence.params.stop_token_ids)
    return [(row + i, token) for i in range(min(missing, count)) for token in ends]


_Masks = tuple[dict[Sequence, int], np.ndarray | None]
"""The first mask row of each sequence, and the bits int32 [rows, words]."""


class GrammarMasks:
    """Masks of the steps of one engine. Its thread starts with the first request that has a
    grammar."""

    def __init__(self) -> None:
        self._worker: ThreadPoolExecutor | None = None
        self._executor: Any = None
        self._future: Future[_Masks] | None = None

    def start(self, counts: Items[tuple[Sequence, int]]) -> None:
        """Write the masks of sequences, with so many rows each, in the background. Drops a result
        that was not taken."""
        self._wait()
        guided = [
            (sequence, count)
            for sequence, count in counts
            if sequence.guide is not None and sequence.fault is None
        ]
        if guided:
            self._worker = self._worker or ThreadPoolExecutor(1, "quantkit-masks")
            self._future = self._worker.submit(self._write, guided)

    def result(self, device: torch.device, vocab: int) -> tuple[dict[Sequence, int], Tensor | None]:
        """The first mask row of each sequence, and the allowed tokens bool [rows, vocab]; None
        without grammars."""
        first_masks, bits = self._wait()
        if bits is None:
            return {}, None
        packed = torch.from_numpy(bits)
        if device.type == "cuda":
            # 32 rows are half a megabyte, and a copy from pageable memory waits for all launches
            # before it.
            packed = packed.pin_memory()
        packed = packed.to(device, non_blocking=device.type == "cuda")
        allowed = (
            packed.unsqueeze(-1)
            .bitwise_right_shift(torch.arange(32, dtype=torch.int32, device=device))
            .bitwise_and_(1)
        )
        return first_masks, allowed.flatten(1)[:, :vocab].bool()

    def _wait(self) -> _Masks:
        future, self._future = self._future, None
        return ({}, None) if future is None else future.result()

    def _write(self, guided: list[tuple[Sequence, int]]) -> _Masks:
        first_masks: dict[Sequence, int] = {}
        rows = 0
        for sequence, count in guided:
            first_masks[sequence] = rows
            rows += count
        guides = [sequence.guide for sequence in first_masks if sequence.guide is not None]
        self._executor = self._executor or guides[0].new_executor(_THREADS)
        bits = np.full((rows, max(guide.words for guide in guides)), -1, dtype=np.int32)
        for sequence, first in first_masks.items():
            assert sequence.guide is not None, sequence.index
            try:
                sequence.guide.write(self._executor, bits, first, sequence.drafts)
            except Exception as fault:  # of this request alone, which ends for it
                sequence.fault = fault
        return first_masks, bits
