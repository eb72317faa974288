"""Choose the token after every row of a pass, on the device: process the logits as requests ask,
then sample. Also the log-probabilities that requests ask for.

What sampling needs of a request (sampling/params.py) stays on the device while the same sequences
come again; then only the positions of their tokens are sent.

Every row is processed for the tokens before it, drafts included, so that sampled tokens with drafts
are those without. A row after a rejected draft does not matter: its token is not kept. Token counts
of each request are kept on the device, where each step adds its tokens; all rows are processed
together. Grammar masks are written by a thread while the step runs, and copied to the device once.
"""

import math
import os
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantkit.common.devices import to_device
from quantkit.common.errors import QuantkitError
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.graphs import Forward, SamplingGraph
from quantkit.executor.runner.runner import ForwardPass
from quantkit.executor.sampling.params import Batch, log_probabilities
from quantkit.executor.scheduler.scheduler import ScheduledStep
from quantkit.executor.scheduler.sequence import Sequence, TokenLogprob

_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""That write grammar masks."""
_SCORED_AT_ONCE = 256
"""Prompt tokens whose logits are in memory at a time."""


class SampledTokens(NamedTuple):
    """token_ids int64 [R] on the device; the sampling parameters and the positions in the sequences
    int64 [R] that they were drawn with, None where all are greedy."""

    token_ids: Tensor
    batch: Batch | None = None
    positions: Tensor | None = None


class _RowParams(NamedTuple):
    """Rows per sequence and their parameters. processed: whether any of them alters logits, aside
    from grammars."""

    counts: list[tuple[Sequence, int]]
    batch: Batch | None
    processed: bool


class Sampler:
    """eos_ids: returns the tokens that may end a sequence."""

    def __init__(
        self, vocab: int, device: torch.device, eos_ids: Callable[[], frozenset[int]]
    ) -> None:
        self._vocab, self._device, self._eos_ids = vocab, device, eos_ids
        self._processor, self._masks = LogitsProcessor(vocab, device), GrammarMasks()
        self._last = _RowParams([], None, False)

    def prepare(self, step: ScheduledStep) -> None:
        """Start what can be computed before the step's logits are there."""
        self._masks.start(step.rows_to_sample if step.has_grammar else ())

    def sample(self, output: ForwardPass, draw: SamplingGraph) -> SampledTokens:
        """Of a pass whose step was prepared."""
        assert output.logits is not None, output.counts
        assert output.greedy is not None, output.counts
        first_masks, allowed = self._masks.result(self._device, self._vocab)
        counts, batch, processed = (
            self._last if output.counts == self._last.counts else self._params(output.counts)
        )
        logits = output.logits
        if processed or allowed is not None:
            logits = self._processor.process(logits, counts, self._eos_ids(), first_masks, allowed)
        if batch is None:
            return SampledTokens(
                output.greedy if logits is output.logits else logits.argmax(dim=-1)
            )
        positions = to_device(
            [len(sequence.token_ids) + i for sequence, count in counts for i in range(count)],
            self._device,
        )
        return SampledTokens(draw(logits, batch, positions), batch, positions)

    def _params(self, counts: list[tuple[Sequence, int]]) -> _RowParams:
        rows = [sequence for sequence, count in counts for _ in range(count)]
        batch = Batch.of([one.params for one in rows], [one.seed for one in rows], self._device)
        processed = any(one.alters_logits or one.params.min_new_tokens for one in rows)
        self._last = _RowParams(list(counts), batch, processed)
        return self._last


def row_logprobs(
    counts: list[tuple[Sequence, int]], logits: Tensor, sampled: list[int]
) -> list[TokenLogprob]:
    """As `token_logprobs`, for sequences with so many rows each; empty if no request wants any."""
    if not any([sequence.params.logprobs is not None for sequence, _ in counts]):
        return []
    alternatives = [sequence.params.logprobs for sequence, count in counts for _ in range(count)]
    return token_logprobs(alternatives, logits, sampled)


def token_logprobs(
    counts: list[int | None], logits: Tensor, sampled: list[int]
) -> list[TokenLogprob]:
    """One per row of logits [R, V], with as many alternatives as the row's request wants."""
    result = log_probabilities(
        logits, torch.tensor(sampled, device=logits.device), max(count or 0 for count in counts)
    )
    rows = zip(
        counts,
        sampled,
        result.chosen.tolist(),
        result.top_ids.tolist(),
        result.top_values.tolist(),
        result.ranks.tolist(),
    )
    return [
        TokenLogprob(token, one, tuple(zip(ids, values))[: count or 0], rank)
        for count, token, one, ids, values, rank in rows
    ]


