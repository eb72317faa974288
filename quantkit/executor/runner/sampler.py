"""Choose the token after every row of a pass, on the device: process the logits as requests ask,
then sample. Also the log-probabilities that requests ask for.

What sampling needs of a request (sampling/params.py) stays on the device while the same sequences
come again; then only the positions of their tokens are sent.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.common.devices import to_device
from quantkit.common.errors import QuantkitError
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.graphs import Forward, SamplingGraph
from quantkit.executor.runner.logits_processor import GrammarMasks, LogitsProcessor
from quantkit.executor.runner.runner import ForwardPass
from quantkit.executor.sampling.params import Batch, log_probabilities
from quantkit.executor.scheduler.scheduler import ScheduledStep
from quantkit.executor.scheduler.sequence import Sequence, TokenLogprob

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
