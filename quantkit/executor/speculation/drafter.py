"""Speculative decoding by a model: what an MTP layer (mtp_drafter.py) and a draft model
(draft_model.py) have in common.

The next step computes the guesses together with the newest token; the engine chooses every
successor as it would without them, and keeps guesses as long as they are what it chose. So the
tokens are those of plain decoding, greedy or sampled: guessing changes only how many come out of a
step. A guess for a sampled token draws with the number the choice will draw with, so where the two
distributions agree the tokens do too.

Guesses are made before the host knows which guesses of the last step were right: the device
compares them with what was chosen (accepted.py), and goes on behind the last that was. Chosen
tokens and new guesses come to the host together. An NPU, whose operators want lengths on the host,
makes the first guess behind every row, and the host waits for it before the further ones. What was
written to a cache for wrong guesses is written again before it is read.
"""

import sys
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.common.devices import to_device
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.decode_batch import DecodeRows, DevicePositions, StepResult, accepted
from quantkit.executor.runner.graphs import DecodeSteps, EagerSteps
from quantkit.executor.runner.runner import ForwardPass, Runner
from quantkit.executor.runner.sampler import SampledTokens
from quantkit.executor.sampling.params import Batch
from quantkit.executor.scheduler.sequence import Sequence


class DeviceAcceptance(NamedTuple):
    """Of B sequences, int64 [B] each. right: guesses up to the first wrong one; rows: the row
    behind which a sequence's newest token was chosen; newest: that token's place in the
    sequence."""

    right: Tensor
    rows: Tensor
    newest: Tensor

    @classmethod
    def of(cls, counts: list[tuple[Sequence, int]], chosen: Tensor) -> "DeviceAcceptance":
        """counts: rows of each sequence, its newest token's and its drafts'; chosen int64 [R]: the
        tokens chosen behind the rows, not appended yet."""
        most = max(count for _, count in counts) - 1
        told, row = [], 0
        for sequence, count in counts:
            drafts = sequence.drafts[: count - 1]
            told += [row, len(sequence.token_ids), *drafts, *[-1] * (most - len(drafts))]
            row += count
        known = to_device(told, chosen.device, torch.int64).view(len(counts), 2 + most)
        return cls(*accepted(known, chosen))


