"""The engine end to end on a small model: alone or together, whole or chunked, with or without
room, the tokens are the same."""

from pathlib import Path

import pytest
import torch

from quantkit.common.errors import QuantkitError
from quantkit.executor.engine import Engine
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Completion
from quantkit.models.context import CausalContext

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    return Engine.load(
        tiny_checkpoint, device="cpu", dtype="float32", max_batch=8, max_model_len=512
    )


def questions(engine: Engine, count: int) -> list[list[int]]:
    return [
        engine.tokenizer.encode_chat(
            [{"role": "user", "content": f"{'What is ' * (i % 4)}{i}+{i * 7}?"}]
        )
        for i in range(count)
    ]


def run(
    engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[Completion]:
    return sorted(engine.generate(prompts, params), key=lambda completion: completion.index)


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@torch.inference_mode()
def test_greedy_is_the_argmax_of_the_full_forward(engine: Engine) -> None:
    """The cache holds bfloat16, so a choice may differ where two tokens are nearly equal: within
    that tolerance every token is the best."""
    prompt = questions(engine, 3)[2]
    (done,) = run(engine, [prompt], GREEDY)
    model = engine.loaded.model
    ids = torch.tensor(prompt + done.token_ids)
    logits = model.logits(model(ids, CausalContext([len(ids)])))[len(prompt) - 1 : -1]
    chosen = logits.gather(1, ids[len(prompt) :, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() < 0.03
    assert done.prompt_tokens == len(prompt)
    assert done.finish_reason == "length"


def test_batched_is_single(engine: Engine) -> None:
    prompts = questions(engine, 12)  # more than max_batch: requests join as others leave
    lengths = [SamplingParams(max_new_tokens=3 + 2 * i, ignore_eos=True) for i in range(12)]
    together = run(engine, prompts, lengths)
    assert tokens(together) == [
        run(engine, [prompt], params)[0].token_ids for prompt, params in zip(prompts, lengths)
    ]
    assert [len(one.token_ids) for one in together] == [params.max_new_tokens for params in lengths]
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_blocks


def test_chunked_prefill_and_preemption_change_nothing(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 the cache, too: its rounding to bfloat16 turns another order of sums into other
    draws where two nearly tie."""
    monkeypatch.setattr("quantkit.executor.weights.load.cached_dtype", lambda dtype: dtype)
    engine = Engine.load(
        tiny_checkpoint, device="cpu", dtype="float32", max_batch=8, max_model_len=512
    )
    prompts = questions(engine, 8)
    params = [
        SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=(i % 2) * 0.8, seed=i)
        for i in range(8)
    ]
    tight = Engine.load(
        tiny_checkpoint,
        device="cpu",
        dtype="float32",
        max_batch=8,
        max_model_len=128,
        cache_tokens=320,
        chunk_tokens=9,
    )
    done = run(tight, prompts, params)
    assert tight.scheduler.num_preempted > 0, (
        "the cache was large enough for all: the test tests nothing"
    )
    assert tokens(done) == tokens(run(engine, prompts, params))
    assert tight.scheduler.allocator.num_free == tight.scheduler.allocator.num_blocks


def test_who_needs_no_further_block_keeps_none_from_others(tiny_checkpoint: Path) -> None:
    """A block each is all that eight requests of 60 tokens need: all run at once."""
    snug = Engine.load(
        tiny_checkpoint, device="cpu", dtype="float32", max_batch=8, max_model_len=64
    )
    done = run(
        snug, [[5 + i] * 40 for i in range(8)], SamplingParams(max_new_tokens=20, ignore_eos=True)
    )
    assert max(one.timings.queued_s for one in done) < min(
        one.timings.first_token_s for one in done
    )


def test_seed_repeats_whatever_the_batch(engine: Engine) -> None:
    prompts = questions(engine, 6)
    params = [
        SamplingParams(max_new_tokens=16, temperature=1.0, top_p=0.9, seed=seed)
        for seed in (5, 5, 6, 7, 8, 9)
    ]
    together = run(engine, prompts, params)
    alone = [run(engine, [prompt], one)[0] for prompt, one in zip(prompts, params)]
    assert tokens(together) == tokens(alone)
    other = run(
        engine, prompts[2:3], SamplingParams(max_new_tokens=16, temperature=1.0, top_p=0.9, seed=60)
    )
    assert tokens(other) != tokens(together[2:3])


def test_stops_at_eos(engine: Engine) -> None:
    prompt = questions(engine, 1)[0]
    (free,) = run(engine, [prompt], GREEDY)
    eos = engine.tokenizer.eos_ids
    try:
        engine.tokenizer.eos_ids = frozenset({free.token_ids[7]})
        (done,) = run(engine, [prompt], SamplingParams(max_new_tokens=24))
    finally:
        engine.tokenizer.eos_ids = eos
    assert done.finish_reason == "stop"
    assert done.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[7]) + 1]


def test_no_end_before_min_new_tokens(engine: Engine) -> None:
    prompt = questions(engine, 1)[0]
    (free,) = run(engine, [prompt], GREEDY)
    eos = engine.tokenizer.eos_ids
    try:
        engine.tokenizer.eos_ids = frozenset(free.token_ids[1:])
        (done,) = run(engine, [prompt], SamplingParams(max_new_tokens=24, min_new_tokens=6))
    finally:
        engine.tokenizer.eos_ids = eos
    assert not set(done.token_ids[:6]) & set(free.token_ids[1:])
    assert len(done.token_ids) >= 6


def test_stop_string_ends_text_before_it(engine: Engine) -> None:
    prompt = questions(engine, 1)[0]
    (free,) = run(engine, [prompt], GREEDY)
    stop = free.text[6:9]
    (done,) = run(
        engine, [prompt], SamplingParams(max_new_tokens=24, ignore_eos=True, stop=(stop,))
    )
    assert done.finish_reason == "stop"
    assert done.text == free.text[: free.text.index(stop)]


def test_a_stop_string_among_the_first_min_new_tokens_is_text(engine: Engine) -> None:
    prompt = questions(engine, 1)[0]
    (free,) = run(engine, [prompt], GREEDY)
    stop = free.text[1:3]
    (done,) = run(
        engine,
        [prompt],
        SamplingParams(max_new_tokens=24, ignore_eos=True, stop=(stop,), min_new_tokens=12),
    )
    assert stop in done.text
    assert len(done.token_ids) > 12
    assert done.token_ids == free.token_ids[: len(done.token_ids)]


def test_stream_is_generate_in_pieces(engine: Engine) -> None:
    prompt = questions(engine, 2)[1]
    deltas = list(engine.stream(prompt, GREEDY))
    (whole,) = run(engine, [prompt], GREEDY)
    assert len(deltas) > 3
    assert deltas[-1].completion is not None
    assert deltas[-1].completion.token_ids == whole.token_ids
    assert "".join(delta.text for delta in deltas).rstrip("\ufffd") == whole.text.rstrip("\ufffd")


def test_a_stream_left_early_frees_its_cache(engine: Engine) -> None:
    stream = engine.stream(questions(engine, 1)[0], GREEDY)
    next(stream)
    stream.close()
    assert not engine.has_work
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_blocks


def test_logprobs_are_of_the_chosen_tokens(engine: Engine) -> None:
    prompt = questions(engine, 1)[0]
    (done,) = run(engine, [prompt], SamplingParams(max_new_tokens=5, logprobs=3, ignore_eos=True))
    assert done.logprobs is not None
    assert [one.token_id for one in done.logprobs] == done.token_ids
    for one in done.logprobs:
        assert one.top[0] == (one.token_id, one.logprob), "greedy takes the likeliest"
        assert [value for _, value in one.top] == sorted(
            (value for _, value in one.top), reverse=True
        )
        assert len(one.top) == 3


def test_answers_end_at_the_context(engine: Engine) -> None:
    prompt = [5] * 500
    (done,) = run(engine, [prompt], SamplingParams(max_new_tokens=100, ignore_eos=True))
    assert (len(done.token_ids), done.finish_reason) == (12, "length")


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([], "empty"), ([5] * 512, "512 tokens"), ([320], "outside 0..319"), ([-1], "outside")],
)
def test_prompts_that_cannot_run_are_refused_before_any_work(
    engine: Engine, prompt: list[int], said: str
) -> None:
    with pytest.raises(QuantkitError, match=said):
        next(engine.generate([[1, 2], prompt], GREEDY))
    assert not engine.has_work
