"""Speculative decoding by a drafter: what an MTP layer (mtp_drafter.py) and a draft model
(draft_model.py) share.

The next decode step computes the drafts together with the newest token. The engine samples every
token as it would without drafts and accepts drafts for as long as they equal the sampled tokens. So
the output is that of plain decoding, greedy or sampled. A draft of a sampled token is drawn with
the random number that its position will be sampled with, so where the two distributions agree the
tokens do too.

Drafting starts before the host knows which drafts of the last step were accepted: the device
compares them with the sampled tokens (`DeviceAcceptance`) and continues after the last accepted
one. Sampled tokens and new drafts reach the host together. An NPU, whose operators want sequence
lengths on the host, makes the first draft after every row, and the host waits for it before the
further ones. Cache entries written for rejected drafts are overwritten before they are read.
"""

import sys
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.common.devices import to_device
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.decode_batch import DecodeRows, DevicePositions, StepResult, accepted
from quantkit.executor.runner.graphs import DecodeSteps
from quantkit.executor.runner.runner import ForwardPass, Runner
from quantkit.executor.runner.sampler import SampledTokens
from quantkit.executor.sampling.params import Batch
from quantkit.executor.scheduler.sequence import Sequence


class DeviceAcceptance(NamedTuple):
    """Of B sequences, int64 [B] each. accepted: accepted drafts; rows: the row whose sampled token
    is the sequence's newest; newest: position of that token in the sequence."""

    accepted: Tensor
    rows: Tensor
    newest: Tensor

    @classmethod
    def of(cls, counts: list[tuple[Sequence, int]], sampled: Tensor) -> "DeviceAcceptance":
        """counts: rows of each sequence, its newest token's and its drafts'; sampled int64 [R]: the
        token sampled after each row, not appended yet."""
        most = max(count for _, count in counts) - 1
        values, row = [], 0
        for sequence, count in counts:
            drafts = sequence.drafts[: count - 1]
            values += [row, len(sequence.token_ids), *drafts, *[-1] * (most - len(drafts))]
            row += count
        table = to_device(values, sampled.device, torch.int64).view(len(counts), 2 + most)
        return cls(*accepted(table, sampled))


