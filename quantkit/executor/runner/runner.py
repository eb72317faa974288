"""The passes of a step: tokens of sequences in, hidden states and logits out."""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantkit.executor.cache.cache import PagedCache
from quantkit.executor.ranks.expert_parallel import NO_RANKS, ExpertRanks
from quantkit.executor.runner.attention_context import MixedContext, PrefillContext
from quantkit.executor.runner.decode_batch import (
    AsyncDecode,
    AsyncVerification,
    BlockTables,
    DecodeBatch,
    DecodeRows,
    DevicePositions,
    StepResult,
    next_rows,
)
from quantkit.executor.runner.graphs import (
    Capture,
    DecodeSteps,
    DeviceCapture,
    EagerSteps,
    Forward,
    SamplingGraph,
    TokenModel,
    power_of_two,
    why_eager,
)
from quantkit.executor.runner.prefill_graphs import PrefillChunk, PrefillRunner
from quantkit.executor.scheduler.data_parallel import DpPadding
from quantkit.executor.scheduler.scheduler import ScheduledStep
from quantkit.executor.scheduler.sequence import Sequence


class Span(NamedTuple):
    """Consecutive tokens of one sequence in a pass, from position `start` on."""

    sequence: Sequence
    start: int
    length: int


@dataclass(frozen=True)
class ForwardPass:
    """What a pass computed: `hidden` [T, H] of the spans' tokens, one span after the other; a span
    as `Span` has it. Where nobody reads them all (`PrefillRunner.keep_all_hidden`, and no span's sequence
    asks for log-probabilities of its prompt), of a prompt's its last one alone.

    where: the tokens' places in the cache, `DecodeRows` where each attended by itself; else what
    makes the context of all. logits float32 [R, vocab] and greedy int64 [R] (the likeliest tokens):
    of the R tokens whose successors are to be chosen, None where there are none; rows: which of
    `hidden` these are; counts: which sequence they belong to, and how many each has. Tensors are
    valid until the next pass.
    """

    spans: Items[tuple[Sequence, int, int]]
    hidden: Tensor
    where: DecodeRows | Callable[[], PrefillContext | MixedContext]
    logits: Tensor | None
    greedy: Tensor | None
    rows: list[int]
    counts: list[tuple[Sequence, int]]

    @property
    def is_read_once(self) -> bool:
        """Whether nothing is read of it when its tokens are known: of answers alone, none of which
        wants log-probabilities."""
        return isinstance(self.where, DecodeRows) and all(
            [sequence.params.logprobs is None for sequence, _ in self.counts]
        )

    @property
    def has_drafts(self) -> bool:
        """Whether a sequence has several rows."""
        return len(self.rows) > len(self.counts)


