"""Guesses by several MTP layers of a checkpoint, one for each token ahead.

Layer k reads, of token i, what layer k - 1 made of it (layer 0: the main model) and token i + 1 +
k, and guesses token i + 2 + k (arXiv 2412.19437, section 2.2). Each has a cache of its own, of all
tokens before. So behind the newest tokens layer k is computed where it read guesses the last time,
and for the newest one, whose successors the layers before it have guessed. Guesses beyond the
layers are not made.

What is behind a step of answers is a few tokens a sequence: a decode step over rows, as guesses
that are checked are, and so a graph where those are. Longer parts attend as prompts do.

Where no guesses are wanted what the main model made of answers' tokens is kept (unread.py), and
read at once later.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quantkit.common.devices import to_device
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.graphs import DecodeRows
from quantkit.executor.runner.runner import ForwardPass, Runner, Span
from quantkit.executor.runner.sampler import ChosenTokens
from quantkit.executor.sampling.params import Batch
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.executor.speculation.draft_backlog import UnreadStates
from quantkit.executor.speculation.mtp_drafter import MtpDrafter
from quantkit.executor.speculation.speculation import Source
from quantkit.models.architecture import MtpModel


def by_mtp_layers(
    layers: tuple[MtpModel, ...], runner: Runner, count: int, parallel: Parallel
) -> Source:
    """What guesses `count` tokens a step, at most: of several layers each the token behind the one
    before, a single one all of them."""
    assert layers, "loaded with its MTP layers"
    if len(layers) > 1:
        return MtpHeads(layers, runner, count, parallel)
    return MtpDrafter(layers[0], runner, count, parallel)


@dataclass
class _Read:
    """What the layers have read of one sequence. done: by layer, how many tokens it has read as
    they are; waiting [n, W], by layer: what it reads of the tokens behind these."""

    done: list[int]
    waiting: list[Tensor] = field(default_factory=list)


class MtpHeads:
    """As `speculation.Source`. layers: the checkpoint's, in order. count: tokens guessed a step, at
    most; may be changed between steps."""

    def __init__(
        self, layers: tuple[MtpModel, ...], runner: Runner, count: int, parallel: Parallel
    ) -> None:
        self.layers, self.count, self.parallel = layers, count, parallel
        self.steps = tuple(runner.steps_behind(layer) for layer in layers)
        """Of each layer."""
        self._runner = runner
        # A step keeps `count` guesses and the token behind them; layer k reads k tokens again.
        # Short convolutions have room for as many.
        self._most_rows = 2 * count
        self._read: WeakKeyDictionary[Sequence, _Read] = WeakKeyDictionary()
        self._unread = UnreadStates()

    def begin(self, done: ForwardPass, chosen: ChosenTokens | None) -> Tensor | None:
        """As `speculation.Source.begin`: nothing is guessed before the chosen tokens are known. A
        pass without any is read here."""
        if chosen is None:
            self._advance(done, set())
        elif self.count == 0 and isinstance(done.where, DecodeRows):
            self._unread.hold(done.hidden)
        return None

    def finish(self, done: ForwardPass, advanced: list[Sequence], guesses: list[int]) -> None:
        """As `speculation.Source.finish`."""
        if self.count > 0:
            self._catch_up()
            self._advance(done, {sequence for sequence, _ in done.counts})
        elif isinstance(done.where, DecodeRows):
            self._unread.settle(done.spans, len(done.rows))
        else:
            self._set_aside(done)
            self._advance(done, set(), fewest=2)

    def _set_aside(self, done: ForwardPass) -> None:
        """Keep the hidden states of answers' tokens of a pass with prompts, as nobody guesses."""
        rows, spans, row = [], [], 0
        for span in done.spans:
            if span[2] == 1:
                spans.append(span)
                rows.append(row)
            row += span[2]
        if rows:
            self._unread.hold(done.hidden[to_device(rows, self._runner.device)])
            self._unread.settle(spans, len(rows))

    def _catch_up(self) -> None:
        """What was kept waits for the layers."""
        spans, hidden = self._unread.take()
        if hidden is not None:
            for (sequence, start, _), part in zip(
                spans, hidden.split([span.length for span in spans])
            ):
                self._take(sequence, start, part)

    def _advance(self, done: ForwardPass, guessing: set[Sequence], fewest: int = 1) -> None:
        """Read a pass, its spans of `fewest` tokens and more, and guess behind the newest tokens of
        `guessing`."""
        row, behind = 0, dict[Sequence, int]()
        self._unread.computed_anew([sequence for sequence, start, _ in done.spans if start == 0])
        for sequence, start, length in done.spans:
            kept = min(length, len(sequence.token_ids) - 1 - start)  # of what was guessed
            if (
                length >= fewest
                and sequence.finish_reason is None
                and sequence not in self._unread.given_up
            ):
                self._take(sequence, start, done.hidden[row : row + kept])
                wanted = (
                    max(min(self.count, sequence.num_wanted, len(self.layers)), 0)
                    if sequence in guessing
                    else 0
                )
                if wanted or len(self._read[sequence].waiting[0]) > self._most_rows:
                    behind[sequence] = wanted
            row += length
        self._compute(behind)

    def _take(self, sequence: Sequence, start: int, hidden: Tensor) -> None:
        """The main model computed the tokens start .. of a sequence: hidden [n, W]."""
        read = self._read.get(sequence)
        if read is None or start != read.done[0] + len(read.waiting[0]):  # new, or computed anew
            count = len(self.layers)
            read = self._read[sequence] = _Read([start] * count, [hidden[:0]] * count)
        read.waiting[0] = torch.cat((read.waiting[0], hidden))

    def _compute(self, wanted: dict[Sequence, int]) -> None:
        """Have every layer read what it can of these sequences, and guess so many tokens of
        each."""
        made: dict[Sequence, list[Tensor]] = {one: [] for one in wanted}
        for number in range(len(self.layers)):
            spans = [
                span
                for one, count in wanted.items()
                if (span := self._span(one, number, count > number)).length
            ]
            if not spans:
                continue
            reading = torch.cat(
                [self._read[one].waiting[number][:length] for one, _, length in spans]
            )
            ends = torch.tensor([span.length for span in spans]).cumsum(0).tolist()
            guessing = {
                span.sequence: end - 1
                for span, end in zip(spans, ends)
                if wanted[span.sequence] > number
            }
            ids, rows = self._ids(spans, number, made), [*guessing.values()]
            hidden, found = self._read_rows(number, spans, ids, reading, rows)
            if found is not None:
                for sequence, guess in zip(guessing, self._guesses(number, [*guessing], found)):
                    made[sequence].append(guess)
            for span, part in zip(spans, hidden.split([span.length for span in spans])):
                self._settle(span, number, part)
        self._hand_out(made)

    def _read_rows(
        self, number: int, spans: list[Span], ids: Tensor, reading: Tensor, rows: list[int]
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """A layer reads spans: what it makes of all tokens, [T, W], and of `rows` the logits and
        the likeliest tokens; None of none. All is valid until a layer reads again."""
        at = to_device(rows, self._runner.device)
        if rows and max(span.length for span in spans) <= self._most_rows:
            places = [(one, start + i) for one, start, length in spans for i in range(length)]
            result = self.steps[number].run(
                self._runner.rows([0] * len(places), places), ids, reading
            )
            return result.hidden, (result.logits[at], result.greedy[at])
        layer = self.layers[number]
        hidden = layer(ids, reading, self._runner.prompt_context(spans))
        if not rows:
            return hidden, None
        logits = layer.logits(hidden[at])
        return hidden, (logits, logits.argmax(dim=-1))

    def _span(self, sequence: Sequence, number: int, guesses: bool) -> Span:
        """What a layer reads: tokens whose successor so far on is known, and where it guesses all
        that the model has computed."""
        read = self._read[sequence]
        first, known = read.done[number], len(sequence.token_ids) - 1 - number
        there = first + len(read.waiting[number])
        return Span(sequence, first, (there if guesses else max(min(there, known), first)) - first)

    def _ids(self, spans: list[Span], number: int, made: dict[Sequence, list[Tensor]]) -> Tensor:
        """The tokens beside the hidden states of spans, int64 [T]: known ones, and then guessed
        ones."""
        ids: list[int] = []
        places: list[int] = []
        guessed: list[Tensor] = []
        for sequence, start, length in spans:
            tokens, first = sequence.token_ids, start + 1 + number
            for place in range(first, first + length):
                if place >= len(tokens):
                    places.append(len(ids))
                    guessed.append(made[sequence][place - len(tokens)])
                ids.append(tokens[place] if place < len(tokens) else 0)
        found = to_device(ids, self._runner.device, torch.int64)
        if guessed:
            found[to_device(places, found.device)] = torch.stack(guessed)
        return found

    def _guesses(
        self, number: int, sequences: list[Sequence], found: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        """What may follow `number` guesses of each sequence, from logits and likeliest tokens
        behind its newest token; drawn with the number that the choice will draw with."""
        logits, greedy = found
        batch = Batch.of(
            [one.params for one in sequences], [one.seed for one in sequences], logits.device
        )
        if batch is None:
            return list(greedy.unbind())
        places = to_device([len(one.token_ids) + number for one in sequences], logits.device)
        return list(self._runner.draw(logits, batch, places).clone().unbind())

    def _settle(self, span: Span, number: int, made: Tensor) -> None:
        """A layer read a span: what it made of tokens that it read as they are is for the next one,
        and the others are read again."""
        read, known = self._read[span.sequence], len(span.sequence.token_ids) - 1 - number
        sure = max(min(span.start + span.length, known) - span.start, 0)
        if number + 1 < len(self.layers):
            # What the next layer waits for is up to the first token that this one read; beyond what
            # is sure it is for these guesses only.
            before = read.waiting[number + 1][: span.start - read.done[number + 1]]
            read.waiting[number + 1] = torch.cat((before, made))
        read.done[number] += sure
        read.waiting[number] = read.waiting[number][sure:].clone()

    def _hand_out(self, made: dict[Sequence, list[Tensor]]) -> None:
        guesses = [guess for own in made.values() for guess in own]
        if not guesses:
            return
        agreed = iter(self.parallel.agree(torch.stack(guesses)))
        for sequence, own in made.items():
            sequence.drafts += [next(agreed) for _ in own]