class Drafter(ABC):
    """A `Proposer`. runner: of the target model. count: draft length, at most; may change between
    steps. max_positions: sequences are drafted for up to this length. own: computes the drafter
    over its cache. shift: a further draft lies this many positions before its token in the
    drafter's cache."""

    steps: DecodeSteps
    """Decode steps of the drafter."""

    def __init__(
        self,
        runner: Runner,
        count: int,
        parallel: Parallel,
        max_positions: int = sys.maxsize,
        *,
        own: Runner,
        shift: int = 0,
    ) -> None:
        self.count, self.parallel, self._max_positions = count, parallel, max_positions
        self._runner, self._own, self._shift = runner, own, shift
        self.waits = runner.device.type == "npu"
        """Whether the host waits for the first draft before the further ones."""
        self._lengths: list[int] = []
        """Lengths of the sequences of the last pass before its tokens were appended."""
        self._first: Tensor | None = None
        """Where the host waits: the first draft after each row, on the device."""

    @abstractmethod
    def _first_logits(
        self, output: ForwardPass, token_ids: Tensor | None, result_rows: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Read the sampled tokens `token_ids` [R] (and the tokens of prompts) -> logits [R, vocab]
        and likeliest tokens [R] after them, of `result_rows` if given; None where nothing is
        drafted."""

    @abstractmethod
    def _next_logits(
        self,
        drafts: Tensor,
        rows: Tensor | None,
        batch: DecodeRows,
        positions: DevicePositions | None,
    ) -> StepResult:
        """Read the last drafts [n]. rows [n]: the row of the last result that each came from, all
        in order by default. batch, positions: of the drafts, as `DecodeSteps.run` takes them."""

    @abstractmethod
    def _after_step(self, output: ForwardPass) -> None:
        """Called when the pass's tokens were appended and drafts were made."""

    def launch(self, output: ForwardPass, sampled: SampledTokens | None) -> Tensor | None:
        """As `Proposer.launch`: accepted drafts of each sequence, then new drafts, one row of
        sequences after the other; where the host waits, the first draft after each row."""
        token_ids = None if sampled is None else sampled.token_ids
        if sampled is None or token_ids is None or self.count == 0 or self.waits:
            logits_and_greedy = self._first_logits(output, token_ids, None)
            if logits_and_greedy is None or sampled is None:
                return None
            self._lengths = [len(sequence.token_ids) for sequence, _ in output.counts]
            self._first = self._sample(logits_and_greedy, sampled, None)
            return self._first
        acceptance = DeviceAcceptance.of(output.counts, token_ids)
        result_rows = acceptance.rows if output.has_drafts else None  # the other rows were rejected
        if (logits_and_greedy := self._first_logits(output, token_ids, result_rows)) is None:
            return None
        self._lengths = [len(sequence.token_ids) for sequence, _ in output.counts]
        return self._draft_chain(
            output, sampled, acceptance, self._sample(logits_and_greedy, sampled, result_rows)
        )

    def finish(self, output: ForwardPass, advanced: list[Sequence], drafts: list[int]) -> None:
        """As `Proposer.finish`."""
        if drafts and self.waits:
            self._draft_from_host(output, drafts)
        elif drafts:
            self._assign(output, drafts)
        self._after_step(output)

    def _sample(
        self,
        logits_and_greedy: tuple[Tensor, Tensor],
        sampled: SampledTokens,
        result_rows: Tensor | None,
    ) -> Tensor:
        """First drafts from what `_first_logits` returned."""
        logits, greedy = logits_and_greedy
        if sampled.batch is None or sampled.positions is None:
            return greedy
        batch, positions = sampled.batch, sampled.positions
        if result_rows is not None:
            batch, positions = Batch(*(one[result_rows] for one in batch)), positions[result_rows]
        return self._runner.draw(logits, batch, positions + 1)

    def _draft_chain(
        self,
        output: ForwardPass,
        sampled: SampledTokens,
        acceptance: DeviceAcceptance,
        first: Tensor,
    ) -> Tensor:
        """All drafts, each after the one before it, without waiting for the host. first: of each
        sequence."""
        if self.count == 1:
            return torch.cat((acceptance.accepted, first))
        drafts, batch = [first.clone()], None
        if sampled.batch is not None:
            batch = Batch(*(one[acceptance.rows] for one in sampled.batch))
        positions = acceptance.newest + 1 - self._shift
        rows = self._own.rows(
            [0] * len(output.counts), [(sequence, 0) for sequence, _ in output.counts]
        )
        tables = torch.from_numpy(rows.tables).to(first.device, non_blocking=first.is_cuda)
        for _ in range(1, self.count):
            at = DevicePositions.of(
                positions, tables, self._own.cache.block_size, self._max_positions
            )
            result = self._next_logits(drafts[-1], None, rows, at)
            positions = positions + 1
            # With the random number that the token's position will be sampled with.
            drafts.append(
                result.greedy.clone()
                if batch is None
                else self._runner.draw(result.logits, batch, positions + self._shift)
            )
        return torch.cat((acceptance.accepted, *drafts))

    def _assign(self, output: ForwardPass, drafts: list[int]) -> None:
        """Give the sequences the useful drafts of `_draft_chain`'s result."""
        number = len(output.counts)
        for place, ((sequence, _), length) in enumerate(zip(output.counts, self._lengths)):
            assert (
                sequence.finish_reason is not None
                or len(sequence.token_ids) == length + 1 + drafts[place]
            ), "the device compared"
            useful = max(self._num_useful(sequence), 0)
            sequence.drafts += drafts[number + place :: number][:useful]

    def _draft_from_host(self, output: ForwardPass, first: list[int]) -> None:
        """Drafts for the sequences of a pass, given the first draft after each of its rows."""
        waiting, rows, row = [], [], 0
        for (sequence, count), length in zip(output.counts, self._lengths):
            if self._num_useful(sequence) > 0:
                waiting.append(sequence)
                # The row after which the newest token was sampled.
                rows.append(row + len(sequence.token_ids) - length - 1)
                sequence.drafts.append(first[rows[-1]])
            row += count
        self._draft_further(waiting, rows)

    def _draft_further(self, sequences: list[Sequence], rows: list[int]) -> None:
        """Further drafts, each after the one before it; the host waits once for all of them."""
        made: list[tuple[list[Sequence], Tensor]] = []
        last, length = self._first, 1
        while still := [i for i, one in enumerate(sequences) if self._num_useful(one) > length]:
            assert last is not None, "the first drafts were made"
            sequences, at = [sequences[i] for i in still], self._tensor([rows[i] for i in still])
            batch = Batch.of(
                [one.params for one in sequences], [one.seed for one in sequences], last.device
            )
            tokens = [(one, len(one.token_ids) + length - 1 - self._shift) for one in sequences]
            result = self._next_logits(
                last[at], at, self._own.rows([0] * len(sequences), tokens), None
            )
            last = result.greedy.clone()
            if batch is not None:
                last = self._runner.draw(
                    result.logits,
                    batch,
                    self._tensor([len(one.token_ids) + length for one in sequences]),
                )
            made.append((sequences, last))
            rows, length = list(range(len(sequences))), length + 1
        if made:
            agreed = iter(self.parallel.agree(torch.cat([drafts for _, drafts in made])))
            for drafted, _ in made:
                for sequence in drafted:
                    sequence.drafts.append(next(agreed))

    def _num_useful(self, sequence: Sequence) -> int:
        """Drafts that can be accepted: the step that verifies them samples one token more."""
        return min(
            self.count, sequence.num_useful_drafts, self._max_positions - len(sequence.token_ids)
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return to_device(values, self._runner.device, torch.int64)
