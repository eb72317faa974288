"""Guesses by the checkpoint's own MTP layer.

The layer reads the main model's hidden state of token i and token i + 1, and guesses token i + 2
(arXiv 2412.19437, section 2.2). Further guesses feed the layer its own output. Its cache is a layer
of the main model's, filled for every token that the main model computed.

Where no guesses are wanted it is not run for every token: the tokens' hidden states are kept
(unread.py), and read at once when it is needed again, few of them by a captured step.
"""

import sys

from torch import Tensor

from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.attention_context import PrefillContext
from quantkit.executor.runner.graphs import DecodeRows, DevicePlaces, Forward, StepResult
from quantkit.executor.runner.mixed_context import MixedContext
from quantkit.executor.runner.runner import ForwardPass, Runner
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.executor.speculation.draft_backlog import UnreadStates
from quantkit.executor.speculation.drafter import Drafter


class MtpDrafter(Drafter):
    """mtp: the architecture's MtpLayer, or what is read as it is. own: computes over its cache,
    where that is not the model's."""

    def __init__(
        self,
        mtp: Forward,
        runner: Runner,
        count: int,
        parallel: Parallel,
        *,
        own: Runner | None = None,
        reach: int = sys.maxsize,
    ) -> None:
        # A place holds a token and the one after it: the layer's last is that before the guess.
        super().__init__(runner, count, parallel, reach, own=own or runner, behind=1)
        self.mtp = mtp
        self.steps = self._own.steps_behind(mtp)
        self._most_rows = 1 + count
        """Of a sequence in a step: a token and its guesses. Windows and compressed entries have
        room for no more."""
        self._hidden: Tensor | None = None
        """The layer's own output behind the rows that count; None where it did not read the last
        pass."""
        self._unread = UnreadStates()

    def _states(self, hidden: Tensor) -> Tensor:
        """What the layer reads of tokens, [T, H], from what the model made of them."""
        return hidden

    def _where(self, done: ForwardPass) -> PrefillContext | MixedContext:
        """Where the tokens of a pass with prompts attend."""
        assert not isinstance(done.where, DecodeRows), "a pass with prompts"
        return done.where()

    def _behind(
        self, done: ForwardPass, token_ids: Tensor | None, kept: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        self._hidden = None
        if not isinstance(done.where, DecodeRows):
            return self._behind_prompts(done, token_ids, kept)
        if self.count == 0:
            self._unread.hold(done.hidden)  # now, while the device is busy
            return None
        where = done.where
        if self._unread:
            where = where._replace(tables=where.tables.copy())  # other rows' come in their place
            self._catch_up()
        assert token_ids is not None, "every row of a decode pass counts"
        self._hidden, logits, greedy = self.steps.run(
            where, token_ids, self._states(done.hidden), kept=kept
        )
        return logits, greedy

    def _behind_prompts(
        self, done: ForwardPass, token_ids: Tensor | None, kept: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        self._unread.computed_anew([sequence for sequence, start, _ in done.spans if start == 0])
        next_ids, rows = self._tensor(_known_next(done)), self._tensor(done.rows)
        if token_ids is not None:
            next_ids[rows] = token_ids
        wanted = (
            next_ids.new_zeros(1) if token_ids is None else rows if kept is None else rows[kept]
        )  # one is computed always
        self._hidden = self.mtp(next_ids, self._states(done.hidden), self._where(done), wanted)
        if token_ids is None or self.count == 0:
            return None
        logits = self.mtp.logits(self._hidden)
        return logits, logits.argmax(dim=-1)

    def _further(
        self, guessed: Tensor, rows: Tensor | None, where: DecodeRows, places: DevicePlaces | None
    ) -> StepResult:
        assert self._hidden is not None, "guesses were made"
        hidden = self._hidden if rows is None else self._hidden[rows]
        result = self.steps.run(where, guessed, hidden, places=places)
        self._hidden = result.hidden
        return result

    def _settle(self, done: ForwardPass) -> None:
        """Note whose the hidden states of a decode pass are that was not read."""
        if self._hidden is None:
            self._unread.settle(done.spans, len(done.rows))

    def _wanted(self, sequence: Sequence) -> int:
        return 0 if sequence in self._unread.given_up else super()._wanted(sequence)

    def _catch_up(self) -> None:
        """The layer reads what it has not read, of sequences that still have their cache."""
        spans, hidden = self._unread.take()
        if hidden is None:
            return
        following = [
            token
            for sequence, start, length in spans
            for token in sequence.token_ids[start + 1 : start + 1 + length]
        ]
        next_ids, states = self._tensor(following), self._states(hidden)
        few = max(span.length for span in spans) <= self._most_rows
        wanted = (
            self.steps.kept(len(following), max(len(span.sequence.blocks) for span in spans))
            if few
            else None
        )
        if wanted is not None:
            # As rows of a step that is there: operator by operator they take the time of several
            # steps.
            places = [
                (sequence, start + i) for sequence, start, length in spans for i in range(length)
            ]
            kept = next_ids.new_zeros(wanted) if wanted else None
            self.steps.run(
                self._own.rows([0] * len(following), places), next_ids, states, kept=kept
            )
        else:
            self.mtp(next_ids, states, self._own.prompt_context(spans))


def _known_next(done: ForwardPass) -> list[int]:
    """The successor of every token of a pass, 0 where it is not known yet."""
    following: list[int] = []
    for sequence, start, length in done.spans:
        known = sequence.token_ids[start + 1 : start + 1 + length]
        following += known + [0] * (length - len(known))
    return following
