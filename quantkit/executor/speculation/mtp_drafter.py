"""Guesses by the checkpoint's own MTP layer.

The layer reads the main model's hidden state of token i and token i + 1, and guesses token i + 2
(arXiv 2412.19437, section 2.2). Further guesses feed the layer its own output. Its cache is a layer
of the main model's, filled for every token that the main model computed.

Where no guesses are wanted it is not run for every token: the tokens' hidden states are kept
(unread.py), and read at once when it is needed again, few of them by a captured step.
"""

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from quantkit.common.devices import to_device
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.attention_context import MixedContext, PrefillContext
from quantkit.executor.runner.decode_batch import DecodeRows, DevicePositions, StepResult
from quantkit.executor.runner.graphs import Forward
from quantkit.executor.runner.runner import ForwardPass, Runner, Span
from quantkit.executor.runner.sampler import SampledTokens
from quantkit.executor.sampling.params import Batch
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.executor.speculation.drafter import Drafter
from quantkit.executor.speculation.speculation import Proposer
from quantkit.models.architecture import MtpModel


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
        self.steps = self._own.drafter_steps(mtp)
        self._most_rows = 1 + count
        """Of a sequence in a step: a token and its guesses. Windows and compressed entries have
        room for no more."""
        self._hidden: Tensor | None = None
        """The layer's own output behind the rows that count; None where it did not read the last
        pass."""
        self._unread = DraftBacklog()

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
        self,
        guessed: Tensor,
        rows: Tensor | None,
        where: DecodeRows,
        places: DevicePositions | None,
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


_MOST = 4096
"""Tokens whose hidden states are held, those of one pass at least: of 32 answers for 128 steps."""


class DraftBacklog:
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


def make_mtp_drafter(
    layers: tuple[MtpModel, ...], runner: Runner, count: int, parallel: Parallel
) -> Proposer:
    """What guesses `count` tokens a step, at most: of several layers each the token behind the one
    before, a single one all of them."""
    assert layers, "loaded with its MTP layers"
    if len(layers) > 1:
        return MultiMtpDrafter(layers, runner, count, parallel)
    return MtpDrafter(layers[0], runner, count, parallel)


@dataclass
class _Read:
    """What the layers have read of one sequence. done: by layer, how many tokens it has read as
    they are; waiting [n, W], by layer: what it reads of the tokens behind these."""

    done: list[int]
    waiting: list[Tensor] = field(default_factory=list)


class MultiMtpDrafter:
    """As `speculation.Source`. layers: the checkpoint's, in order. count: tokens guessed a step, at
    most; may be changed between steps."""

    def __init__(
        self, layers: tuple[MtpModel, ...], runner: Runner, count: int, parallel: Parallel
    ) -> None:
        self.layers, self.count, self.parallel = layers, count, parallel
        self.steps = tuple(runner.drafter_steps(layer) for layer in layers)
        """Of each layer."""
        self._runner = runner
        # A step keeps `count` guesses and the token behind them; layer k reads k tokens again.
        # Short convolutions have room for as many.
        self._most_rows = 2 * count
        self._read: WeakKeyDictionary[Sequence, _Read] = WeakKeyDictionary()
        self._unread = DraftBacklog()

    def begin(self, done: ForwardPass, chosen: SampledTokens | None) -> Tensor | None:
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
                    max(min(self.count, sequence.num_useful_drafts, len(self.layers)), 0)
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
