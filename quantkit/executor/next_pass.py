"""The pass behind the one just computed, launched before the host knows what that one chose.

The device has the chosen tokens, and nearly every answer goes on: so the next pass over the same answers begins where the last one ends,
while the host reads the tokens, finishes answers, schedules and tells the other ranks. An answer that ended has a row that nobody reads.
What such a pass writes to the cache is what would have been written anyway, before whoever gets the blocks writes there.
"""

from typing import NamedTuple

import numpy as np

from quantkit.devices import sent
from quantkit.executor.graphs import DecodeRows, StepResult
from quantkit.executor.sequence import Sequence


class NextPass(NamedTuple):
    """answers: whose newest tokens it computes, a row each; the tokens of `rows` are the device's alone."""

    answers: list[Sequence]
    rows: DecodeRows
    result: StepResult

    def of(self, answers: list[Sequence]) -> tuple[DecodeRows, StepResult]:
        """Of those of its answers that went on, in their order, now that their tokens are known."""
        rows, result = self.rows, self.result
        if answers != self.answers:
            row_of = {sequence: row for row, sequence in enumerate(self.answers)}
            kept = [row_of[sequence] for sequence in answers]
            on_device = sent(kept, result.hidden.device)
            rows, result = DecodeRows(*(part[kept] for part in rows)), StepResult(*(part[on_device] for part in result))
        return rows._replace(token_ids=np.array([one.token_ids[-1] for one in answers], dtype=np.int64)), result
