"""The forward passes of a step: tokens of sequences in, hidden states and logits out."""

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
from quantkit.executor.runner.attention_context import MixedContext
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
    Forward,
    RepeatedSteps,
    SamplingGraph,
    TokenModel,
    power_of_two,
    why_eager,
)
from quantkit.executor.runner.prefill_graphs import PrefillChunk, PrefillRunner
from quantkit.executor.runner.prompt_context import PrefillContext
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
    """Results of a pass; tensors are valid until the next pass.

    spans: (sequence, start, length) of the computed tokens. hidden [T, H]: of these tokens, span
    after span; of a prompt's only the last one, unless all are needed
    (`PrefillRunner.keep_all_hidden`, or prompt log-probabilities). batch: the rows of a decode-only
    pass, else a function that builds the attention context of all tokens. logits float32 [R,
    vocab], greedy int64 [R] (likeliest tokens): of the R rows after which a token is sampled, None
    without any; logit_rows: their indices in `hidden`; counts: how many of them each sequence has.
    """

    spans: Items[tuple[Sequence, int, int]]
    hidden: Tensor
    batch: DecodeRows | Callable[[], PrefillContext | MixedContext]
    logits: Tensor | None
    greedy: Tensor | None
    logit_rows: list[int]
    counts: list[tuple[Sequence, int]]

    @property
    def has_drafts(self) -> bool:
        """Whether a sequence has several rows."""
        return len(self.logit_rows) > len(self.counts)


