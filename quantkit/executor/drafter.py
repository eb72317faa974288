"""Speculative decoding with the checkpoint's own MTP layer.

The layer reads the main model's hidden state of token i and token i + 1, and guesses token i + 2 (arXiv 2412.19437, section 2.2). The
next step computes the guesses together with the newest token; the engine chooses every successor as it would without them, and keeps
guesses as long as they are what it chose. So the tokens are those of plain decoding, greedy or sampled: guessing changes only how many
come out of a step. A guess for a sampled token draws with the number the choice will draw with, so where the two distributions agree the
tokens do too.

The layer has a cache of its own, filled for every token that the main model computed. Further guesses feed the layer its own output.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.executor.parallel import Parallel
from quantkit.executor.runner import Pass, Runner
from quantkit.executor.sampling import Batch, sample
from quantkit.executor.sequence import Sequence


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

    def __init__(self, mtp: Any, runner: Runner, num_drafts: int, parallel: Parallel) -> None:
        self.mtp, self.runner, self.num_drafts, self.parallel = mtp, runner, num_drafts, parallel

    def draft(self, done: Pass) -> None:
        """After the successors of `done` were chosen: take its tokens into the layer's cache, and guess anew for its sequences."""
        hidden = self.mtp(self._tensor(_next_ids(done)), done.hidden, done.context)
        advanced = {sequence for sequence, _ in done.counts}
        waiting, rows, row = [], [], 0
        for sequence, start, length in done.spans:
            if sequence in advanced and self._wanted(sequence) > 0:
                waiting.append(sequence)
                # The last token whose successor is known: what follows that successor is guessed.
                rows.append(row + len(sequence.token_ids) - 2 - start)
            row += length
        hidden = hidden[self._tensor(rows)]
        while waiting:
            guesses = self._guess(waiting, hidden)
            for sequence, token in zip(waiting, guesses):
                sequence.drafts.append(token)
            more = [index for index, sequence in enumerate(waiting) if len(sequence.drafts) < self._wanted(sequence)]
            waiting = [waiting[index] for index in more]
            if waiting:
                context = self.runner.decode_context([(one, len(one.token_ids) + len(one.drafts) - 2) for one in waiting])
                hidden = self.mtp(self._tensor([one.drafts[-1] for one in waiting]), hidden[self._tensor(more)], context)

    def _wanted(self, sequence: Sequence) -> int:
        """Guesses that can be of use: the step after them chooses one token more."""
        if sequence.finish_reason is not None:
            return 0
        return min(self.num_drafts, sequence.max_len - len(sequence.token_ids) - 1)

    def _guess(self, sequences: list[Sequence], hidden: Tensor) -> list[int]:
        batch = Batch.of([one.params for one in sequences], [one.seed for one in sequences], hidden.device)
        positions = self._tensor([len(one.token_ids) + len(one.drafts) for one in sequences])
        return self.parallel.agree(sample(self.mtp.logits(hidden), batch, positions))

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.runner.device)


def _next_ids(done: Pass) -> list[int]:
    """The successor of every token of a pass; 0 for guesses that were not kept: their entries are written again before they are read."""
    ids = []
    for sequence, start, length in done.spans:
        known = sequence.token_ids[start + 1 : start + 1 + length]
        ids += known + [0] * (length - len(known))
    return ids
