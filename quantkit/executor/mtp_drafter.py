"""Guesses by the checkpoint's own MTP layer.

The layer reads the main model's hidden state of token i and token i + 1, and guesses token i + 2 (arXiv 2412.19437, section 2.2). Further
guesses feed the layer its own output. Its cache is a layer of the main model's, filled for every token that the main model computed.

Where no guesses are wanted it is not run for every token: the tokens' hidden states are kept, which is one copy a pass, and read at once
when it is needed again, few of them by a captured step. Where it has fallen behind by many it never reads them: their sequences are not
guessed for any more, as reading for guesses that nobody wants would cost for ever what the credit of guessing.py does not count.
"""

import sys
from collections.abc import Sequence as Items
from weakref import WeakSet

from torch import Tensor

from quantkit.executor.context import PrefillContext
from quantkit.executor.drafter import Drafter
from quantkit.executor.graphs import DecodeRows, DevicePlaces, Forward, StepResult
from quantkit.executor.mixed import MixedContext
from quantkit.executor.parallel import Parallel
from quantkit.executor.runner import ForwardPass, Runner, Span
from quantkit.executor.sequence import Sequence

_MOST_BEHIND = 4096
"""Tokens whose hidden states are kept, those of one pass at least: of 32 answers for 128 steps."""