class Runner:
    """A model with its cache on one device. capture: captures decode steps, by default as the
    device allows. eager: why they must not be captured. repeats: whether eager ones are recorded and
    repeated. experts: the ranks that share the routed experts; with several,
    passes are padded to `DpPadding`."""

    def __init__(
        self,
        model: TokenModel,
        cache: PagedCache,
        capture: Capture | None = None,
        *,
        eager: str = "",
        repeats: bool = False,
        experts: ExpertRanks = NO_RANKS,
    ) -> None:
        self.model, self.cache, self.device, self.experts = model, cache, cache.device, experts
        self._why_eager = eager or ("" if capture else why_eager(self.device))
        self._capture = None if self._why_eager else capture or DeviceCapture(self.device)
        self.steps = DecodeSteps(model, cache, self._capture, self._why_eager, model.ngram_rows)
        self._num_before = max((one.size - 1 for one in model.ngram_rows), default=0)
        """Tokens before each that n-grams begin with."""
        self._repeated = RepeatedSteps(model, cache) if repeats and not self._capture else None
        self._given_capture = capture
        self._in_flight: AsyncDecode | AsyncVerification | None = None
        # Eager steps keep the host busy. An NPU's graphs need lengths from the host, and rows of
        # n-gram tables are read there, by the tokens. Data-parallel ranks agree on every pass first.
        self._may_launch_async = (
            self._capture is not None
            and self.device.type != "npu"
            and experts.size == 1
            and not model.ngram_rows
        )
        self._tables, self._decode_batch = BlockTables(), DecodeBatch(cache.block_size)
        # Prompt attention on an NPU needs lengths on the host. Data-parallel ranks would capture at
        # different times.
        self.prefill_runner = PrefillRunner(
            model, cache, None if self.device.type == "npu" or experts.size > 1 else self._capture
        )
        # An NPU's graphs are updated with lengths, which sampling has none of. Graphs of one pool
        # overwrite each other's results, and sampling runs before all results of a pass have been
        # read, so it has its own pool.
        self.draw = SamplingGraph(
            capture
            or (
                DeviceCapture(self.device) if self._capture and self.device.type == "cuda" else None
            )
        )

    def drafter_steps(self, layer: Forward) -> DecodeSteps:
        """Decode steps of a drafter over this cache. Its graphs have their own pool: they are
        replayed while the model's last results are still needed."""
        capture = None
        if self._capture is not None:
            capture = self._given_capture or DeviceCapture(self.device)
        return DecodeSteps(layer, self.cache, capture, self._why_eager)

    @property
    def why_eager(self) -> str:
        """Why decode steps run eagerly; empty where they are captured."""
        return self.steps.failure

    def prefill(self, parts: list[tuple[Sequence, int]]) -> ForwardPass:
        """The next tokens of prompts; complete prompts are sampled."""
        return self._with_prompts([], _prompt_spans(parts))

    def decode(self, sequences: list[Sequence]) -> ForwardPass:
        """The newest token of each sequence and its drafts: all are sampled. Uses the pass in
        flight if `launch_async_decode` or `launch_async_verification` launched one."""
        launched, self._in_flight = self._in_flight, None
        if launched is None:
            return self._decode_only(sequences)
        if isinstance(launched, AsyncDecode):
            return self._decoded(sequences, *launched.select(sequences))
        rows = self._decode_rows(sequences, _num_rows(sequences))
        return self._decoded(sequences, rows, launched.select(sequences))

    @property
    def can_launch_async(self) -> bool:
        """Whether a pass may be launched before the tokens of the one before it are known."""
        return self._may_launch_async and not self.steps.failure

    @property
    def has_async(self) -> bool:
        """Whether a pass is in flight that `decode` has not returned."""
        return self._in_flight is not None

    def launch_async_decode(self, token_ids: Tensor) -> None:
        """Launch the pass after the one that `decode` just returned, without drafts: token_ids
        int64 [B] were sampled in it. Does nothing if a row has no block yet or the step is not
        captured. Invalidates the tensors of that pass."""
        sequences = self._decode_batch.sequences
        rows = self._decode_batch.next(sequences, in_flight=1)
        if rows is not None and self.steps.has(*rows.tables.shape):
            self._in_flight = AsyncDecode(sequences, rows, self.steps.run(rows, token_ids))

    def launch_async_verification(
        self, counts: list[tuple[Sequence, int]], token_ids: Tensor, drafted: Tensor
    ) -> None:
        """As `launch_async_decode`, with drafts. counts: of the pass that `decode` just returned;
        token_ids int64 [R] were sampled in it. drafted: accepted drafts of each sequence, then the
        new drafts, one row of sequences after the other. Does nothing, either, if a sequence can
        use fewer drafts, or layers prefill sequence by sequence.
        """
        if self.cache.prefills_per_sequence:
            return
        number, size = len(counts), self.cache.block_size
        each = len(drafted) // number
        beyond = each - 1  # positions that the pass may reach after its rows
        if any(
            [
                one.num_useful_drafts < count + beyond
                or len(one.blocks) * size < len(one.token_ids) + count + beyond
                for one, count in counts
            ]
        ):
            return
        sequences = [one for one, _ in counts]
        tables = self._tables.of([one.blocks for one in sequences for _ in range(each)])
        if not self.steps.has(*tables.shape):
            return
        firsts = [*itertools.accumulate([count for _, count in counts], initial=0)][:-1]
        own = np.column_stack(
            (firsts, [len(one.token_ids) for one in sequences], tables[::each])
        ).astype(np.int32)
        known = torch.from_numpy(own).to(self.device, non_blocking=self.device.type == "cuda")
        tokens, positions, slots = next_rows(known, token_ids, drafted, size)
        zeros = np.zeros(number * each, dtype=np.int64)  # in place of what the device knows
        states = np.array([one.state for one in sequences], dtype=np.int64).repeat(each)
        result = self.steps.run(
            DecodeRows(zeros, zeros, zeros, tables, states),
            tokens,
            positions=DevicePositions(positions, slots),
        )
        self._in_flight = AsyncVerification(sequences, each, result)

    def drop_async(self) -> None:
        """Ignore the pass in flight."""
        self._in_flight = None

    def mixed(self, sequences: list[Sequence], parts: list[tuple[Sequence, int]]) -> ForwardPass:
        """`decode` of `sequences` and `prefill` of `parts` in one pass."""
        return self._with_prompts(sequences, _prompt_spans(parts))

    def dp_pass(self, step: ScheduledStep, padding: DpPadding) -> ForwardPass:
        """This rank's part, which may be empty, of a pass that all data-parallel ranks compute
        together."""
        if padding.tokens:
            return self._with_prompts(step.decode, _prompt_spans(step.prefill), padding)
        return self._decode_only(step.decode, padding)

    def _decode_only(
        self, sequences: list[Sequence], padding: DpPadding | None = None
    ) -> ForwardPass:
        count = _num_rows(sequences)
        rows = self._decode_rows(sequences, count, padding)
        self._expect_rows(count, 0, padding)
        repeated = None if self._repeated is None else self._repeated.run(rows)
        result = repeated or self.steps.run(rows)
        if padding is not None:
            result = StepResult(*(part[:count] for part in result))
        return self._decoded(sequences, rows, result)

    def _decoded(
        self, sequences: list[Sequence], rows: DecodeRows, result: StepResult
    ) -> ForwardPass:
        """A row for each sequence and each draft."""
        _, logits, greedy = result
        spans: Items[tuple[Sequence, int, int]]
        if len(greedy) > len(sequences):
            spans = _decode_spans(sequences)
            counts = [(sequence, length) for sequence, _, length in spans]
        else:
            spans = list(zip(sequences, rows.positions.tolist(), repeat(1)))
            counts = self._decode_batch.counts
            if sequences != self._decode_batch.sequences:
                counts = [(sequence, 1) for sequence in sequences]
        logit_rows = list(range(len(greedy)))
        return ForwardPass(spans, result.hidden, rows, logits, greedy, logit_rows, counts)

    def _with_prompts(
        self, sequences: list[Sequence], prompts: list[Span], padding: DpPadding | None = None
    ) -> ForwardPass:
        chunks = [
            PrefillChunk(
                one.token_ids[start : start + length],
                start,
                one.blocks,
                one.state,
                one.token_ids[max(start - self._num_before, 0) : start],
            )
            for one, start, length in prompts
        ]
        logit_rows = list(range(_num_rows(sequences)))
        num_decode, num_prompt = len(logit_rows), sum(length for _, _, length in prompts)
        decode_rows = None
        if sequences or (padding is not None and padding.rows):
            decode_rows = self._decode_rows(sequences, num_decode, padding)
        self._expect_rows(num_decode, num_prompt, padding)
        all_hidden = (
            padding is not None
            or self.prefill_runner.keep_all_hidden
            or any(one.params.prompt_logprobs is not None for one, _, _ in prompts)
        )
        padded = chunks
        if padding is not None and (missing := padding.tokens - num_prompt):
            # Padding tokens are a prompt of their own, which lies in block 0.
            blocks = [0] * -(-missing // self.cache.block_size)
            padded = [*chunks, PrefillChunk([0] * missing, 0, blocks)]
        hidden = self.prefill_runner.run(decode_rows, padded, all_hidden=all_hidden)
        if padding is not None:
            own = hidden[padding.rows : padding.rows + num_prompt]
            hidden = torch.cat((hidden[:num_decode], own))
        counts, end = [(sequence, 1 + len(sequence.drafts)) for sequence in sequences], num_decode
        for sequence, start, length in prompts:
            end += length if all_hidden else 1
            sequence.num_cached += length
            if start + length == len(sequence.token_ids):
                logit_rows.append(end - 1)
                counts.append((sequence, 1))
        spans = [*_decode_spans(sequences), *prompts]
        batch = partial(self.prefill_runner.context, decode_rows, chunks)
        if not logit_rows:
            return ForwardPass(spans, hidden, batch, None, None, logit_rows, counts)
        sampled = hidden
        if len(logit_rows) < len(hidden):  # sending indices to the device waits for it
            sampled = hidden[torch.tensor(logit_rows, device=self.device)]
        logits = self.model.logits(sampled)
        return ForwardPass(spans, hidden, batch, logits, logits.argmax(dim=-1), logit_rows, counts)

    def prompt_context(
        self, spans: Items[tuple[Sequence, int, int]]
    ) -> PrefillContext | MixedContext:
        """Attention context of spans, as of prompts."""
        return self.prefill_runner.context(
            None,
            [
                PrefillChunk([0] * length, start, one.blocks, one.state)
                for one, start, length in spans
            ],
        )

    def _decode_rows(
        self, sequences: list[Sequence], count: int, padding: DpPadding | None = None
    ) -> DecodeRows:
        """count: rows, drafts included."""
        if count == len(sequences):
            rows = self._decode_batch.next(sequences) or self._decode_batch.keep(
                sequences,
                self.rows(
                    [one.token_ids[-1] for one in sequences],
                    [(one, one.num_cached) for one in sequences],
                ),
            )
        else:
            rows = self.rows(
                [token for one in sequences for token in (one.token_ids[-1], *one.drafts)],
                [
                    (one, one.num_cached + i)
                    for one in sequences
                    for i in range(1 + len(one.drafts))
                ],
            )
        return rows if padding is None else rows.padded(padding.rows, padding.width)

    def _expect_rows(self, num_decode: int, num_prompt: int, padding: DpPadding | None) -> None:
        """Announce to the experts which rows of the next padded pass are real."""
        if padding is not None:
            # Decode steps are captured for powers of two.
            most = power_of_two(max(padding.rows, 1)) + padding.tokens
            self.experts.expect(most, (0, num_decode), (padding.rows, padding.rows + num_prompt))

    def rows(self, token_ids: list[int], tokens: list[tuple[Sequence, int]]) -> DecodeRows:
        """Rows of token_ids, one per (sequence, position)."""
        size = self.cache.block_size
        positions = np.array([position for _, position in tokens], dtype=np.int64)
        tables = self._tables.of([sequence.blocks for sequence, _ in tokens])
        block, place = np.divmod(positions, size)
        slots = tables[np.arange(len(tokens)), block] * size + place
        states = np.array([sequence.state for sequence, _ in tokens], dtype=np.int64)
        before = [self._before(sequence, position) for sequence, position in tokens]
        return DecodeRows(
            np.array(token_ids, dtype=np.int64),
            positions,
            slots,
            tables,
            states,
            np.array(before, dtype=np.int64).reshape(len(tokens), self._num_before),
        )

    def _before(self, sequence: Sequence, position: int) -> list[int]:
        """As of `DecodeRows`, at a position of a sequence and its drafts."""
        ids, drafts = sequence.token_ids, sequence.drafts
        return [
            -1 if at < 0 else ids[at] if at < len(ids) else drafts[at - len(ids)]
            for at in range(position - 1, position - 1 - self._num_before, -1)
        ]


def _num_rows(sequences: list[Sequence]) -> int:
    """One for each newest token and each draft."""
    return len(sequences) + sum([len(one.drafts) for one in sequences])


def _prompt_spans(parts: list[tuple[Sequence, int]]) -> list[Span]:
    return [Span(sequence, sequence.num_cached, length) for sequence, length in parts]


def _decode_spans(sequences: list[Sequence]) -> list[tuple[Sequence, int, int]]:
    """Plain tuples: creating `Span`s would take longer than everything else here."""
    return [(sequence, sequence.num_cached, 1 + len(sequence.drafts)) for sequence in sequences]