class Drafter(ABC):
    """runner: of the model that is guessed for. count: tokens guessed a step, at most; may be
    changed between steps. reach: tokens of a sequence behind which nothing can be guessed any more.
    own: computes guesses, over its cache. behind: by how many places a further guess's lies before
    its token."""

    steps: DecodeSteps | EagerSteps
    """What computes guesses."""

    def __init__(
        self,
        runner: Runner,
        count: int,
        parallel: Parallel,
        reach: int = sys.maxsize,
        *,
        own: Runner,
        behind: int = 0,
    ) -> None:
        self.count, self.parallel, self._reach = count, parallel, reach
        self._runner, self._own, self._shift = runner, own, behind
        self.waits = runner.device.type == "npu"
        """Whether the host waits for the first guess before the further ones."""
        self._lengths: list[int] = []
        """Of the sequences of the last pass that get tokens, before they did."""
        self._first: Tensor | None = None
        """Where the host waits: the first guess behind each of its rows, on the device."""

    @abstractmethod
    def _behind(
        self, done: ForwardPass, token_ids: Tensor | None, kept: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Logits [R, vocab] and likeliest tokens [R] behind the tokens that were chosen behind the
        counted rows of a pass, or behind those of its counted rows that are `kept`; None where
        nothing is guessed. Tokens of prompts are read here."""

    @abstractmethod
    def _further(
        self,
        guessed: Tensor,
        rows: Tensor | None,
        where: DecodeRows,
        places: DevicePositions | None,
    ) -> StepResult:
        """What may follow the guesses [n] made last. rows [n]: which row of the last result each
        came from; None: all, in their order.
        where, places: the guesses' places, as `DecodeSteps.run` takes them."""

    @abstractmethod
    def _settle(self, done: ForwardPass) -> None:
        """The pass's tokens were appended, and guesses made."""

    def begin(self, done: ForwardPass, chosen: SampledTokens | None) -> Tensor | None:
        """As `speculation.Source.begin`: how many guesses of each sequence were right, and then
        those that are new, one row of sequences after the other; where the host waits, the first
        guess behind each row."""
        token_ids = None if chosen is None else chosen.token_ids
        if chosen is None or token_ids is None or self.count == 0 or self.waits:
            found = self._behind(done, token_ids, None)
            if found is None or chosen is None:
                return None
            self._note(done)
            self._first = self._drawn(found, chosen, None)
            return self._first
        accepted = DeviceAcceptance.of(done.counts, token_ids)
        kept = (
            accepted.rows if done.has_drafts else None
        )  # behind the others of its rows nobody goes on
        if (found := self._behind(done, token_ids, kept)) is None:
            return None
        self._note(done)
        return self._chained(done, chosen, accepted, self._drawn(found, chosen, kept))

    def _note(self, done: ForwardPass) -> None:
        self._lengths = [len(sequence.token_ids) for sequence, _ in done.counts]

    def _drawn(
        self, found: tuple[Tensor, Tensor], chosen: SampledTokens, kept: Tensor | None
    ) -> Tensor:
        """The guesses behind the counted rows, or those kept of them, of what `_behind`
        returned."""
        logits, greedy = found
        if chosen.batch is None or chosen.places is None:
            return greedy
        if kept is None:
            return self._runner.draw(logits, chosen.batch, chosen.places + 1)
        return self._runner.draw(
            logits, Batch(*(one[kept] for one in chosen.batch)), chosen.places[kept] + 1
        )

    def finish(self, done: ForwardPass, advanced: list[Sequence], guesses: list[int]) -> None:
        """As `speculation.Source.finish`."""
        if guesses and self.waits:
            self._guess(done, guesses)
        elif guesses:
            self._take(done, guesses)
        self._settle(done)

    def _chained(
        self, done: ForwardPass, chosen: SampledTokens, accepted: DeviceAcceptance, first: Tensor
    ) -> Tensor:
        """All guesses, each behind the one before it; the host waits for nothing. first: of each
        sequence."""
        if self.count == 1:
            return torch.cat((accepted.right, first))
        guesses, batch = [first.clone()], None
        if chosen.batch is not None:
            batch = Batch(*(one[accepted.rows] for one in chosen.batch))
        places = accepted.newest + 1 - self._shift
        where = self._own.rows(
            [0] * len(done.counts), [(sequence, 0) for sequence, _ in done.counts]
        )
        tables = torch.from_numpy(where.tables).to(first.device, non_blocking=first.is_cuda)
        for _ in range(1, self.count):
            at = DevicePositions.of(places, tables, self._own.cache.block_size, self._reach)
            result = self._further(guesses[-1], None, where, at)
            places = places + 1
            # With the number that its token's place will draw with.
            guesses.append(
                result.greedy.clone()
                if batch is None
                else self._runner.draw(result.logits, batch, places + self._shift)
            )
        return torch.cat((accepted.right, *guesses))

    def _take(self, done: ForwardPass, found: list[int]) -> None:
        """Drafts from what `_chained` returned, as many as can be of use."""
        number = len(done.counts)
        for place, ((sequence, _), length) in enumerate(zip(done.counts, self._lengths)):
            assert (
                sequence.finish_reason is not None
                or len(sequence.token_ids) == length + 1 + found[place]
            ), "the device compared"
            wanted = max(self._wanted(sequence), 0)
            sequence.drafts += found[number + place :: number][:wanted]

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
        """Further guesses, each behind the one before it: the host waits once for all of them."""
        found: list[tuple[list[Sequence], Tensor]] = []
        last, made = self._first, 1
        while still := [i for i, one in enumerate(sequences) if self._wanted(one) > made]:
            assert last is not None, "the first guesses were made"
            sequences, at = [sequences[i] for i in still], self._tensor([rows[i] for i in still])
            batch = Batch.of(
                [one.params for one in sequences], [one.seed for one in sequences], last.device
            )
            places = [(one, len(one.token_ids) + made - 1 - self._shift) for one in sequences]
            result = self._further(last[at], at, self._own.rows([0] * len(sequences), places), None)
            last = result.greedy.clone()
            if batch is not None:
                last = self._runner.draw(
                    result.logits,
                    batch,
                    self._tensor([len(one.token_ids) + made for one in sequences]),
                )
            found.append((sequences, last))
            rows, made = list(range(len(sequences))), made + 1
        if found:
            agreed = iter(self.parallel.agree(torch.cat([guesses for _, guesses in found])))
            for guessing, _ in found:
                for sequence in guessing:
                    sequence.drafts.append(next(agreed))

    def _wanted(self, sequence: Sequence) -> int:
        """Guesses that can be of use: the step after them chooses one token more."""
        return min(self.count, sequence.num_useful_drafts, self._reach - len(sequence.token_ids))

    def _tensor(self, values: list[int]) -> Tensor:
        return to_device(values, self._runner.device, torch.int64)