class MtpDrafter(Drafter):
    """mtp: the architecture's MtpLayer, or what is read as it is. own: computes over its cache, where that is not the model's."""

    def __init__(
        self, mtp: Forward, runner: Runner, count: int, parallel: Parallel, *, own: Runner | None = None, reach: int = sys.maxsize
    ) -> None:
        # A place holds a token and the one after it: the layer's last is that before the guess.
        super().__init__(runner, count, parallel, reach, own=own or runner, behind=1)
        self.mtp = mtp
        self.steps = self._own.steps_behind(mtp)
        self._most_rows = 1 + count
        """Of a sequence in a step: a token and its guesses. Windows and compressed entries have room for no more."""
        self._hidden: Tensor | None = None
        """The layer's own output behind the rows that count; None where it did not read the last pass."""
        self._behind_by: list[tuple[Items[tuple[Sequence, int, int]], int]] = []
        """Spans that the layer has not read, of decode passes without guesses, and the row of `_held` where their hidden states begin."""
        self._held: Tensor | None = None
        self._num_held = 0
        self._given_up: WeakSet[Sequence] = WeakSet()
        """Sequences of which the layer has not read some tokens, and never will unless they are computed again."""

    def _states(self, hidden: Tensor) -> Tensor:
        """What the layer reads of tokens, [T, H], from what the model made of them."""
        return hidden

    def _where(self, done: ForwardPass) -> PrefillContext | MixedContext:
        """Where the tokens of a pass with prompts attend."""
        assert not isinstance(done.where, DecodeRows), "a pass with prompts"
        return done.where()

    def _behind(self, done: ForwardPass, token_ids: Tensor | None) -> tuple[Tensor, Tensor] | None:
        self._hidden = None
        if not isinstance(done.where, DecodeRows):
            return self._behind_prompts(done, token_ids)
        if self.count == 0:
            self._hold(done.hidden)  # now, while the device is busy
            return None
        where = done.where
        if self._behind_by:
            where = where._replace(tables=where.tables.copy())  # other rows' come in their place
            self._catch_up()
        assert token_ids is not None, "every row of a decode pass counts"
        self._hidden, logits, greedy = self.steps.run(where, token_ids, self._states(done.hidden))
        return logits, greedy

    def _behind_prompts(self, done: ForwardPass, token_ids: Tensor | None) -> tuple[Tensor, Tensor] | None:
        self._given_up.difference_update([sequence for sequence, start, _ in done.spans if start == 0])
        next_ids, rows = self._tensor(_known_next(done)), self._tensor(done.rows)
        if token_ids is not None:
            next_ids[rows] = token_ids
        self._hidden = self.mtp(next_ids, self._states(done.hidden), self._where(done))[rows]
        if token_ids is None or self.count == 0:
            return None
        logits = self.mtp.logits(self._hidden)
        return logits, logits.argmax(dim=-1)

    def _further(self, guessed: Tensor, rows: Tensor | None, where: DecodeRows, places: DevicePlaces | None) -> StepResult:
        assert self._hidden is not None, "guesses were made"
        hidden = self._hidden if rows is None else self._hidden[rows]
        result = self.steps.run(where, guessed, hidden, places=places)
        self._hidden = result.hidden
        return result

    def _settle(self, done: ForwardPass) -> None:
        """Keep the hidden states of the tokens of a decode pass that was not read, for `_catch_up`."""
        if self._hidden is not None:
            return
        if len(done.spans) == len(done.rows):  # a token each, and as they are: nearly every pass without guesses
            self._behind_by.append((done.spans, self._num_held))
        else:
            row = self._num_held
            for sequence, start, length in done.spans:
                self._behind_by.append(([(sequence, start, min(length, len(sequence.token_ids) - 1 - start))], row))
                row += length
        self._num_held += len(done.rows)

    def _hold(self, hidden: Tensor) -> None:
        """Those of a pass whose tokens are to be read later; the rows behind `_num_held`, until `_settle` knows which are kept."""
        if self._held is not None and self._num_held + len(hidden) > len(self._held):
            self._given_up.update([sequence for spans, _ in self._behind_by for sequence, _, _ in spans])
            self._behind_by, self._num_held = [], 0
        if self._held is None or len(hidden) > len(self._held):
            self._held = hidden.new_empty(max(_MOST_BEHIND, len(hidden)), hidden.shape[1])
        self._held[self._num_held : self._num_held + len(hidden)] = hidden

    def _wanted(self, sequence: Sequence) -> int:
        return 0 if sequence in self._given_up else super()._wanted(sequence)

    def _catch_up(self) -> None:
        """The layer reads what it has not read, of sequences that still have their cache."""
        behind: list[tuple[Span, int]] = []
        for passed, row in self._behind_by:
            for sequence, start, length in passed:
                if 0 < length <= sequence.num_cached - start and sequence.finish_reason is None and sequence not in self._given_up:
                    behind.append((Span(sequence, start, length), row))
                row += length
        self._behind_by, self._num_held = [], 0
        spans, rows = _joined(behind)
        if not spans:
            return
        assert self._held is not None, "what is behind is held"
        following = [token for sequence, start, length in spans for token in sequence.token_ids[start + 1 : start + 1 + length]]
        next_ids, states = self._tensor(following), self._states(self._held[self._tensor(rows)])
        few = max(span.length for span in spans) <= self._most_rows
        if few and self.steps.has(len(rows), max(len(span.sequence.blocks) for span in spans)):
            # As rows of a step that is there: operator by operator they take the time of several steps.
            places = [(sequence, start + i) for sequence, start, length in spans for i in range(length)]
            self.steps.run(self._own.rows([0] * len(rows), places), next_ids, states)
        else:
            self.mtp(next_ids, states, self._own.prompt_context(spans))


def _joined(parts: list[tuple[Span, int]]) -> tuple[list[Span], list[int]]:
    """Parts of sequences, in the order they came, as spans that are as few as may be, and the rows of their tokens, which follow each other
    in a part."""
    runs: dict[Sequence, list[tuple[int, list[int]]]] = {}
    for (sequence, start, length), row in parts:
        own = runs.setdefault(sequence, [])
        if not own or own[-1][0] + len(own[-1][1]) != start:
            own.append((start, []))
        own[-1][1].extend(range(row, row + length))
    found = [(Span(sequence, start, len(rows)), rows) for sequence, own in runs.items() for start, rows in own]
    return [span for span, _ in found], [row for _, rows in found for row in rows]


def _known_next(done: ForwardPass) -> list[int]:
    """The successor of every token of a pass, 0 where it is not known yet."""
    following: list[int] = []
    for sequence, start, length in done.spans:
        known = sequence.token_ids[start + 1 : start + 1 + length]
        following += known + [0] * (length - len(known))
    return following
