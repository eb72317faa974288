"""Speculative decoding with the checkpoint's own MTP layer.

The layer reads the main model's hidden state of token i and token i + 1, and guesses token i + 2 (arXiv 2412.19437, section 2.2). The
next step computes the guesses together with the newest token; the engine chooses every successor as it would without them, and keeps
guesses as long as they are what it chose. So the tokens are those of plain decoding, greedy or sampled: guessing changes only how many
come out of a step. A guess for a sampled token draws with the number the choice will draw with, so where the two distributions agree the
tokens do too.

The layer has a cache of its own, filled for every token that the main model computed. Further guesses feed the layer its own output.

The layer guesses behind every row of a pass, before the host knows which guesses of the last step were right: chosen tokens and new
guesses come to the host together. What it wrote for wrong ones is written again before it is read. Where no guesses are wanted it is not
run for every token: the tokens' hidden states are kept, and read at once when it is needed again or has fallen behind by some passes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.executor.chooser import Chosen
from quantkit.executor.graphs import DecodeRows
from quantkit.executor.parallel import Parallel
from quantkit.executor.runner import ForwardPass, Runner, Span
from quantkit.executor.sampling import Batch
from quantkit.executor.sequence import Sequence
from quantkit.models.architecture import MtpModel

_MOST_BEHIND = 32
"""Decode passes whose hidden states are kept."""


@dataclass
class Acceptance:
    """How many tokens were guessed, and how many of them were kept, since the engine was loaded."""

    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


class Drafter:
    """mtp: the architecture's MtpLayer. num_drafts: tokens guessed a step, at most; may be changed between steps."""

    def __init__(self, mtp: MtpModel, runner: Runner, num_drafts: int, parallel: Parallel) -> None:
        self.mtp, self.num_drafts, self.parallel = mtp, num_drafts, parallel
        self._runner, self.steps = runner, runner.make_steps(mtp)
        self._hidden: Tensor | None = None
        """The layer's own output for the tokens of the last pass; None where it guessed nothing."""
        self._behind: list[tuple[Span, Tensor]] = []
        """Tokens that the layer has not read, with their hidden states: of decode passes without guesses."""
        self._passes_behind = 0

    def guess(self, done: ForwardPass, chosen: Chosen | None) -> Tensor | None:
        """What may follow the tokens chosen behind the counted rows of a pass, [R]; None where nothing is guessed.

        Computed before it is known which rows count, so that the host waits once a step. Tokens of prompts are taken into the layer's cache
        here.
        """
        self._hidden = None
        if isinstance(done.where, DecodeRows):
            if self.num_drafts == 0:
                return None
            self._catch_up()
            assert chosen is not None, "every row of a decode pass counts"
            result = self.steps.run(done.where, chosen.token_ids, done.hidden)
            self._hidden, logits, greedy = result
        else:
            next_ids, rows = self._tensor(_known_next(done)), self._tensor(done.rows)
            if chosen is not None:
                next_ids[rows] = chosen.token_ids
            self._hidden = self.mtp(next_ids, done.hidden, done.where())
            if chosen is None or self.num_drafts == 0:
                return None
            logits = self.mtp.logits(self._hidden[rows])
            greedy = logits.argmax(dim=-1)
        if chosen.batch is None or chosen.places is None:
            return greedy
        return self._runner.draw(logits, chosen.batch, chosen.places + 1)

    def draft(self, done: ForwardPass, guesses: list[int]) -> None:
        """After the successors of `done` were chosen: drafts for its sequences, the first from `guesses` [R] of its rows."""
        if self._hidden is None:
            self._fall_behind(done)
            return
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
        """Further guesses in a chain that the host does not wait for. The layer reads its own output for the guess before: `rows` of
        `hidden`."""
        found: list[tuple[list[Sequence], Tensor]] = []
        guessed, made = self._tensor([one.drafts[-1] for one in sequences]), 1
        while still := [i for i, one in enumerate(sequences) if self._wanted(one) > made]:
            sequences, rows = [sequences[i] for i in still], [rows[i] for i in still]
            guessed = guessed if len(still) == len(guessed) else guessed[self._tensor(still)]
            known = [len(one.token_ids) + made - 2 for one in sequences]
            places = self._runner.rows([0] * len(sequences), list(zip(sequences, known)))
            result = self.steps.run(places, guessed, hidden[self._tensor(rows)])
            batch = Batch.of([one.params for one in sequences], [one.seed for one in sequences], result.logits.device)
            guessed = result.greedy.clone() if batch is None else self._runner.draw(result.logits, batch, self._tensor(known) + 2)
            found.append((sequences, guessed))
            hidden, rows, made = result.hidden, list(range(len(sequences))), made + 1
        if found:
            agreed = iter(self.parallel.agree(torch.cat([guesses for _, guesses in found])))
            for guessing, _ in found:
                for sequence in guessing:
                    sequence.drafts.append(next(agreed))

    def _fall_behind(self, done: ForwardPass) -> None:
        """Keep the hidden states of the tokens that a decode pass computed, for `_catch_up`."""
        hidden, row = done.hidden.clone(), 0
        for sequence, start, length in done.spans:
            kept = min(length, len(sequence.token_ids) - 1 - start)
            if kept > 0 and sequence.finish_reason is None:
                self._behind.append((Span(sequence, start, kept), hidden[row : row + kept]))
            row += length
        self._passes_behind += 1
        if self._passes_behind >= _MOST_BEHIND:
            self._catch_up()

    def _catch_up(self) -> None:
        """The layer reads what it has not read, of sequences that still have their cache."""
        behind = [(span, hidden) for span, hidden in self._behind if span.start + span.length <= span.sequence.num_cached]
        self._behind, self._passes_behind = [], 0
        by_sequence: dict[Sequence, list[tuple[Span, Tensor]]] = {}
        for span, hidden in behind:
            by_sequence.setdefault(span.sequence, []).append((span, hidden))
        runs = [run for own in by_sequence.values() for run in _joined(own)]
        if runs:
            next_ids = [token for (sequence, start, length), _ in runs for token in sequence.token_ids[start + 1 : start + 1 + length]]
            context = self._runner.prompt_context([span for span, _ in runs])
            self.mtp(self._tensor(next_ids), torch.cat([hidden for _, hidden in runs]), context)

    def _wanted(self, sequence: Sequence) -> int:
        """Guesses that can be of use: the step after them chooses one token more."""
        return min(self.num_drafts, sequence.num_wanted)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._runner.device)


def _joined(parts: list[tuple[Span, Tensor]]) -> list[tuple[Span, Tensor]]:
    """Spans of one sequence as few, where one begins behind another."""
    joined: list[tuple[Span, Tensor]] = []
    for span, hidden in parts:
        if joined and joined[-1][0].start + joined[-1][0].length == span.start:
            before, states = joined.pop()
            span, hidden = Span(span.sequence, before.start, before.length + span.length), torch.cat((states, hidden))
        joined.append((span, hidden))
    return joined


def _known_next(done: ForwardPass) -> list[int]:
    """The successor of every token of a pass, 0 where it is not known yet."""
    following: list[int] = []
    for sequence, start, length in done.spans:
        known = sequence.token_ids[start + 1 : start + 1 + length]
        following += known + [0] * (length - len(known))
    return following
