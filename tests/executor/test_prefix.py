"""The prefix cache changes what is computed, and no token of an answer."""

import random
from dataclasses import replace

import pytest
from engines import completions

from quantkit import Engine, SamplingParams
from quantkit.executor.scheduler.prefix_cache import PrefixCachingAllocator

SYSTEM = [7 + i * 13 % 300 for i in range(200)]
"""Three full blocks and a part of one."""


@pytest.fixture(scope="module")
def without(tiny_checkpoint):
    return load(tiny_checkpoint, False)


def load(path, prefix_cache, **options):
    asked = {"max_batch": 4, "max_model_len": 512, **options}
    return Engine.load(path, device="cpu", dtype="float32", prefix_cache=prefix_cache, **asked)


def run(engine, prompts, params):
    return completions(engine, prompts, params)


def requests(count, new_tokens=20):
    """Half of them begin alike, one is asked twice; half are sampled."""
    prompts = [
        (SYSTEM if i % 2 else SYSTEM[50:]) + [20 + i // 4] * (5 + 30 * (i % 3))
        for i in range(count)
    ]
    return prompts, [
        SamplingParams(
            max_new_tokens=new_tokens, ignore_eos=True, temperature=i // 2 % 2 * 0.8, seed=i
        )
        for i in range(count)
    ]


def tokens(completions):
    return [completion.token_ids for completion in completions]


def part_at_a_tie(one, other):
    """Whether greedy answers, if they part, part by rounding: alike to 0.001 until there, and the
    chosen token still about as likely.

    A prompt that is cut otherwise goes through products of other sizes, whose last bits differ by
    processor, and the cache keeps 16 bits. Where two experts or two tokens are as good, that
    decides: on one CPU of two a random model's answer parted where an expert changed.
    """
    for mine, theirs in zip(one.logprobs, other.logprobs):
        if mine.token_id != theirs.token_id:
            return abs(mine.logprob - theirs.logprob) < 0.3
        if abs(mine.logprob - theirs.logprob) > 0.001:
            return False
    return True


@pytest.mark.parametrize("draft_length", [0, 1])
def test_tokens_are_those_without(tiny_checkpoint, without, draft_length):
    engine = load(tiny_checkpoint, True, draft_length=draft_length)
    prompts, params = requests(10)
    first, again = run(engine, prompts, params), run(engine, prompts, params)
    assert tokens(first) == tokens(again) == tokens(run(without, prompts, params))
    assert sum(one.cached_tokens for one in first) > 0
    assert [one.cached_tokens for one in again] == [
        (len(prompt) - 1) // 64 * 64 for prompt in prompts
    ]
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_blocks


def test_an_answer_is_found_as_the_next_turns_prompt(tiny_checkpoint, without):
    engine = load(tiny_checkpoint, True)
    greedy = [SamplingParams(max_new_tokens=80, ignore_eos=True)]
    (turn,) = run(engine, [SYSTEM], greedy)
    longer = SYSTEM + turn.token_ids + [9, 8, 7]
    (next_turn,) = run(engine, [longer], greedy)
    assert next_turn.cached_tokens == 256, "200 of the prompt and the first of the answer"
    assert tokens([next_turn]) == tokens(run(without, [longer], greedy))


def test_a_full_cache_evicts_and_preempts_and_loses_nothing(tiny_checkpoint, without):
    engine = load(tiny_checkpoint, True, cache_tokens=640, chunk_tokens=70)
    prompts, params = requests(12, new_tokens=90)
    params = [replace(one, logprobs=2) for one in params]
    pairs = list(zip(run(engine, prompts, params), run(without, prompts, params)))
    assert sum(one.token_ids == other.token_ids for one, other in pairs) >= 10
    for (one, other), asked in zip(pairs, params):
        assert asked.temperature or part_at_a_tie(one, other), one.index
    assert engine.scheduler.num_preempted > 0, (
        "the cache was large enough for all: the test tests nothing"
    )
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_blocks


def test_the_longest_unused_goes_first_and_nothing_in_use_goes(without):
    """Random takes, finds and ends against a plain account of who uses what."""
    generator = random.Random(0)
    blocks = PrefixCachingAllocator(num_blocks=13, block_size=4)
    live = []
    for _ in range(2000):
        if live and (generator.random() < 0.5 or blocks.num_free < 6):
            sequence = live.pop(generator.randrange(len(live)))
            blocks.publish(sequence)
            blocks.give_back(sequence.blocks)
        else:
            prompt = (
                [generator.randrange(2)] * 4
                + [generator.randrange(3)] * 4
                + [generator.randrange(9)] * generator.randrange(1, 9)
            )
            sequence = without.sequence(prompt, SamplingParams(), streams=False)
            found = blocks.find(sequence)
            sequence.blocks = found + blocks.take(-(-len(prompt) // 4) - len(found))
            sequence.num_cached = len(prompt)
            holds = {
                tuple(one.token_ids[: 4 * (i + 1)]): block
                for one in live
                for i, block in enumerate(one.blocks[: one.num_published_blocks])
            }
            for i in range((len(prompt) - 1) // 4):
                prefix = tuple(prompt[: 4 * (i + 1)])
                assert prefix not in holds or i < len(found), (
                    "what others have in use and published is found"
                )
            blocks.publish(sequence)
            live.append(sequence)
        used = {block for one in live for block in one.blocks}
        assert 0 not in used
        assert blocks.num_free == 12 - len(used)
        for one in live:
            for other in live:
                for mine, theirs, i in zip(one.blocks, other.blocks, range(9)):
                    assert (
                        mine != theirs or one.token_ids[: 4 * i + 4] == other.token_ids[: 4 * i + 4]
                    )


def test_eviction_keeps_beginnings(without):
    """Of a prefix that nobody uses the end is forgotten before the beginning."""
    blocks = PrefixCachingAllocator(num_blocks=5, block_size=4)
    sequence = without.sequence(list(range(1, 17)), SamplingParams(), streams=False)
    sequence.blocks, sequence.num_cached = blocks.take(4), 16
    blocks.publish(sequence)
    blocks.give_back(sequence.blocks)
    blocks.take(2)
    assert (
        blocks.find(without.sequence(list(range(1, 18)), SamplingParams(), streams=False))
        == sequence.blocks[:2]
    )
