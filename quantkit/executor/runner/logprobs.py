"""Log-probabilities that requests ask for: of chosen tokens, and of the tokens of prompts."""

import math

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.executor.runner.graphs import DecodeRows, Forward
from quantkit.executor.runner.runner import ForwardPass
from quantkit.executor.sampling.params import log_probabilities
from quantkit.executor.scheduler.sequence import Sequence, TokenLogprob

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
        check_numbers(sequence, known[begin:])


def check_numbers(sequence: Sequence, found: list[TokenLogprob]) -> None:
    """A model that computes no numbers is a fault that ends the request."""
    if any(math.isnan(one.logprob) for one in found):
        sequence.fault = QuantkitError(
            "the model's logits are not numbers", "check the checkpoint with quantkit ppl"
        )
