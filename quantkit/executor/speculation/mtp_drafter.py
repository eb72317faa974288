"""Drafts by a checkpoint's own MTP layers.

`MtpDrafter`: a single layer. It reads the main model's hidden state of token i and the token i + 1,
and drafts token i + 2 (arXiv 2412.19437, section 2.2). Further drafts feed the layer its own
output. Its cache is a layer of the main model's, filled for every token of the main model.

`MultiMtpDrafter`: several layers, one for each token ahead. Layer k reads, of token i, the output
of layer k - 1 (layer 0: of the main model) and the token i + 1 + k, and drafts token i + 2 + k.
Each layer has its own cache of all tokens before. So after a step, layer k recomputes the positions
where it read drafts, and the newest position, whose next tokens the layers before it have drafted.
There are no drafts beyond the last layer.

While nothing is drafted, hidden states are only stored (`DraftBacklog`), and read in one pass when
drafting starts again.
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
from quantkit.executor.runner.attention_context import MixedContext
from quantkit.executor.runner.decode_batch import DecodeRows, DevicePositions, StepResult
from quantkit.executor.runner.graphs import Forward
from quantkit.executor.runner.prompt_context import PrefillContext
from quantkit.executor.runner.runner import ForwardPass, Runner, Span
from quantkit.executor.runner.sampler import SampledTokens
from quantkit.executor.sampling.params import Batch
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.executor.speculation.drafter import Drafter
from quantkit.executor.speculation.speculation import Proposer
from quantkit.models.architecture import MtpModel

_BACKLOG_TOKENS = 4096
"""Tokens whose hidden states are stored (at least those of one pass): 32 sequences, 128 steps."""


def make_mtp_drafter(
    layers: tuple[MtpModel, ...], runner: Runner, count: int, parallel: Parallel
) -> Proposer:
    """Drafts at most `count` tokens a step: a single layer all of them, several layers one each."""
    assert layers, "loaded with its MTP layers"
    if len(layers) > 1:
        return MultiMtpDrafter(layers, runner, count, parallel)
    return MtpDrafter(layers[0], runner, count, parallel)


class DraftBacklog:
    """Hidden states of tokens that no MTP layer has read yet; adding a pass costs one copy.

    There is room for a few thousand tokens. When they do not fit, what is stored is discarded and
    its sequences get no more drafts: reading so much for drafts that may not pay would cost more
    than the credit of adaptive_draft_length.py accounts for.
    """

    def __init__(self) -> None:
        self.discarded: WeakSet[Sequence] = WeakSet()
        """Sequences with tokens that can only be read after they are recomputed."""
        self._passes: list[tuple[Items[tuple[Sequence, int, int]], int]] = []
        """Spans, and the row of `_stored` where their hidden states begin."""
        self._stored: Tensor | None = None
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._passes)

    def add(self, hidden: Tensor) -> None:
        """hidden [T, H] of a pass; `assign` must follow."""
        if self._stored is not None and self._count + len(hidden) > len(self._stored):
            self.discarded.update([one for spans, _ in self._passes for one, _, _ in spans])
            self._passes, self._count = [], 0
        if self._stored is None or len(hidden) > len(self._stored):
            self._stored = hidden.new_empty(max(_BACKLOG_TOKENS, len(hidden)), hidden.shape[1])
        self._stored[self._count : self._count + len(hidden)] = hidden

    def assign(self, spans: Items[tuple[Sequence, int, int]], rows: int) -> None:
        """The rows added last belong to these spans; called when the accepted tokens are known."""
        if len(spans) == rows:  # one token each, as in nearly every pass without drafts
            self._passes.append((spans, self._count))
        else:
            row = self._count
            for sequence, start, length in spans:
                kept = min(length, len(sequence.token_ids) - 1 - start)
                self._passes.append(([(sequence, start, kept)], row))
                row += length
        self._count += rows

    def recomputed(self, sequences: Iterable[Sequence]) -> None:
        """These sequences were recomputed: their hidden states are valid again."""
        self.discarded.difference_update(sequences)

    def pop(self) -> tuple[list[Span], Tensor | None]:
        """Remove all -> merged spans of the sequences that still have their cache, and the hidden
        states [T, H] of their tokens."""
        runs: dict[Sequence, list[tuple[int, list[int]]]] = {}
        for spans, row in self._passes:
            for sequence, start, length in spans:
                if (
                    0 < length <= sequence.num_cached - start
                    and sequence.finish_reason is None
                    and sequence not in self.discarded
                ):
                    own = runs.setdefault(sequence, [])
                    if not own or own[-1][0] + len(own[-1][1]) != start:
                        own.append((start, []))
                    own[-1][1].extend(range(row, row + length))
                row += length
        self._passes, self._count = [], 0
        merged = [(one, start, rows) for one, own in runs.items() for start, rows in own]
        if not merged:
            return [], None
        assert self._stored is not None, "spans have hidden states"
        rows = to_device([row for *_, rows in merged for row in rows], self._stored.device)
        return [Span(one, start, len(own)) for one, start, own in merged], self._stored[rows]


class MtpDrafter(Drafter):
    """mtp: the architecture's MTP layer, or a head with the same inputs. own: computes it over its
    own cache, if that is not the model's."""

    def __init__(
        self,
        mtp: Forward,
        runner: Runner,
        count: int,
        parallel: Parallel,
        *,
        own: Runner | None = None,
        max_positions: int = sys.maxsize,
    ) -> None:
        # A cache position holds a token and its next one, so the last one lies before the draft.
        super().__init__(runner, count, parallel, max_positions, own=own or runner, shift=1)
        self.mtp = mtp
        self.steps = self._own.drafter_steps(mtp)
        self._max_rows = 1 + count
        """Rows of a sequence in a step: a token and its drafts. Sliding windows and compressed KV
        have room for no more."""
        self._hidden: Tensor | None = None
        """The layer's output after the rows with logits; None if it did not read the last pass."""
        self._backlog = DraftBacklog()

    def _states(self, hidden: Tensor) -> Tensor:
        """The layer's input states from the main model's output, [T, H]."""
        return hidden

    def _context(self, output: ForwardPass) -> PrefillContext | MixedContext:
        """Attention context of a pass with prompts."""
        assert not isinstance(output.batch, DecodeRows), "a pass with prompts"
        return output.batch()

    def _first_logits(
        self, output: ForwardPass, token_ids: Tensor | None, result_rows: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        self._hidden = None
        if not isinstance(output.batch, DecodeRows):
            return self._read_prompts(output, token_ids, result_rows)
        if self.count == 0:
            self._backlog.add(output.hidden)  # now, while the device is busy
            return None
        batch = output.batch
        if self._backlog:
            batch = batch._replace(tables=batch.tables.copy())  # catching up reuses their memory
            self._catch_up()
        assert token_ids is not None, "every row of a decode pass is sampled"
        self._hidden, logits, greedy = self.steps.run(
            batch, token_ids, self._states(output.hidden), result_rows=result_rows
        )
        return logits, greedy

    def _read_prompts(
        self, output: ForwardPass, token_ids: Tensor | None, result_rows: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        self._backlog.recomputed([sequence for sequence, start, _ in output.spans if start == 0])
        next_ids, rows = self._tensor(_next_tokens(output)), self._tensor(output.logit_rows)
        output_rows = next_ids.new_zeros(1)  # the model returns at least one row
        if token_ids is not None:
            next_ids[rows] = token_ids
            output_rows = rows if result_rows is None else rows[result_rows]
        self._hidden = self.mtp(
            next_ids, self._states(output.hidden), self._context(output), output_rows
        )
        if token_ids is None or self.count == 0:
            return None
        logits = self.mtp.logits(self._hidden)
        return logits, logits.argmax(dim=-1)

    def _next_logits(
        self,
        drafts: Tensor,
        rows: Tensor | None,
        batch: DecodeRows,
        positions: DevicePositions | None,
    ) -> StepResult:
        assert self._hidden is not None, "first drafts were made"
        hidden = self._hidden if rows is None else self._hidden[rows]
        result = self.steps.run(batch, drafts, hidden, positions=positions)
        self._hidden = result.hidden
        return result

    def _after_step(self, output: ForwardPass) -> None:
        if self._hidden is None:
            self._backlog.assign(output.spans, len(output.logit_rows))

    def _num_useful(self, sequence: Sequence) -> int:
        return 0 if sequence in self._backlog.discarded else super()._num_useful(sequence)

    def _catch_up(self) -> None:
        """Read the backlog of the sequences that still have their cache."""
        spans, hidden = self._backlog.pop()
        if hidden is None:
            return
        following = [
            token
            for sequence, start, length in spans
            for token in sequence.token_ids[start + 1 : start + 1 + length]
        ]
        next_ids, states = self._tensor(following), self._states(hidden)
        num_results = None
        if max(span.length for span in spans) <= self._max_rows:
            num_results = self.steps.num_results(
                len(following), max(len(span.sequence.blocks) for span in spans)
            )
        if num_results is not None:
            # As rows of a captured step: launched eagerly they take the time of several steps.
            tokens = [
                (sequence, start + i) for sequence, start, length in spans for i in range(length)
            ]
            result_rows = next_ids.new_zeros(num_results) if num_results else None
            rows = self._own.rows([0] * len(following), tokens)
            self.steps.run(rows, next_ids, states, result_rows=result_rows)
        else:
            self.mtp(next_ids, states, self._own.prompt_context(spans))


def _next_tokens(output: ForwardPass) -> list[int]:
    """The next token of every token of a pass, 0 where it is not known yet."""
    following: list[int] = []
    for sequence, start, length in output.spans:
        known = sequence.token_ids[start + 1 : start + 1 + length]
        following += known + [0] * (length - len(known))
    return following


@dataclass
class _LayerInputs:
    """Progress of the MTP layers on one sequence. done: by layer, how many tokens it has read whose
    next tokens are final; pending: by layer, its input states [n, W] of the tokens after these."""

    done: list[int]
    pending: list[Tensor] = field(default_factory=list)


class MultiMtpDrafter:
    """A `Proposer`. layers: the checkpoint's, in order. count: draft length, at most; may change
    between steps."""

    def __init__(
        self, layers: tuple[MtpModel, ...], runner: Runner, count: int, parallel: Parallel
    ) -> None:
        self.layers, self.count, self.parallel = layers, count, parallel
        self.steps = tuple(runner.drafter_steps(layer) for layer in layers)
        self._runner = runner
        # A step accepts up to `count` drafts and one token more; layer k reads k tokens again.
        # Short convolutions have room for as many.
        self._max_rows = 2 * count
        self._inputs: WeakKeyDictionary[Sequence, _LayerInputs] = WeakKeyDictionary()
        self._backlog = DraftBacklog()

    def launch(self, output: ForwardPass, sampled: SampledTokens | None) -> Tensor | None:
        """As `Proposer.launch`: nothing is drafted before the sampled tokens are known. A pass
        without sampled tokens is read here."""
        if sampled is None:
            self._advance(output, set())
        elif self.count == 0 and isinstance(output.batch, DecodeRows):
            self._backlog.add(output.hidden)
        return None

    def finish(self, output: ForwardPass, advanced: list[Sequence], drafts: list[int]) -> None:
        """As `Proposer.finish`."""
        if self.count > 0:
            self._catch_up()
            self._advance(output, {sequence for sequence, _ in output.counts})
        elif isinstance(output.batch, DecodeRows):
            self._backlog.assign(output.spans, len(output.logit_rows))
        else:
            self._store_decode_rows(output)
            self._advance(output, set(), min_length=2)

    def _store_decode_rows(self, output: ForwardPass) -> None:
        """Add the decoding sequences of a pass with prompts to the backlog."""
        rows, spans, row = [], [], 0
        for span in output.spans:
            if span[2] == 1:
                spans.append(span)
                rows.append(row)
            row += span[2]
        if rows:
            self._backlog.add(output.hidden[to_device(rows, self._runner.device)])
            self._backlog.assign(spans, len(rows))

    def _catch_up(self) -> None:
        spans, hidden = self._backlog.pop()
        if hidden is not None:
            lengths = [span.length for span in spans]
            for (sequence, start, _), part in zip(spans, hidden.split(lengths)):
                self._add(sequence, start, part)

    def _advance(self, output: ForwardPass, drafted: set[Sequence], min_length: int = 1) -> None:
        """Read the spans of a pass of `min_length` tokens and more, and draft for the sequences
        `drafted`."""
        row, counts = 0, dict[Sequence, int]()
        self._backlog.recomputed([sequence for sequence, start, _ in output.spans if start == 0])
        for sequence, start, length in output.spans:
            kept = min(length, len(sequence.token_ids) - 1 - start)  # accepted drafts only
            if (
                length >= min_length
                and sequence.finish_reason is None
                and sequence not in self._backlog.discarded
            ):
                self._add(sequence, start, output.hidden[row : row + kept])
                count = (
                    max(min(self.count, sequence.num_useful_drafts, len(self.layers)), 0)
                    if sequence in drafted
                    else 0
                )
                if count or len(self._inputs[sequence].pending[0]) > self._max_rows:
                    counts[sequence] = count
            row += length
        self._compute(counts)

    def _add(self, sequence: Sequence, start: int, hidden: Tensor) -> None:
        """hidden [n, W]: the main model's output for the tokens from `start` on."""
        inputs = self._inputs.get(sequence)
        if inputs is None or start != inputs.done[0] + len(inputs.pending[0]):  # or recomputed
            count = len(self.layers)
            inputs = self._inputs[sequence] = _LayerInputs([start] * count, [hidden[:0]] * count)
        inputs.pending[0] = torch.cat((inputs.pending[0], hidden))

    def _compute(self, counts: dict[Sequence, int]) -> None:
        """Every layer reads what it can of these sequences, and drafts for those whose count is
        larger than its number."""
        drafted_tokens: dict[Sequence, list[Tensor]] = {one: [] for one in counts}
        for number in range(len(self.layers)):
            spans = [
                span
                for one, count in counts.items()
                if (span := self._span(one, number, count > number)).length
            ]
            if not spans:
                continue
            states = torch.cat(
                [self._inputs[one].pending[number][:length] for one, _, length in spans]
            )
            ends = torch.tensor([span.length for span in spans]).cumsum(0).tolist()
            last_rows = {
                span.sequence: end - 1
                for span, end in zip(spans, ends)
                if counts[span.sequence] > number
            }
            ids, rows = self._ids(spans, number, drafted_tokens), [*last_rows.values()]
            hidden, found = self._read(number, spans, ids, states, rows)
            if found is not None:
                for sequence, draft in zip(last_rows, self._draft(number, [*last_rows], found)):
                    drafted_tokens[sequence].append(draft)
            for span, part in zip(spans, hidden.split([span.length for span in spans])):
                self._store(span, number, part)
        self._assign(drafted_tokens)

    def _read(
        self, number: int, spans: list[Span], ids: Tensor, states: Tensor, rows: list[int]
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """A layer reads spans -> its output for all tokens [T, W], and the logits and likeliest
        tokens of `rows`, if any. Valid until a layer reads again."""
        at = to_device(rows, self._runner.device)
        if rows and max(span.length for span in spans) <= self._max_rows:
            tokens = [(one, start + i) for one, start, length in spans for i in range(length)]
            result = self.steps[number].run(
                self._runner.rows([0] * len(tokens), tokens), ids, states
            )
            return result.hidden, (result.logits[at], result.greedy[at])
        layer = self.layers[number]
        hidden = layer(ids, states, self._runner.prompt_context(spans))
        if not rows:
            return hidden, None
        logits = layer.logits(hidden[at])
        return hidden, (logits, logits.argmax(dim=-1))

    def _span(self, sequence: Sequence, number: int, drafts: bool) -> Span:
        """What a layer reads: tokens whose next tokens are final, or all pending ones if it
        drafts."""
        inputs = self._inputs[sequence]
        first, known = inputs.done[number], len(sequence.token_ids) - 1 - number
        end = first + len(inputs.pending[number])
        return Span(sequence, first, (end if drafts else max(min(end, known), first)) - first)

    def _ids(
        self, spans: list[Span], number: int, drafted_tokens: dict[Sequence, list[Tensor]]
    ) -> Tensor:
        """int64 [T]: the tokens that layer `number` reads along with the states of spans, sampled
        ones, then drafts."""
        ids: list[int] = []
        rows: list[int] = []
        drafts: list[Tensor] = []
        for sequence, start, length in spans:
            tokens, first = sequence.token_ids, start + 1 + number
            for place in range(first, first + length):
                if place >= len(tokens):
                    rows.append(len(ids))
                    drafts.append(drafted_tokens[sequence][place - len(tokens)])
                ids.append(tokens[place] if place < len(tokens) else 0)
        found = to_device(ids, self._runner.device, torch.int64)
        if drafts:
            found[to_device(rows, found.device)] = torch.stack(drafts)
        return found

    def _draft(
        self, number: int, sequences: list[Sequence], found: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        """Draft `number` of each sequence, from its logits and likeliest token; drawn with the
        random number that its position will be sampled with."""
        logits, greedy = found
        batch = Batch.of(
            [one.params for one in sequences], [one.seed for one in sequences], logits.device
        )
        if batch is None:
            return list(greedy.unbind())
        positions = to_device([len(one.token_ids) + number for one in sequences], logits.device)
        return list(self._runner.draw(logits, batch, positions).clone().unbind())

    def _store(self, span: Span, number: int, output: Tensor) -> None:
        """Pass a layer's output on to the next layer; tokens read with drafts stay pending."""
        inputs, known = self._inputs[span.sequence], len(span.sequence.token_ids) - 1 - number
        final = max(min(span.start + span.length, known) - span.start, 0)
        if number + 1 < len(self.layers):
            # The next layer's pending states end where this layer began to read; what follows the
            # final tokens is used for these drafts only.
            before = inputs.pending[number + 1][: span.start - inputs.done[number + 1]]
            inputs.pending[number + 1] = torch.cat((before, output))
        inputs.done[number] += final
        inputs.pending[number] = inputs.pending[number][final:].clone()

    def _assign(self, drafted_tokens: dict[Sequence, list[Tensor]]) -> None:
        drafts = [draft for own in drafted_tokens.values() for draft in own]
        if not drafts:
            return
        agreed = iter(self.parallel.agree(torch.stack(drafts)))
        for sequence, own in drafted_tokens.items():
            sequence.drafts += [next(agreed) for _ in own]