def score_prompts(output: ForwardPass, model: Forward) -> None:
    """Add log-probabilities of the prompt tokens in the pass to the sequences that ask for them."""
    if isinstance(output.batch, DecodeRows):
        return
    begin = 0
    for sequence, start, length in output.spans:
        if sequence.params.prompt_logprobs is not None:
            _score(sequence, start, output.hidden[begin : begin + length], model)
        begin += length


def _score(sequence: Sequence, start: int, hidden: Tensor, model: Forward) -> None:
    """hidden [length, H] of the tokens from `start` on; a token's row scores the next token.
    Recomputed tokens are not scored again."""
    known = sequence.prompt_logprobs
    first, end = max(start, len(known)), min(start + len(hidden), sequence.prompt_len - 1)
    for begin in range(first, end, _SCORED_AT_ONCE):
        stop = min(begin + _SCORED_AT_ONCE, end)
        logits = model.logits(hidden[begin - start : stop - start])
        following = sequence.token_ids[begin + 1 : stop + 1]
        known += token_logprobs(
            [sequence.params.prompt_logprobs] * len(following), logits, following
        )
        check_not_nan(sequence, known[begin:])


def check_not_nan(sequence: Sequence, result: list[TokenLogprob]) -> None:
    """NaN logits are a fault that ends the request."""
    if any(math.isnan(one.logprob) for one in result):
        sequence.fault = QuantkitError(
            "the model's logits are not numbers", "check the checkpoint with quantkit ppl"
        )


class LogitsProcessor:
    """For one engine's requests, over `vocab` tokens. Memory: 9 bytes per token id for each request
    with biases or penalties."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._vocab, self._device = vocab, device
        self._slots: dict[Sequence, int] = {}
        self._num_counted: list[int] = []
        """By slot: tokens of its sequence that the tables contain."""
        self._output_counts = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._seen = torch.zeros(0, vocab, dtype=torch.bool, device=device)
        """Token ids of prompt and output."""
        self._bias = torch.zeros(0, vocab, device=device)

    def process(
        self,
        logits: Tensor,
        counts: Items[tuple[Sequence, int]],
        eos_ids: frozenset[int],
        first_masks: dict[Sequence, int],
        allowed: Tensor | None,
    ) -> Tensor:
        """logits float32 [R, V] of sequences with so many consecutive rows each; returned as they
        are if no request alters them. first_masks, allowed: as `GrammarMasks.result`. Rows of a
        sequence with a fault are not masked.
        """
        penalized: list[tuple[Sequence, int, int]] = []
        too_early: list[tuple[int, int]] = []
        masked: list[tuple[int, int]] = []
        row = 0
        for sequence, count in counts:
            if sequence.alters_logits:
                penalized.append((sequence, row, count))
            if sequence.params.min_new_tokens:
                too_early += _early_ends(sequence, row, count, eos_ids)
            if allowed is not None and sequence in first_masks and sequence.fault is None:
                masked += [(row + i, first_masks[sequence] + i) for i in range(count)]
            row += count
        if not (penalized or too_early or masked):
            return logits
        processed = logits.clone()
        if penalized:
            self._penalize(processed, penalized)
        if too_early:
            rows, tokens = to_device(too_early, self._device).T
            processed[rows, tokens] = float("-inf")
        if masked:
            rows, masks = to_device(masked, self._device).T
            assert allowed is not None, "rows are masked by it"
            processed[rows] = processed[rows].masked_fill_(~allowed[masks], float("-inf"))
        return processed

    def _penalize(self, logits: Tensor, penalized: list[tuple[Sequence, int, int]]) -> None:
        """Biases and penalties, in place: the repetition penalty over prompt and output, then
        presence and frequency penalties over the output. penalized: (sequence, first row,
        rows)."""
        self._count([sequence for sequence, _, _ in penalized])
        places: list[tuple[int, int]] = []
        penalties: list[tuple[float, float, float]] = []
        drafts: list[tuple[int, int]] = []
        for sequence, first, count in penalized:
            params = sequence.params
            drafts += [
                (len(places) + i, draft) for i in range(1, count) for draft in sequence.drafts[:i]
            ]
            places += [(row, self._slots[sequence]) for row in range(first, first + count)]
            penalties += [
                (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            ] * count
        rows, slots = to_device(places, self._device).T
        repetition, presence, frequency = to_device(penalties, self._device).T.unsqueeze(-1)
        values = logits[rows] + self._bias[slots]
        outputs, seen = self._output_counts[slots], self._seen[slots]
        if drafts:
            of_row, tokens = to_device(drafts, self._device).T
            outputs.index_put_((of_row, tokens), outputs.new_ones(()), accumulate=True)
            seen[of_row, tokens] = True
        values = torch.where(
            seen, torch.where(values > 0, values / repetition, values * repetition), values
        )
        logits[rows] = values - torch.where(outputs > 0, presence + frequency * outputs, 0.0)

    def _count(self, sequences: list[Sequence]) -> None:
        """Add the tokens that are new since the last step to the tables."""
        new: list[int] = []
        for sequence in sequences:
            slot = self._slots.get(sequence)
            if slot is None:
                slot = self._new_slot(sequence)
            new += [
                slot * self._vocab + token
                for token in sequence.token_ids[self._num_counted[slot] :]
            ]
            self._num_counted[slot] = len(sequence.token_ids)
        if new:
            at = to_device(new, self._device)
            self._output_counts.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))
            self._seen.view(-1)[at] = True

    def _new_slot(self, sequence: Sequence) -> int:
        """A slot with the sequence's prompt and biases; frees those of finished sequences."""
        self._slots = {one: slot for one, slot in self._slots.items() if one.finish_reason is None}
        used = set(self._slots.values())
        slot = next(number for number in range(len(used) + 1) if number not in used)
        if slot == len(self._output_counts):
            more = max(4, slot)
            self._output_counts, self._seen, self._bias = (
                torch.cat((table, table.new_zeros(more, self._vocab)))
                for table in (self._output_counts, self._seen, self._bias)
            )
            self._num_counted += [0] * more
        self._slots[sequence], self._num_counted[slot] = slot, sequence.prompt_len
        for table in (self._output_counts, self._seen, self._bias):
            table[slot].zero_()
        self._seen[slot, to_device(sequence.token_ids[: sequence.prompt_len], self._device)] = True
        if sequence.params.logit_bias:
            ids, values = zip(*sequence.params.logit_bias)
            self._bias[slot].index_add_(
                0, to_device(ids, self._device), to_device(values, self._device)
            )
        return slot


