"""What requests ask of the logits before a token is chosen: biases, penalties, no early end, a
grammar.

Every row is adjusted for the tokens before it, drafts included, so that the tokens with drafts are
those without. A row behind a wrong draft is adjusted for nothing that counts: its token is not
kept. What a request said so far is counted on the device, where each step adds its tokens; all rows
are adjusted together.
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


class LogitsProcessor:
    """Of one engine's requests, over `vocab` tokens. Memory: 9 bytes by token for each request with
    biases or penalties."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._vocab, self._device = vocab, device
        self._slots: dict[Sequence, int] = {}
        self._counted: list[int] = []
        """Of each slot's sequence, how many tokens `_times` and `_said` know."""
        self._times = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._said = torch.zeros(0, vocab, dtype=torch.bool, device=device)
        self._bias = torch.zeros(0, vocab, device=device)

    def adjust(
        self,
        logits: Tensor,
        counts: Items[tuple[Sequence, int]],
        eos_ids: frozenset[int],
        first_masks: dict[Sequence, int],
        allowed: Tensor | None,
    ) -> Tensor:
        """logits float32 [R, V] of sequences with so many rows each, one behind the other. The same
        object where nobody asks for anything.

        first_masks, allowed: as `masks.Masks.finished` gives them. A sequence with a fault keeps
        its rows as they are.
        """
        asking: list[tuple[Sequence, int, int]] = []
        early: list[tuple[int, int]] = []
        masked: list[tuple[int, int]] = []
        row = 0
        for sequence, count in counts:
            if sequence.alters_logits:
                asking.append((sequence, row, count))
            if sequence.params.min_new_tokens:
                early += _early(sequence, row, count, eos_ids)
            if allowed is not None and sequence in first_masks and sequence.fault is None:
                masked += [(row + i, first_masks[sequence] + i) for i in range(count)]
            row += count
        if not (asking or early or masked):
            return logits
        adjusted = logits.clone()
        if asking:
            self._penalize(adjusted, asking)
        if early:
            rows, tokens = to_device(early, self._device).T
            adjusted[rows, tokens] = float("-inf")
        if masked:
            rows, masks = to_device(masked, self._device).T
            assert allowed is not None, "rows are masked by it"
            adjusted[rows] = adjusted[rows].masked_fill_(~allowed[masks], float("-inf"))
        return adjusted

    def _penalize(self, adjusted: Tensor, asking: list[tuple[Sequence, int, int]]) -> None:
        """Biases and penalties, in place: the repetition penalty over prompt and answer, then the
        others over the answer."""
        self._count([sequence for sequence, _, _ in asking])
        places: list[tuple[int, int]] = []
        asked: list[tuple[float, float, float]] = []
        drafted: list[tuple[int, int]] = []
        for sequence, first, count in asking:
            params = sequence.params
            drafted += [
                (len(places) + i, draft) for i in range(1, count) for draft in sequence.drafts[:i]
            ]
            places += [(row, self._slots[sequence]) for row in range(first, first + count)]
            asked += [
                (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            ] * count
        rows, slots = to_device(places, self._device).T
        repetition, presence, frequency = to_device(asked, self._device).T.unsqueeze(-1)
        values, times, said = (
            adjusted[rows] + self._bias[slots],
            self._times[slots],
            self._said[slots],
        )
        if drafted:
            of_row, tokens = to_device(drafted, self._device).T
            times.index_put_((of_row, tokens), times.new_ones(()), accumulate=True)
            said[of_row, tokens] = True
        values = torch.where(
            said, torch.where(values > 0, values / repetition, values * repetition), values
        )
        adjusted[rows] = values - torch.where(times > 0, presence + frequency * times, 0.0)

    def _count(self, sequences: list[Sequence]) -> None:
        """Take over the tokens that are new since the last step."""
        new: list[int] = []
        for sequence in sequences:
            slot = self._slots.get(sequence)
            if slot is None:
                slot = self._begin(sequence)
            known = self._counted[slot]
            new += [slot * self._vocab + token for token in sequence.token_ids[known:]]
            self._counted[slot] = len(sequence.token_ids)
        if new:
            places = to_device(new, self._device)
            self._times.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
            self._said.view(-1)[places] = True

    def _begin(self, sequence: Sequence) -> int:
        """A slot for a sequence, which knows its prompt and its biases; of sequences that have
        finished, the slots are free."""
        self._slots = {one: slot for one, slot in self._slots.items() if one.finish_reason is None}
        slot = next(
            number
            for number in range(len(self._slots) + 1)
            if number not in set(self._slots.values())
        )
        if slot == len(self._times):
            self._grow()
        self._slots[sequence], self._counted[slot] = slot, sequence.prompt_len
        for table in (self._times, self._said, self._bias):
            table[slot].zero_()
        self._said[slot, to_device(sequence.token_ids[: sequence.prompt_len], self._device)] = True
        if sequence.params.logit_bias:
            ids, values = zip(*sequence.params.logit_bias)
            self._bias[slot].index_add_(
                0, to_device(ids, self._device), to_device(values, self._device)
            )
        return slot

    def _grow(self) -> None:
        more = max(4, len(self._times))
        self._times, self._said, self._bias = (
            torch.cat((table, table.new_zeros(more, self._vocab)))
            for table in (self._times, self._said, self._bias)
        )
        self._counted += [0] * more


def _early(
    sequence: Sequence, row: int, count: int, eos_ids: frozenset[int]
) -> list[tuple[int, int]]:
    """Rows and tokens that would end an answer before its time."""
    too_short = sequence.params.min_new_tokens - (len(sequence.token_ids) - sequence.prompt_len)
    ends = eos_ids | set(sequence.params.stop_token_ids)
    return [(row + i, token) for i in range(min(too_short, count)) for token in ends]


_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))

