"""The successor of every row of a pass, chosen on the device: logits as requests ask, then a draw.

What the draw needs of a request (sampling.py) is on the device already where the same sequences
were there in the step before; then only the places of their tokens travel.
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


class SampledTokens(NamedTuple):
    """token_ids int64 [R] on the device; what they were drawn with, None where all are the
    likeliest: sampling parameters, and places in the sequences int64 [R]."""

    token_ids: Tensor
    batch: Batch | None = None
    places: Tensor | None = None


class _Rows(NamedTuple):
    """Rows that are drawn for. batch: as for `SampledTokens`. asks: whether any of them wants logits
    changed, grammars aside."""

    counts: list[tuple[Sequence, int]]
    batch: Batch | None
    asks: bool


class Sampler:
    """eos_ids: tells the tokens that may end an answer."""

    def __init__(
        self, vocab: int, device: torch.device, eos_ids: Callable[[], frozenset[int]]
    ) -> None:
        self._vocab, self._device, self._eos_ids = vocab, device, eos_ids
        self._adjuster, self._masks = LogitsProcessor(vocab, device), GrammarMasks()
        self._known = _Rows([], None, False)

    def prepare(self, step: ScheduledStep) -> None:
        """Begin what can be done before the step's logits are there."""
        self._masks.begin(step.rows_to_sample if step.guided else ())

    def choose(self, done: ForwardPass, draw: SamplingGraph) -> SampledTokens:
        """Of a pass that was prepared."""
        assert done.logits is not None, done.counts
        assert done.greedy is not None, done.counts
        first_masks, allowed = self._masks.finished(self._device, self._vocab)
        counts, batch, asks = (
            self._known if done.counts == self._known.counts else self._look_at(done.counts)
        )
        adjusted = done.logits
        if asks or allowed is not None:
            adjusted = self._adjuster.adjust(
                adjusted, counts, self._eos_ids(), first_masks, allowed
            )
        if batch is None:
            return SampledTokens(
                done.greedy if adjusted is done.logits else adjusted.argmax(dim=-1)
            )
        places = [len(sequence.token_ids) + i for sequence, count in counts for i in range(count)]
        on_device = to_device(places, self._device)
        return SampledTokens(draw(adjusted, batch, on_device), batch, on_device)

    def _look_at(self, counts: list[tuple[Sequence, int]]) -> "_Rows":
        each = [sequence for sequence, count in counts for _ in range(count)]
        batch = Batch.of([one.params for one in each], [one.seed for one in each], self._device)
        asks = any(one.alters_logits or one.params.min_new_tokens for one in each)
        self._known = _Rows(list(counts), batch, asks)
        return self._known


_SCORED_TOGETHER = 256
"""Tokens of a prompt whose logits are in memory at a time."""


def row_logprobs(
    counts: list[tuple[Sequence, int]], logits: Tensor, chosen: list[int]
) -> list[TokenLogprob]:
    """As `token_logprobs`, for the rows of sequences with so many each; empty where nobody
    asked."""
    if not any([sequence.params.logprobs is not None for sequence, _ in counts]):
        return []
    return token_logprobs(
        [sequence.params.logprobs for sequence, count in counts for _ in range(count)],
        logits,
        chosen,
    )


def token_logprobs(
    counts: list[int | None], logits: Tensor, chosen: list[int]
) -> list[TokenLogprob]:
    """One per row of logits [R, V], with as many alternatives as the row's own request wants (None:
    nothing)."""
    found = log_probabilities(
        logits, torch.tensor(chosen, device=logits.device), max(count or 0 for count in counts)
    )
    rows = zip(
        counts,
        chosen,
        found.chosen.tolist(),
        found.top_ids.tolist(),
        found.top_values.tolist(),
        found.ranks.tolist(),
    )
    return [
        TokenLogprob(token, one, tuple(zip(ids, values))[: count or 0], rank)
        for count, token, one, ids, values, rank in rows
    ]


def score_prompts(done: ForwardPass, model: Forward) -> None:
    """Give sequences that ask for it the log-probabilities of their prompts' tokens, as far as the
    pass computed them."""
    if isinstance(done.where, DecodeRows):
        return  # of answers alone
    begin = 0
    for sequence, start, length in done.spans:
        if sequence.params.prompt_logprobs is not None:
            _score(sequence, start, done.hidden[begin : begin + length], model)
        begin += length


def _score(sequence: Sequence, start: int, hidden: Tensor, model: Forward) -> None:
    """hidden [length, H] of the tokens from `start` on: a token's own row scores the one behind it.
    What is computed a second time is not scored again."""
    known = sequence.prompt_logprobs
    first, end = max(start, len(known)), min(start + len(hidden), sequence.prompt_len - 1)
    for begin in range(first, end, _SCORED_TOGETHER):
        stop = min(begin + _SCORED_TOGETHER, end)
        logits = model.logits(hidden[begin - start : stop - start])
        following = sequence.token_ids[begin + 1 : stop + 1]
        known += token_logprobs(
            [sequence.params.prompt_logprobs] * len(following), logits, following
        )
        check_not_nan(sequence, known[begin:])


def check_not_nan(sequence: Sequence, found: list[TokenLogprob]) -> None:
    """A model that computes no numbers is a fault that ends the request."""
    if any(math.isnan(one.logprob) for one in found):
        sequence.fault = QuantkitError(
            "the model's logits are not numbers", "check the checkpoint with quantkit ppl"
        )
