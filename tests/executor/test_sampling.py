"""Sampling follows the distribution asked for, and repeats itself with a seed whatever the batch;
biases, penalties and log-probabilities of prompts are those of the formula, and the same with
drafts, chunks and shared prefixes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import completions, load
from refused import refused

from quantkit.executor.runner.sampler import LogitsProcessor
from quantkit.executor.sampling.params import (
    Batch,
    SamplingParams,
    check_defaults,
    distribution,
    draw,
    sample,
    uniform,
)
from quantkit.executor.scheduler.sequence import Sequence

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])


def batch_of(params, seeds):
    return Batch.of(params, seeds, torch.device("cpu"))


def test_frequencies_are_the_softmax_of_the_tempered_logits():
    rows = 20000
    batch = batch_of([SamplingParams(temperature=0.7)] * rows, [11] * rows)
    chosen = sample(LOGITS.expand(rows, -1), batch, torch.arange(rows))
    frequencies = torch.bincount(chosen, minlength=5) / rows
    torch.testing.assert_close(frequencies, (LOGITS / 0.7).softmax(-1), rtol=0, atol=0.015)


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_min_p_a_share_of_the_likeliest():
    """Tokens 0, 1, 2 where they were put."""
    exact, turned = LOGITS.softmax(-1), [3, 1, 4, 0, 2]
    asked = [*({"top_p": value} for value in (0.3, 0.7, 0.9)), {"min_p": 0.1}, {"min_p": 1.0}]
    batch = batch_of([SamplingParams(temperature=1, **one) for one in asked], [0] * 5)
    found = distribution(LOGITS[turned].expand(5, -1), batch)
    kept = [[3], [1, 3], [1, 3, 4], [1, 3, 4], [3]]
    assert [row.nonzero()[:, 0].tolist() for row in found] == kept
    torch.testing.assert_close(found[1, [3, 1]], exact[:2] / exact[:2].sum())


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.02}])
def test_a_row_draws_the_same_in_any_batch(limits):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 100, generator=generator)
    free = SamplingParams(temperature=1.0)
    params, seeds = [replace(free, **limits), free] * 4, list(range(-3, 5))
    positions = torch.arange(40, 48)
    together = sample(logits, batch_of(params, seeds), positions)
    alone = [
        sample(
            logits[i : i + 1], batch_of(params[i : i + 1], seeds[i : i + 1]), positions[i : i + 1]
        )
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


def test_uniform_numbers_are_uniform_and_independent():
    count = 100_000
    numbers = torch.stack(
        [
            uniform(torch.zeros(count, dtype=torch.int64), torch.arange(count)),
            uniform(torch.arange(count), torch.zeros(count, dtype=torch.int64)),
            uniform(torch.ones(count, dtype=torch.int64), torch.arange(count)),
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


@pytest.mark.parametrize("bad", [{"stop": "##"}, {"stop_token_ids": 5}, {"logit_bias": {5: 1.0}}])
def test_what_is_no_list_is_refused(bad):
    (name,) = bad
    with refused(rf"{name} is .* give a list"):
        SamplingParams(**bad)


def test_lists_do_what_tuples_do(engine):
    given = {"stop": ("\n", "x"), "stop_token_ids": (5,), "logit_bias": ((7, 2.0),)}
    lists, tuples = (
        SamplingParams(max_new_tokens=8, **{name: kind(one) for name, one in given.items()})
        for kind in (list, tuple)
    )
    assert lists == tuples
    (one,), (other,) = (engine.generate([[5, 6]], params) for params in (lists, tuples))
    assert one.token_ids == other.token_ids


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


PROMPT = list(range(10, 34))
EVERYTHING = SamplingParams(
    max_new_tokens=16,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.3,
    logit_bias=((40, 1.5), (41, -100.0)),
    min_new_tokens=16,
    ignore_eos=True,
    logprobs=2,
    prompt_logprobs=1,
)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    return load(tiny_checkpoint)


def penalized(logits, seen, generated, params):
    """A row by the formulas, one token after the other."""
    found = []
    for token, value in enumerate(logits):
        value += dict(params.logit_bias).get(token, 0.0)
        if token in seen:
            value = (
                value / params.repetition_penalty
                if value > 0
                else value * params.repetition_penalty
            )
        times = generated.count(token)
        found.append(
            value - params.frequency_penalty * times - params.presence_penalty * (times > 0)
        )
    return found


def test_a_row_is_adjusted_for_the_tokens_before_it(engine):
    """Of a sequence with drafts, beside one that asks for nothing; later, among others that come;
    and of one that comes when these are gone."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 3
    before, adjuster = logits.clone(), LogitsProcessor(50, torch.device("cpu"))
    asked = replace(EVERYTHING, min_new_tokens=0)

    def sequence_of(prompt, params=asked):
        return Sequence(0, prompt, params, engine.tokenizer, 256, streams=False)

    def adjusted(rows, parts):
        return adjuster.process(rows, parts, frozenset({1}), {}, None)

    def check(found, row, one, drafts=()):
        generated = [*one.generated, *drafts]
        expected = penalized(before[row].tolist(), {*one.token_ids, *drafts}, generated, asked)
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)

    sequence, plain = sequence_of([3, 5, 5, 8]), sequence_of([3], SamplingParams())
    sequence.token_ids += [8, 9, 9, 11]
    sequence.drafts = [9, 12]
    found = adjusted(logits, [(sequence, 3), (plain, 1)])
    assert torch.equal(logits, before), "what was computed is still needed for log-probabilities"
    assert torch.equal(found[3], before[3])
    for row in range(3):
        check(found[row], row, sequence, [9, 12][:row])
    assert adjusted(logits, [(plain, 4)]) is logits
    sequence.token_ids += [9, 20]
    sequence.drafts = []
    others = [sequence_of([i, 7]) for i in range(9)]
    rows = before.repeat(3, 1)[:10]
    check(adjusted(rows, [(one, 1) for one in (*others, sequence)])[9], 1, sequence)
    for one in others:
        one.finish("cancelled")
    fresh = sequence_of([4])
    check(adjusted(before[:1], [(fresh, 1)])[0], 0, fresh)
    assert len(adjuster._slots) == 2, "who has finished keeps no place"