Asked = list[tuple[Sequence, int]]
"""Sequences with a grammar, and the first of their rows among the masks."""


class GrammarMasks:
    """Of the steps of one engine. Nothing is started before the first request with a grammar
    comes."""

    def __init__(self) -> None:
        self._worker: ThreadPoolExecutor | None = None
        self._executor: Any = None
        self._begun: Future[tuple[Asked, np.ndarray | None]] | None = None

    def begin(self, counts: Items[tuple[Sequence, int]]) -> None:
        """Write the masks of sequences, with how many rows each, beside what is computed now. What
        was begun before is dropped."""
        self._finished()
        guided = [
            (sequence, count)
            for sequence, count in counts
            if sequence.guide is not None and sequence.fault is None
        ]
        if guided:
            self._worker = self._worker or ThreadPoolExecutor(1, "quantkit-masks")
            self._begun = self._worker.submit(self._written, guided)

    def finished(
        self, device: torch.device, vocab: int
    ) -> tuple[dict[Sequence, int], Tensor | None]:
        """What was begun: the first row of each sequence, and whether each token may come, bool
        [rows, vocab]; None without grammars."""
        asked, bits = self._finished()
        if bits is None:
            return {}, None
        packed = torch.from_numpy(bits)
        if (
            device.type == "cuda"
            # half a megabyte of 32 rows: a copy of what is pageable waits for what was launched
            # before it
        ):
            packed = packed.pin_memory()
        packed = packed.to(device, non_blocking=device.type == "cuda")
        allowed = (
            packed.unsqueeze(-1)
            .bitwise_right_shift(torch.arange(32, dtype=torch.int32, device=device))
            .bitwise_and_(1)
        )
        return dict(asked), allowed.flatten(1)[:, :vocab].bool()

    def _finished(self) -> tuple[Asked, np.ndarray | None]:
        begun, self._begun = self._begun, None
        return ([], None) if begun is None else begun.result()

    def _written(self, guided: list[tuple[Sequence, int]]) -> tuple[Asked, np.ndarray | None]:
        asked: Asked = []
        rows = 0
        for sequence, count in guided:
            asked.append((sequence, rows))
            rows += count
        guides = [sequence.guide for sequence, _ in asked if sequence.guide is not None]
        self._executor = self._executor or guides[0].new_executor(_THREADS)
        bits = np.full((rows, max(guide.words for guide in guides)), -1, dtype=np.int32)
        for sequence, first in asked:
            assert sequence.guide is not None, sequence.index
            try:
                sequence.guide.write(self._executor, bits, first, sequence.drafts)
            except Exception as fault:  # this request's, which is ended for it
                sequence.fault = fault
        return asked, bits
