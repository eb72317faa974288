"""Speculative decoding with the checkpoint's own MTP layer.

The layer reads the main model's hidden state of token i and token i + 1, and guesses token i + 2 (arXiv 2412.19437, section 2.2). The
next step computes the guesses together with the newest token; the engine chooses every successor as it would without them, and keeps
guesses as long as they are what it chose. So the tokens are those of plain decoding, greedy or sampled: guessing changes only how many
come out of a step. A guess for a sampled token draws with the number the choice will draw with, so where the two distributions agree the
tokens do too.

The layer has a cache of its own, filled for every token that the main model computed. Further guesses feed the layer its own output.

The layer guesses behind every row of a pass, before the host knows which guesses of the last step were right: chosen tokens and new
guesses come to the host together. What it wrote for wrong ones is written again before it is read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.executor.graphs import DecodeRows
from quantkit.executor.parallel import Parallel
from quantkit.executor.runner import ForwardPass, Runner
from quantkit.executor.sampling import Batch, sample
from quantkit.executor.sequence import Sequence
from quantkit.models.architecture import MtpModel


@dataclass
class Acceptance:
    """How many tokens were guessed, and how many of them were kept, since the engine was loaded."""

    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


class Drafter:
    """mtp: the architecture's MtpLayer. num_drafts: tokens guessed a step, at most."""

    def __init__(self, mtp: MtpModel, runner: Runner, num_drafts: int, parallel: Parallel) -> None:
        self.mtp, self.num_drafts, self.parallel = mtp, num_drafts, parallel
        self._runner, self.steps = runner, runner.make_steps(mtp)
        self._hidden: Tensor | None = None
        """The layer's own output for the tokens of the last pass."""

    def guess(self, done: ForwardPass, chosen: Tensor | None, batch: Batch | None, places: Tensor | None) -> Tensor | None:
        """What may follow the tokens `chosen` [R] behind the counted rows of a pass, [R]; None where there are none.

        Computed before it is known which rows count, so that the host waits once a step. batch, places: what `chosen` was drawn with.
        Tokens of prompts are taken into the layer's cache here.
        """
        if isinstance(done.where, DecodeRows):
            assert chosen is not None, "every row of a decode pass counts"
            result = self.steps.run(done.where, chosen, done.hidden)
            self._hidden, logits, greedy = result
        else:
            next_ids, rows = self._tensor(_known_next(done)), self._tensor(done.rows)
            if chosen is not None:
                next_ids[rows] = chosen
            self._hidden = self.mtp(next_ids, done.hidden, done.where)
            if chosen is None:
                return None
            logits = self.mtp.logits(self._hidden[rows])
            greedy = logits.argmax(dim=-1)
        return greedy if places is None else sample(logits, batch, places + 1)

    def draft(self, done: ForwardPass, guesses: list[int]) -> None:
        """After the successors of `done` were chosen: drafts for its sequences, the first from `guesses` [R] of its rows."""
        assert self._hidden is not None, "guesses are of this pass"
        number = {row: i for i, row in enumerate(done.rows)}
        advanced = {sequence for sequence, _ in done.counts}
        waiting, rows, row = [], [], 0
        for sequence, start, length in done.spans:
            if sequence in advanced and self._wanted(sequence) > 0:
                waiting.append(sequence)
                # The last token whose successor is known: what follows that successor is guessed.
                rows.append(row + len(sequence.token_ids) - 2 - start)
                sequence.drafts.append(guesses[number[rows[-1]]])
            row += length
        self._go_on(waiting, self._hidden, rows)

    def _go_on(self, sequences: list[Sequence], hidden: Tensor, rows: list[int]) -> None:
        """Further guesses. The layer reads its own output for the guess before: `rows` of `hidden`."""
        while open_rows := [(one, row) for one, row in zip(sequences, rows) if len(one.drafts) < self._wanted(one)]:
            sequences = [one for one, _ in open_rows]
            guessed = [one.drafts[-1] for one in sequences]
            places = self._runner.rows(guessed, [(one, len(one.token_ids) + len(one.drafts) - 2) for one in sequences])
            result = self.steps.run(places, self._tensor(guessed), hidden[self._tensor([row for _, row in open_rows])])
            for sequence, token in zip(sequences, self._agreed(sequences, result.logits)):
                sequence.drafts.append(token)
            hidden, rows = result.hidden, list(range(len(sequences)))

    def _wanted(self, sequence: Sequence) -> int:
        """Guesses that can be of use: the step after them chooses one token more."""
        if sequence.finish_reason is not None:
            return 0
        return min(self.num_drafts, sequence.max_len - len(sequence.token_ids) - 1)

    def _agreed(self, sequences: list[Sequence], logits: Tensor) -> list[int]:
        batch = Batch.of([one.params for one in sequences], [one.seed for one in sequences], logits.device)
        positions = self._tensor([len(one.token_ids) + len(one.drafts) for one in sequences])
        return self.parallel.agree(sample(logits, batch, positions))

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._runner.device)


def _known_next(done: ForwardPass) -> list[int]:
    """The successor of every token of a pass, 0 where it is not known yet."""
    following: list[int] = []
    for sequence, start, length in done.spans:
        known = sequence.token_ids[start + 1 : start + 1 + length]
        following += known + [0] * (length - len(known))
    return following
