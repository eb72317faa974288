"""The engine end to end on a small model: alone or together, whole or chunked, with or without
room, the tokens are the same."""

from dataclasses import replace

import pytest
import torch
from engines import completions, load, tokens
from refused import refused

from quantkit import SamplingParams
from quantkit.executor import engine as executor_engine
from quantkit.models.context import CausalContext

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    return load(tiny_checkpoint, max_batch=8, max_model_len=512)


def questions(engine, count):
    return [
        engine.tokenizer.encode_chat(
            [{"role": "user", "content": f"{'What is ' * (i % 4)}{i}+{i * 7}?"}]
        )
        for i in range(count)
    ]


@torch.inference_mode()
def test_greedy_is_the_argmax_of_the_full_forward(engine):
    """The cache holds bfloat16, so a choice may differ where two tokens are nearly equal: within
    that tolerance every token is the best."""
    prompt = questions(engine, 3)[2]
    (done,) = completions(engine, [prompt], GREEDY)
    model = engine.loaded.model
    ids = torch.tensor(prompt + done.token_ids)
    logits = model.logits(model(ids, CausalContext([len(ids)])))[len(prompt) - 1 : -1]
    chosen = logits.gather(1, ids[len(prompt) :, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() < 0.03
    assert done.prompt_tokens == len(prompt)
    assert done.finish_reason == "length"


def test_batched_is_single(engine):
    """Greedy and sampled, more than max_batch: requests join as others leave. Another seed draws
    other tokens."""
    prompts = questions(engine, 12)
    params = [
        SamplingParams(3 + 2 * i, i % 2 * 1.0, top_p=0.9, seed=5 + i // 4, ignore_eos=True)
        for i in range(12)
    ]
    together = tokens(engine, prompts, params)
    assert together == [tokens(engine, [one], asked)[0] for one, asked in zip(prompts, params)]
    assert [len(one) for one in together] == [one.max_new_tokens for one in params]
    assert tokens(engine, prompts[11:], replace(params[11], seed=60)) != together[11:]


def test_who_needs_no_further_block_keeps_none_from_others(tiny_checkpoint):
    """A block each is all that eight requests of 60 tokens need: all run at once."""
    snug = load(tiny_checkpoint, max_batch=8, max_model_len=64)
    done = completions(
        snug, [[5 + i] * 40 for i in range(8)], SamplingParams(max_new_tokens=20, ignore_eos=True)
    )
    assert max(one.timings.queued_s for one in done) < min(
        one.timings.first_token_s for one in done
    )


@pytest.mark.parametrize("by_request", [False, True])
def test_ends_at_a_token_and_not_before_min_new_tokens(engine, by_request, monkeypatch):
    """The model's own, which is in the answer, or the request's, which is not in its text."""
    prompts = questions(engine, 1)
    (free,) = tokens(engine, prompts, GREEDY)

    def ended_by(ends, **more):
        if by_request:
            more |= {"stop_token_ids": tuple(ends), "ignore_eos": True}
        else:
            monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset(ends))
        (done,) = completions(engine, prompts, SamplingParams(max_new_tokens=24, **more))
        return done

    done = ended_by({free[7]})
    assert done.finish_reason == "stop"
    assert done.token_ids == free[: free.index(free[7]) + 1]
    said = engine.tokenizer.decode(done.token_ids[:-1])
    assert not by_request or done.text.rstrip("\ufffd") == said.rstrip("\ufffd")
    late = ended_by({*free[1:]}, min_new_tokens=6).token_ids
    assert not set(late[:6]) & set(free[1:])
    assert len(late) >= 6


def test_a_stop_string_ends_text_before_it_and_not_within_min_new_tokens(engine):
    prompts = questions(engine, 1)
    (free,) = completions(engine, prompts, GREEDY)
    stop = free.text[6:9]
    (done,) = completions(engine, prompts, replace(GREEDY, stop=(stop,)))
    assert done.finish_reason == "stop"
    assert done.text == free.text[: free.text.index(stop)]
    early = free.text[1:3]
    (late,) = completions(engine, prompts, replace(GREEDY, stop=(early,), min_new_tokens=12))
    assert early in late.text
    assert len(late.token_ids) > 12
    assert late.token_ids == free.token_ids[: len(late.token_ids)]


def test_stream_is_generate_in_pieces(engine):
    prompt = questions(engine, 2)[1]
    deltas = list(engine.stream(prompt, GREEDY))
    (whole,) = completions(engine, [prompt], GREEDY)
    assert len(deltas) > 3
    assert deltas[-1].completion.token_ids == whole.token_ids
    assert "".join(delta.text for delta in deltas).rstrip("\ufffd") == whole.text.rstrip("\ufffd")


def test_logprobs_are_of_the_chosen_tokens(engine):
    prompt = questions(engine, 1)[0]
    (done,) = completions(
        engine, [prompt], SamplingParams(max_new_tokens=5, logprobs=3, ignore_eos=True)
    )
    assert [one.token_id for one in done.logprobs] == done.token_ids
    for one in done.logprobs:
        assert one.top[0] == (one.token_id, one.logprob), "greedy takes the likeliest"
        assert [value for _, value in one.top] == sorted(
            (value for _, value in one.top), reverse=True
        )
        assert len(one.top) == 3


@pytest.mark.parametrize("draft_length", [0, 2])
def test_answers_end_at_the_context(tiny_checkpoint, draft_length):
    engine = load(tiny_checkpoint, max_model_len=64, draft_length=draft_length)
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    (done,) = completions(engine, [[5] * 52], params)
    assert (len(done.token_ids), done.finish_reason) == (12, "length")


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([], "empty"), ([5] * 512, "512 tokens"), ([320], "outside 0..319"), ([-1], "outside")],
)
def test_prompts_that_cannot_run_are_refused_before_any_work(engine, prompt, said):
    with refused(said):
        next(engine.generate([[1, 2], prompt], GREEDY))
    assert not engine.has_work


@pytest.mark.parametrize("prompts", ["one text", [1, 2, 3]])
def test_a_prompt_is_not_taken_for_a_list_of_prompts(engine, prompts):
    with refused("give a list of prompts"):
        next(engine.generate(prompts, GREEDY))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("max_batch", "max_model_len", "cache_tokens", "chunk_tokens", "tp", "dp")
            for value in (0, -3)
        ),
        *(("max_batch", value) for value in (2.5, "8", True)),
    ],
)
def test_amounts_that_are_none_are_refused_before_anything_begins(
    tiny_checkpoint, name, value, monkeypatch
):
    """A batch or a chunk of nothing would never end."""
    monkeypatch.setattr(executor_engine, "join", lambda *_: pytest.fail("ranks are started"))
    with refused(rf"^{name} is {value!r}.*; give "):
        load(tiny_checkpoint, **{name: value})
