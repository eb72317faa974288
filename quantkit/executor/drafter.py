"""Speculative decoding by a model: what an MTP layer (mtp_drafter.py) and a draft model (draft_model.py) have in common.

The next step computes the guesses together with the newest token; the engine chooses every successor as it would without them, and keeps
guesses as long as they are what it chose. So the tokens are those of plain decoding, greedy or sampled: guessing changes only how many
come out of a step. A guess for a sampled token draws with the number the choice will draw with, so where the two distributions agree the
tokens do too.

The first guess is made behind every row of a pass, before the host knows which guesses of the last step were right: chosen tokens and new
guesses come to the host together. What was written to a cache for wrong ones is written again before it is read.
"""

import sys
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from quantkit.devices import sent
from quantkit.executor.chooser import ChosenTokens
from quantkit.executor.graphs import DecodeSteps, EagerSteps, StepResult
from quantkit.executor.parallel import Parallel
from quantkit.executor.runner import ForwardPass, Runner
from quantkit.executor.sampling import Batch
from quantkit.executor.sequence import Sequence


class Drafter(ABC):
    """runner: of the model that is guessed for. count: tokens guessed a step, at most; may be changed between steps. reach: tokens of a
    sequence behind which nothing can be guessed any more."""

    steps: DecodeSteps | EagerSteps
    """What computes guesses."""

    def __init__(self, runner: Runner, count: int, parallel: Parallel, reach: int = sys.maxsize) -> None:
        self.count, self.parallel, self._reach = count, parallel, reach
        self._runner = runner
        self._lengths: list[int] = []
        """Of the sequences of the last pass that get tokens, before they did."""
        self._first: Tensor | None = None
        """The first guess behind each of its rows, on the device."""

    @abstractmethod
    def _behind(self, done: ForwardPass, token_ids: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Logits [R, vocab] and likeliest tokens [R] behind the tokens that were chosen behind the counted rows of a pass; None where
        nothing is guessed. Tokens of prompts are read here."""

    @abstractmethod
    def _further(self, sequences: list[Sequence], made: int, guessed: Tensor, rows: Tensor | None) -> StepResult:
        """What may follow the guesses [n] made last, the `made`th of each sequence. rows [n]: which row of the last result each came from;
        None: all, in their order."""

    @abstractmethod
    def _settle(self, done: ForwardPass) -> None:
        """The pass's tokens were appended, and guesses made."""

    def begin(self, done: ForwardPass, chosen: ChosenTokens | None) -> Tensor | None:
        """As `speculation.Source.begin`."""
        self._lengths = [len(sequence.token_ids) for sequence, _ in done.counts]
        found = self._behind(done, None if chosen is None else chosen.token_ids)
        if found is None or chosen is None:
            return None
        logits, greedy = found
        self._first = greedy
        if chosen.batch is not None and chosen.places is not None:
            self._first = self._runner.draw(logits, chosen.batch, chosen.places + 1)
        return self._first

    def finish(self, done: ForwardPass, advanced: list[Sequence], guesses: list[int]) -> None:
        """As `speculation.Source.finish`."""
        if guesses:
            self._guess(done, guesses)
        self._settle(done)

    def _guess(self, done: ForwardPass, guesses: list[int]) -> None:
        """Drafts for the sequences of a pass, the first from `guesses` [R] of its rows."""
        waiting, rows, row = [], [], 0
        for (sequence, count), length in zip(done.counts, self._lengths):
            if self._wanted(sequence) > 0:
                waiting.append(sequence)
                # The row behind which the newest token was chosen.
                rows.append(row + len(sequence.token_ids) - length - 1)
                sequence.drafts.append(guesses[rows[-1]])
            row += count
        self._chain(waiting, rows)

    def _chain(self, sequences: list[Sequence], rows: list[int]) -> None:
        """Further guesses, each behind the one before it: the host waits once for all of them. What it tells the device for the first is
        good for the next ones, as long as all sequences go on."""
        found: list[tuple[list[Sequence], Tensor]] = []
        last, batch, places, made = self._first, None, self._tensor([]), 1
        while still := [i for i, one in enumerate(sequences) if self._wanted(one) > made]:
            assert last is not None, "the first guesses were made"
            at = None
            if made == 1 or len(still) < len(sequences):
                sequences, at = [sequences[i] for i in still], self._tensor([rows[i] for i in still])
                last, batch = last[at], Batch.of([one.params for one in sequences], [one.seed for one in sequences], last.device)
                places = places if batch is None else self._tensor([len(one.token_ids) + made for one in sequences])
            result = self._further(sequences, made, last, at)
            last = result.greedy.clone() if batch is None else self._runner.draw(result.logits, batch, places)
            found.append((sequences, last))
            rows, made, places = list(range(len(sequences))), made + 1, places + 1
        if found:
            agreed = iter(self.parallel.agree(torch.cat([guesses for _, guesses in found])))
            for guessing, _ in found:
                for sequence in guessing:
                    sequence.drafts.append(next(agreed))

    def _wanted(self, sequence: Sequence) -> int:
        """Guesses that can be of use: the step after them chooses one token more."""
        return min(self.count, sequence.num_wanted, self._reach - len(sequence.token_ids))

    def _tensor(self, values: list[int]) -> Tensor:
        return sent(values, self._runner.device, torch.int64)
