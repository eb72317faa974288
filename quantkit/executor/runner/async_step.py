"""The pass behind the one just computed, launched before the host knows what that one chose.

The device has the chosen tokens, and nearly every answer goes on: so the next pass over the same
answers begins where the last one ends, while the host reads the tokens, finishes answers, schedules
and tells the other ranks. An answer that ended has a row that nobody reads. What such a pass writes
to the cache is what would have been written anyway, before whoever gets the blocks writes there.

With guesses the device knows how many of the last ones were right, and the new ones: so the pass
that checks these is launched, too.
"""

from typing import NamedTuple

import numpy as np

from quantkit.executor.runner.graphs import DecodeRows, StepResult
from quantkit.executor.scheduler.sequence import Sequence


class NextPass(NamedTuple):
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


class GuessedPass(NamedTuple):
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