class Runner:
    """A model with its cache on one device. capture: how decode steps are captured; by default as
    the device allows. eager: why they
    must not be. experts: the ranks that share the routed experts; where there are several, passes
    are padded to a `Room`."""

    def __init__(
        self,
        model: TokenModel,
        cache: PagedCache,
        capture: Capture | None = None,
        *,
        eager: str = "",
        experts: ExpertRanks = NO_RANKS,
    ) -> None:
        self.model, self.cache, self.device, self.experts = model, cache, cache.device, experts
        self._why_eager = eager or ("" if capture else why_eager(self.device))
        self._capture = None if self._why_eager else capture or DeviceCapture(self.device)
        self.steps = self._steps(model, self._capture)
        self._given = capture
        self._next: AsyncDecode | AsyncVerification | None = None
        # Eager steps keep the host busy. An NPU's graphs are told lengths; ranks with requests of
        # their own agree on every pass first.
        self._may_launch_next = (
            self._capture is not None and self.device.type != "npu" and experts.size == 1
        )
        self._tables, self._kept = BlockTables(), DecodeBatch(cache.block_size)
        # Attention of prompts on an NPU wants lengths on the host. Ranks with requests of their own
        # would capture at different times.
        self.prefill_runner = PrefillRunner(
            model, cache, None if self.device.type == "npu" or experts.size > 1 else self._capture
        )
        # An NPU's graphs want to know lengths, and draws have none. Graphs of one pool write over
        # each other's results, and draws come before all of a pass's have been read: theirs is
        # another.
        self.draw = SamplingGraph(
            capture
            or (
                DeviceCapture(self.device) if self._capture and self.device.type == "cuda" else None
            )
        )

    def drafter_steps(self, layer: Forward) -> DecodeSteps | EagerSteps:
        """Decode steps over this cache of a layer that guesses. Its graphs have a pool of their
        own: they are replayed while the model's last results are still to be read."""
        return self._steps(
            layer, None if self._capture is None else self._given or DeviceCapture(self.device)
        )

    def _steps(self, model: Forward, capture: Capture | None) -> DecodeSteps | EagerSteps:
        return (
            EagerSteps(model, self.cache, self._why_eager)
            if capture is None
            else DecodeSteps(model, self.cache, capture)
        )

    @property
    def why_eager(self) -> str:
        """Why decode steps are computed launch by launch; empty where they are captured."""
        return self.steps.failure

    def prefill(self, parts: list[tuple[Sequence, int]]) -> ForwardPass:
        """The next tokens of prompts; successors are chosen where a prompt is complete."""
        return self._with_prompts([], _prompt_spans(parts))

    def decode(self, sequences: list[Sequence]) -> ForwardPass:
        """The newest token of each sequence, and the drafted ones after it: successors of all are
        chosen. Where `launch_async_decode` or
        `launch_async_verification` launched them, all are of that pass."""
        launched, self._next = self._next, None
        if launched is None:
            return self._without_prompts(sequences)
        if isinstance(launched, AsyncDecode):
            return self._decoded(sequences, *launched.of(sequences))
        return self._checked(
            sequences, self._answer_rows(sequences, _num_rows(sequences)), launched.of(sequences)
        )

    @property
    def can_launch_async(self) -> bool:
        """Whether a pass may be launched before the tokens of the one before it are known."""
        return self._may_launch_next and not self.steps.failure

    @property
    def has_async(self) -> bool:
        """Whether a pass is under way that `decode` has not returned."""
        return self._next is not None

    def launch_async_decode(self, token_ids: Tensor) -> None:
        """Launch the pass behind the one that `decode` just returned, without drafts: token_ids
        int64 [B] were chosen in it. Nothing is launched where a row has no block yet, or the step
        is not captured. Tensors of that pass are not valid any more."""
        answers = self._kept.answers
        rows = self._kept.next(answers, unread=1)
        if rows is not None and self.steps.has(*rows.tables.shape):
            self._next = AsyncDecode(answers, rows, self.steps.run(rows, token_ids))

    def launch_async_verification(
        self, counts: list[tuple[Sequence, int]], token_ids: Tensor, guessed: Tensor
    ) -> None:
        """As `launch_async_decode`, with guesses. counts: of the pass that `decode` just returned;
        token_ids int64 [R] were chosen in it.

        guessed: of each sequence how many of its guesses were right, and then those that are new,
        one row of sequences after the other. Nothing is launched, either, where fewer guesses may
        be of use, or layers keep states or index keys.
        """
        if self.cache.prefills_per_sequence:
            return
        number, size = len(counts), self.cache.block_size
        each = len(guessed) // number
        beyond = each - 1  # places that a step may reach behind those of its rows
        if any(
            [
                one.num_useful_drafts < count + beyond
                or len(one.blocks) * size < len(one.token_ids) + count + beyond
                for one, count in counts
            ]
        ):
            return
        answers = [one for one, _ in counts]
        tables = self._tables.of([one.blocks for one in answers for _ in range(each)])
        if not self.steps.has(*tables.shape):
            return
        firsts = [*itertools.accumulate([count for _, count in counts], initial=0)][:-1]
        own = np.column_stack(
            (firsts, [len(one.token_ids) for one in answers], tables[::each])
        ).astype(np.int32)
        known = torch.from_numpy(own).to(self.device, non_blocking=self.device.type == "cuda")
        tokens, positions, slots = next_rows(known, token_ids, guessed, size)
        nobodys = np.zeros(number * each, dtype=np.int64)
        rows = DecodeRows(
            nobodys,
            nobodys,
            nobodys,
            tables,
            np.array([one.state for one in answers], dtype=np.int64).repeat(each),
        )
        self._next = AsyncVerification(
            answers, each, self.steps.run(rows, tokens, places=DevicePositions(positions, slots))
        )

    def drop_async(self) -> None:
        """Nobody wants what was launched."""
        self._next = None

    def mixed(self, sequences: list[Sequence], parts: list[tuple[Sequence, int]]) -> ForwardPass:
        """Both in one pass: as `decode` of `sequences` and `prefill` of `parts`."""
        return self._with_prompts(sequences, _prompt_spans(parts))

    def joint(self, step: ScheduledStep, room: DpPadding) -> ForwardPass:
        """This rank's part, which may be nothing, of a pass that several ranks compute together."""
        if room.tokens:
            return self._with_prompts(step.decode, _prompt_spans(step.prefill), room)
        return self._without_prompts(step.decode, room)

    def _without_prompts(
        self, answers: list[Sequence], room: DpPadding | None = None
    ) -> ForwardPass:
        count = _num_rows(answers)
        rows = self._answer_rows(answers, count, room)
        self._expect(count, 0, room)
        result = self.steps.run(rows)
        if room is not None:
            result = StepResult(*(part[:count] for part in result))
        return self._checked(answers, rows, result)

    def _checked(
        self, answers: list[Sequence], rows: DecodeRows, result: StepResult
    ) -> ForwardPass:
        """A row each, and one for every guess."""
        count = len(result.greedy)
        if count == len(answers):
            return self._decoded(answers, rows, result)
        spans, counts = (
            _answer_spans(answers),
            [(sequence, 1 + len(sequence.drafts)) for sequence in answers],
        )
        return ForwardPass(
            spans, result.hidden, rows, result.logits, result.greedy, list(range(count)), counts
        )

    def _decoded(
        self, answers: list[Sequence], rows: DecodeRows, result: StepResult
    ) -> ForwardPass:
        """A row each."""
        spans = list(zip(answers, rows.positions.tolist(), repeat(1)))
        counts = (
            self._kept.counts
            if answers == self._kept.answers
            else [(sequence, 1) for sequence in answers]
        )
        return ForwardPass(
            spans,
            result.hidden,
            rows,
            result.logits,
            result.greedy,
            list(range(len(answers))),
            counts,
        )

    def _with_prompts(
        self, answers: list[Sequence], prompts: list[Span], room: DpPadding | None = None
    ) -> ForwardPass:
        own = [
            PrefillChunk(one.token_ids[start : start + length], start, one.blocks, one.state)
            for one, start, length in prompts
        ]
        rows, new = list(range(_num_rows(answers))), sum(length for _, _, length in prompts)
        given = (
            self._answer_rows(answers, len(rows), room)
            if answers or (room is not None and room.rows)
            else None
        )
        self._expect(len(rows), new, room)
        whole = (
            room is not None
            or self.prefill_runner.keep_all_hidden
            or any(one.params.prompt_logprobs is not None for one, _, _ in prompts)
        )
        hidden = self.prefill_runner.run(
            given, own if room is None else [*own, *self._nobodys(room.tokens - new)], whole=whole
        )
        if room is not None:
            hidden = torch.cat((hidden[: len(rows)], hidden[room.rows : room.rows + new]))
        counts, end = [(sequence, 1 + len(sequence.drafts)) for sequence in answers], len(rows)
        for sequence, start, length in prompts:
            end += length if whole else 1
            sequence.num_cached += length
            if start + length == len(sequence.token_ids):
                rows.append(end - 1)
                counts.append((sequence, 1))
        spans, where = (
            [*_answer_spans(answers), *prompts],
            partial(self.prefill_runner.context, given, own),
        )
        if not rows:
            return ForwardPass(spans, hidden, where, None, None, rows, counts)
        every = len(rows) == len(hidden)  # a list that goes to the device waits for it
        logits = self.model.logits(
            hidden if every else hidden[torch.tensor(rows, device=self.device)]
        )
        return ForwardPass(spans, hidden, where, logits, logits.argmax(dim=-1), rows, counts)

    def prompt_context(
        self, spans: Items[tuple[Sequence, int, int]]
    ) -> PrefillContext | MixedContext:
        """Where so many tokens of sequences attend, as prompts do."""
        return self.prefill_runner.context(
            None,
            [
                PrefillChunk([0] * length, start, one.blocks, one.state)
                for one, start, length in spans
            ],
        )

    def _answer_rows(
        self, answers: list[Sequence], count: int, room: DpPadding | None = None
    ) -> DecodeRows:
        """count: of them all, drafts included."""
        if count == len(answers):
            rows = self._kept.next(answers) or self._kept.keep(
                answers,
                self.rows(
                    [one.token_ids[-1] for one in answers],
                    [(one, one.num_cached) for one in answers],
                ),
            )
        else:
            token_ids = [token for one in answers for token in (one.token_ids[-1], *one.drafts)]
            rows = self.rows(
                token_ids,
                [(one, one.num_cached + i) for one in answers for i in range(1 + len(one.drafts))],
            )
        return rows if room is None else rows.padded(room.rows, room.width)

    def _nobodys(self, tokens: int) -> list[PrefillChunk]:
        """What fills a pass with prompts up: tokens that all lie in block 0."""
        return (
            [PrefillChunk([0] * tokens, 0, [0] * -(-tokens // self.cache.block_size))]
            if tokens
            else []
        )

    def _expect(self, answers: int, tokens: int, room: DpPadding | None) -> None:
        """Tell the experts which rows of the next pass are somebody's."""
        if room is not None:
            most = (
                power_of_two(max(room.rows, 1)) + room.tokens
            )  # steps of answers are captured for powers of two
            self.experts.expect(most, (0, answers), (room.rows, room.rows + tokens))

    def rows(self, token_ids: list[int], tokens: list[tuple[Sequence, int]]) -> DecodeRows:
        """token_ids, one per (sequence, position), with where they lie in the cache."""
        size = self.cache.block_size
        positions = np.array([position for _, position in tokens], dtype=np.int64)
        tables = self._tables.of([sequence.blocks for sequence, _ in tokens])
        block, place = np.divmod(positions, size)
        slots = tables[np.arange(len(tokens)), block] * size + place
        states = np.array([sequence.state for sequence, _ in tokens], dtype=np.int64)
        return DecodeRows(np.array(token_ids, dtype=np.int64), positions, slots, tables, states)


def _num_rows(answers: list[Sequence]) -> int:
    """One for each newest token, and for each draft."""
    return len(answers) + sum([len(one.drafts) for one in answers])


def _prompt_spans(parts: list[tuple[Sequence, int]]) -> list[Span]:
    return [Span(sequence, sequence.num_cached, length) for sequence, length in parts]


def _answer_spans(sequences: list[Sequence]) -> list[tuple[Sequence, int, int]]:
    """As spans, without their names, which take longer to give than all else here."""
    return [(sequence, sequence.num_cached, 1 + len(sequence.drafts)) for sequence in sequences]
