"""Biases, penalties, stops and log-probabilities of prompts: by the formula, and the same with
drafts, chunks and shared prefixes."""

import shutil
from dataclasses import replace

import pytest
import torch
from engines import completions, load
from refused import refused

from quantkit.executor.runner.logits_processor import LogitsProcessor
from quantkit.executor.sampling.params import Batch, SamplingParams, distribution
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.tokenizer.chat import ChatTokenizer

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
    def sequence_of(index, prompt, params):
        return Sequence(index, prompt, params, engine.tokenizer, 256, streams=False)

    sequence = sequence_of(0, [3, 5, 5, 8], replace(EVERYTHING, min_new_tokens=0))
    sequence.token_ids += [8, 9, 9, 11]
    sequence.drafts = [9, 12]
    plain = sequence_of(1, [3], SamplingParams())
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 3
    before = logits.clone()
    adjuster = LogitsProcessor(50, torch.device("cpu"))
    adjusted = adjuster.process(logits, [(sequence, 3), (plain, 1)], frozenset({1}), {}, None)
    assert torch.equal(logits, before), "what was computed is still needed for log-probabilities"
    assert torch.equal(adjusted[3], before[3])
    for row, drafts in enumerate([[], [9], [9, 12]]):
        expected = penalized(
            before[row].tolist(), {3, 5, 8, 9, 11, *drafts}, [8, 9, 9, 11, *drafts], sequence.params
        )
        torch.testing.assert_close(adjusted[row], torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert adjuster.process(logits, [(plain, 4)], frozenset({1}), {}, None) is logits
    sequence.token_ids += [9, 20]
    sequence.drafts = []
    others = [sequence_of(i, [i, 7], EVERYTHING) for i in range(9)]
    later = adjuster.process(
        before.repeat(3, 1)[:10],
        [(one, 1) for one in (*others, sequence)],
        frozenset({1}),
        {},
        None,
    )[9]
    expected = penalized(
        before[1].tolist(), {3, 5, 8, 9, 11, 20}, [8, 9, 9, 11, 9, 20], sequence.params
    )
    torch.testing.assert_close(later, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    for one in others:
        one.finish("cancelled")
    fresh = sequence_of(20, [4], replace(EVERYTHING, min_new_tokens=0))
    found = adjuster.process(before[:1], [(fresh, 1)], frozenset({1}), {}, None)[0]
    torch.testing.assert_close(
        found,
        torch.tensor(penalized(before[0].tolist(), {4}, [], fresh.params)),
        rtol=1e-5,
        atol=1e-5,
    )
    assert len(adjuster._slots) == 2, "who has finished keeps no place"


def test_min_p_keeps_a_share_of_the_likeliest():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    batch = Batch.of(
        [SamplingParams(temperature=0.5, min_p=share) for share in (0.0, 0.1, 1.0)],
        [0] * 3,
        logits.device,
    )
    kept = (distribution(logits.expand(3, -1), batch) > 0).sum(-1)
    exact = (logits / 0.5).softmax(-1)
    assert kept.tolist() == [4, int((exact >= 0.1 * exact.max()).sum()), 1]
    assert kept[1] == 2


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


def test_stop_tokens_end_an_answer_and_are_not_in_its_text(engine):
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    (free,) = engine.generate([PROMPT], params)
    end = next(token for token in free.token_ids[8:] if token not in free.token_ids[:8])
    (done,) = engine.generate([PROMPT], replace(params, stop_token_ids=(end,)))
    assert done.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert done.finish_reason == "stop"
    assert done.text.rstrip("\ufffd") == engine.tokenizer.decode(done.token_ids[:-1]).rstrip(
        "\ufffd"
    )
    (late,) = engine.generate([PROMPT], replace(params, stop_token_ids=(end,), min_new_tokens=20))
    assert len(late.token_ids) >= 20
    assert end not in late.token_ids[:20]


def test_tokens_that_the_model_does_not_have(engine):
    for named in (
        {"logit_bias": ((320, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"stop_token_ids": (2**40,)},
    ):
        with refused(r"outside 0\.\.319"):
            engine.submit(PROMPT, SamplingParams(**named))


def test_defaults_of_a_model_include_its_penalty(tiny_checkpoint, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint / name, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.05, "min_p": 0.1}')
    assert ChatTokenizer(tmp_path).sampling_defaults == {"repetition_penalty": 1.05, "min_p": 0.1}
