"""Rows of a decode step without guesses, kept from step to step: most of what 64 users' rows say is
what it was in the step before."""

import numpy as np

from quantkit.executor.runner.graphs import DecodeRows
from quantkit.executor.scheduler.sequence import Sequence


class KeptRows:
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
