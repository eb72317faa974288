"""Hidden states of tokens that no layer which guesses has read, as nobody wanted its guesses: one
copy a pass.

There is room for a few thousand tokens. Where they are more, what is held is given up: its
sequences are not guessed for any more, as reading for guesses that nobody wants would cost for ever
what the credit of guessing.py does not count.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from weakref import WeakSet

from torch import Tensor

from quantkit.common.devices import to_device
from quantkit.executor.runner.runner import Span
from quantkit.executor.scheduler.sequence import Sequence

_MOST = 4096
"""Tokens whose hidden states are held, those of one pass at least: of 32 answers for 128 steps."""


class UnreadStates:
    def __init__(self) -> None:
        self.given_up: WeakSet[Sequence] = WeakSet()
        """Sequences of which some tokens are never read unless they are computed again."""
        self._passes: list[tuple[Items[tuple[Sequence, int, int]], int]] = []
        """Spans, as `Span` has them, and the row of `_held` where their hidden states begin."""
        self._held: Tensor | None = None
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._passes)

    def hold(self, hidden: Tensor) -> None:
        """Those of a pass [T, H]. They lie behind what is held, until `settle` tells whose they
        are."""
        if self._held is not None and self._count + len(hidden) > len(self._held):
            self.given_up.update(
                [sequence for spans, _ in self._passes for sequence, _, _ in spans]
            )
            self._passes, self._count = [], 0
        if self._held is None or len(hidden) > len(self._held):
            self._held = hidden.new_empty(max(_MOST, len(hidden)), hidden.shape[1])
        self._held[self._count : self._count + len(hidden)] = hidden

    def settle(self, spans: Items[tuple[Sequence, int, int]], rows: int) -> None:
        """The rows held last are those of spans, now that it is known how many tokens of each were
        kept."""
        if len(spans) == rows:  # a token each, and as they are: nearly every pass without guesses
            self._passes.append((spans, self._count))
        else:
            row = self._count
            for sequence, start, length in spans:
                self._passes.append(
                    ([(sequence, start, min(length, len(sequence.token_ids) - 1 - start))], row)
                )
                row += length
        self._count += rows

    def computed_anew(self, sequences: Iterable[Sequence]) -> None:
        """From their first token on."""
        self.given_up.difference_update(sequences)

    def take(self) -> tuple[list[Span], Tensor | None]:
        """All that is held of sequences that still have their cache, as spans that are as few as
        may be, and their tokens' hidden states [T, H]. Nothing is held any more."""
        behind: list[tuple[Span, int]] = []
        for passed, row in self._passes:
            for sequence, start, length in passed:
                if (
                    0 < length <= sequence.num_cached - start
                    and sequence.finish_reason is None
                    and sequence not in self.given_up
                ):
                    behind.append((Span(sequence, start, length), row))
                row += length
        self._passes, self._count = [], 0
        spans, rows = _joined(behind)
        if not spans:
            return [], None
        assert self._held is not None, "what is behind is held"
        return spans, self._held[to_device(rows, self._held.device)]


def _joined(parts: list[tuple[Span, int]]) -> tuple[list[Span], list[int]]:
    """Parts of sequences, in the order they came, as spans that are as few as may be, and the rows
    of their tokens, which follow each other in a part."""
    runs: dict[Sequence, list[tuple[int, list[int]]]] = {}
    for (sequence, start, length), row in parts:
        own = runs.setdefault(sequence, [])
        if not own or own[-1][0] + len(own[-1][1]) != start:
            own.append((start, []))
        own[-1][1].extend(range(row, row + length))
    found = [
        (Span(sequence, start, len(rows)), rows)
        for sequence, own in runs.items()
        for start, rows in own
    ]
    return [span for span, _ in found], [row for _, rows in found for row in rows]