def _early_ends(
    sequence: Sequence, row: int, count: int, eos_ids: frozenset[int]
) -> list[tuple[int, int]]:
    """(row, token) of tokens that would end the output before min_new_tokens."""
    missing = sequence.params.min_new_tokens - (len(sequence.token_ids) - sequence.prompt_len)
    ends = eos_ids | set(sequence.params.stop_token_ids)
    return [(row + i, token) for i in range(min(missing, count)) for token in ends]


_Masks = tuple[dict[Sequence, int], np.ndarray | None]
"""The first mask row of each sequence, and the bits int32 [rows, words]."""


class GrammarMasks:
    """Masks of the steps of one engine. Its thread starts with the first request that has a
    grammar."""

    def __init__(self) -> None:
        self._worker: ThreadPoolExecutor | None = None
        self._executor: Any = None
        self._future: Future[_Masks] | None = None

    def start(self, counts: Items[tuple[Sequence, int]]) -> None:
        """Write the masks of sequences, with so many rows each, in the background. Drops a result
        that was not taken."""
        self._wait()
        guided = [
            (sequence, count)
            for sequence, count in counts
            if sequence.guide is not None and sequence.fault is None
        ]
        if guided:
            self._worker = self._worker or ThreadPoolExecutor(1, "quantkit-masks")
            self._future = self._worker.submit(self._write, guided)

    def result(self, device: torch.device, vocab: int) -> tuple[dict[Sequence, int], Tensor | None]:
        """The first mask row of each sequence, and the allowed tokens bool [rows, vocab]; None
        without grammars."""
        first_masks, bits = self._wait()
        if bits is None:
            return {}, None
        packed = torch.from_numpy(bits)
        if device.type == "cuda":
            # 32 rows are half a megabyte, and a copy from pageable memory waits for all launches
            # before it.
            packed = packed.pin_memory()
        packed = packed.to(device, non_blocking=device.type == "cuda")
        allowed = (
            packed.unsqueeze(-1)
            .bitwise_right_shift(torch.arange(32, dtype=torch.int32, device=device))
            .bitwise_and_(1)
        )
        return first_masks, allowed.flatten(1)[:, :vocab].bool()

    def _wait(self) -> _Masks:
        future, self._future = self._future, None
        return ({}, None) if future is None else future.result()

    def _write(self, guided: list[tuple[Sequence, int]]) -> _Masks:
        first_masks: dict[Sequence, int] = {}
        rows = 0
        for sequence, count in guided:
            first_masks[sequence] = rows
            rows += count
        guides = [sequence.guide for sequence in first_masks if sequence.guide is not None]
        self._executor = self._executor or guides[0].new_executor(_THREADS)
        bits = np.full((rows, max(guide.words for guide in guides)), -1, dtype=np.int32)
        for sequence, first in first_masks.items():
            assert sequence.guide is not None, sequence.index
            try:
                sequence.guide.write(self._executor, bits, first, sequence.drafts)
            except Exception as fault:  # of this request alone, which ends for it
                sequence.fault = fault
        return first_masks, bits