def run(engine, prompts, params):
    def scores(scored):
        return [token.logprob for token in scored or []]

    done = completions(engine, prompts, params)
    return [(one.token_ids, scores(one.logprobs), scores(one.prompt_logprobs)) for one in done]


def test_with_drafts_chunks_and_shared_prefixes_it_is_the_same(engine, tiny_checkpoint):
    prompts = [PROMPT * 3, PROMPT[:20], [7, 8]]
    other = load(tiny_checkpoint, draft_length=2, chunk_tokens=31, prefix_cache=True)
    for params in (
        EVERYTHING,
        replace(EVERYTHING, temperature=0.9, min_p=0.02, top_p=0.95, seed=3),
    ):
        for (tokens, ours, prompt), (expected, theirs, whole) in zip(
            run(other, prompts, params), run(engine, prompts, params)
        ):
            assert tokens == expected
            assert 41 not in tokens
            assert ours == pytest.approx(theirs, abs=0.02), "the cache is bfloat16"
            assert prompt == pytest.approx(whole, abs=0.02)
    assert other.speculation.acceptance.drafted > 0
    free = replace(
        EVERYTHING,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias=(),
    )
    different = run(engine, prompts, free)[0][0] != run(engine, prompts, EVERYTHING)[0][0]
    assert different, "what was asked for changed nothing"


def test_a_prompts_log_probabilities_are_those_of_its_prefixes(engine):
    (done,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=1, prompt_logprobs=3))
    assert [one.token_id for one in done.prompt_logprobs] == PROMPT[1:]
    for place in (1, 11, 23):
        forced = SamplingParams(max_new_tokens=1, logit_bias=((PROMPT[place], 100.0),), logprobs=3)
        (one,) = engine.generate([PROMPT[:place]], forced)
        assert one.token_ids == [PROMPT[place]]
        scored = done.prompt_logprobs[place - 1]
        assert one.logprobs[0].logprob == pytest.approx(scored.logprob, abs=0.02)
        assert [token for token, _ in one.logprobs[0].top] == [token for token, _ in scored.top]
        assert (scored.rank == 1) == (scored.top[0][0] == PROMPT[place])
