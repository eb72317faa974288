"""Sampling follows the distribution asked for, and repeats itself with a seed whatever the
batch."""

from pathlib import Path

import pytest
import torch
from refused import refused

from quantkit.executor.sampling.params import (
    Batch,
    SamplingParams,
    check_defaults,
    distribution,
    draw,
    log_probabilities,
    sample,
    uniform,
)

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])


def batch_of(params, seeds):
    batch = Batch.of(params, seeds, torch.device("cpu"))
    return batch


def test_frequencies_are_the_softmax_of_the_tempered_logits():
    rows = 20000
    batch = batch_of([SamplingParams(temperature=0.7)] * rows, [11] * rows)
    chosen = sample(LOGITS.expand(rows, -1), batch, torch.arange(rows))
    frequencies = torch.bincount(chosen, minlength=5) / rows
    torch.testing.assert_close(frequencies, (LOGITS / 0.7).softmax(-1), rtol=0, atol=0.015)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    exact = LOGITS.softmax(-1)
    batch = batch_of(
        [SamplingParams(temperature=1, top_p=top_p) for top_p in (0.3, 0.7, 0.9)], [0, 0, 0]
    )
    turned = [3, 1, 4, 0, 2]
    probabilities = distribution(LOGITS[turned].expand(3, -1), batch)
    assert [row.nonzero()[:, 0].tolist() for row in probabilities] == [[3], [1, 3], [1, 3, 4]], (
        "tokens 0, 1, 2 where they were put"
    )
    torch.testing.assert_close(probabilities[1, [3, 1]], exact[:2] / exact[:2].sum())


def test_a_row_draws_the_same_in_any_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 100, generator=generator)
    params, seeds = [SamplingParams(temperature=1.0, top_p=0.9)] * 8, list(range(-3, 5))
    positions = torch.arange(40, 48)
    together = sample(logits, batch_of(params, seeds), positions)
    alone = [
        sample(logits[i : i + 1], batch_of(params[:1], seeds[i : i + 1]), positions[i : i + 1])
        for i in range(8)
    ]
    assert together.tolist() == torch.cat(alone).tolist()


def test_tokens_that_are_nearly_as_likely_do_not_change_places():
    """Rounding makes now one, now the other the likelier one: a number stands for the same token,
    but for those at a border."""
    rows = 2000
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(0))
    logits[:, 7], logits[:, 31] = 4.0, 4.0 + 1e-4
    other = logits.clone()
    other[:, 7] += 2e-4
    batch = batch_of([SamplingParams(temperature=0.7, top_p=0.95)] * rows, list(range(rows)))
    drawn = [sample(one, batch, torch.arange(rows)) for one in (logits, other)]
    assert (torch.isin(drawn[0], torch.tensor([7, 31]))).float().mean() > 0.4
    assert (drawn[0] != drawn[1]).sum() <= 3


def test_greedy_and_sampled_rows_share_a_batch():
    batch = batch_of([SamplingParams(), SamplingParams(temperature=5.0)], [1, 1])
    chosen = torch.stack(
        [sample(LOGITS.expand(2, -1), batch, torch.full((2,), position)) for position in range(50)]
    )
    assert (chosen[:, 0] == 0).all()
    assert chosen[:, 1].unique().numel() > 2


def test_uniform_numbers_are_uniform_and_independent():
    count = 100_000
    numbers = torch.stack(
        [
            uniform(torch.zeros(count, dtype=torch.int64), torch.arange(count)),
            uniform(torch.arange(count), torch.zeros(count, dtype=torch.int64)),
            uniform(torch.zeros(count, dtype=torch.int64), torch.arange(count), stream=1),
        ]
    )
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert (numbers.mean(dim=1) - 0.5).abs().max() < 0.005
    histogram = torch.stack([torch.histc(row, 100, 0, 1) for row in numbers])
    assert (histogram / (count / 100) - 1).abs().max() < 0.15
    assert (torch.corrcoef(numbers) - torch.eye(3)).abs().max() < 0.015


def test_draw_never_picks_an_impossible_token():
    probabilities = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    for number in (0.0, 0.5, 1 - 2**-53):
        index = draw(probabilities, torch.full((2,), number, dtype=torch.float64))
        assert (probabilities.gather(1, index[:, None]) > 0).all()


def test_log_probabilities():
    found = log_probabilities(LOGITS[None], torch.tensor([2]), 2)
    exact = LOGITS.log_softmax(-1)
    assert found.chosen[0] == exact[2]
    assert found.top_ids.tolist() == [[0, 1]]
    torch.testing.assert_close(found.top_values[0], exact[:2])


NAN, INF = float("nan"), float("inf")
BAD = [
    {"max_new_tokens": 0},
    *({"temperature": value} for value in (-1.0, NAN, INF, 101.0)),
    *({"top_p": value} for value in (0.0, -1.0, NAN, INF)),
    *({"top_k": value} for value in (2**31, 2**63)),
    *({"seed": value} for value in (2**63, -(2**63) - 1)),
    {"stop": ("",)},
    {"logprobs": 21},
    {"prompt_logprobs": 21},
    {"min_p": 1.5},
    {"presence_penalty": 2.1},
    {"frequency_penalty": NAN},
    {"repetition_penalty": 0.0},
    {"logit_bias": ((1, 101.0),)},
    {"logit_bias": tuple((i, 0.0) for i in range(1025))},
    {"stop_token_ids": tuple(range(65))},
    {"grammar": "start: /a/", "min_new_tokens": 3},
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(bad)[:40])
def test_bad_parameters_are_refused(bad):
    """Also what fits no tensor."""
    with refused(next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.parametrize(
    "extreme",
    [{"temperature": 5e-324}, {"temperature": 1e-40}, {"temperature": 1.0, "top_p": 5e-324}],
)
def test_extremes_take_the_likeliest(extreme):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 100
    batch = Batch.of([SamplingParams(**extreme)] * 4, list(range(4)), logits.device)
    assert torch.equal(sample(logits, batch, torch.arange(4)), logits.argmax(dim=-1))


def test_defaults_of_a_model_are_checked_and_their_file_named():
    for name, values in {
        "top_k": (2**63, "5", True, 1.5),
        "temperature": ([1], -1),
        "top_p": (NAN,),
    }.items():
        for value in values:
            with refused(f"generation_config.json: {name}"):
                check_defaults({name: value}, Path("model/generation_config.json"))
    check_defaults({"top_k": -1, "temperature": 1, "top_p": 0.95}, Path("x"))
