"""The prefix cache changes what is computed, and no token of an answer."""

import engines
import pytest
from engines import completions, tokens

from quantkit import SamplingParams
from quantkit.executor.scheduler.prefix_cache import PrefixCachingAllocator

SYSTEM = [7 + i * 13 % 300 for i in range(200)]
"""Three full blocks and a part of one."""


@pytest.fixture(scope="module")
def without(tiny_checkpoint):
    return load(tiny_checkpoint, False)


def load(path, prefix_cache, **options):
    return engines.load(path, max_model_len=512, prefix_cache=prefix_cache, **options)


def requests(count):
    """Half of them begin alike, one is asked twice; half are sampled."""
    prompts = [
        (SYSTEM if i % 2 else SYSTEM[50:]) + [20 + i // 4] * (5 + 30 * (i % 3))
        for i in range(count)
    ]
    return prompts, [
        SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=i // 2 % 2 * 0.8, seed=i)
        for i in range(count)
    ]


@pytest.mark.parametrize("draft_length", [0, 1])
def test_tokens_are_those_without(tiny_checkpoint, without, draft_length):
    engine = load(tiny_checkpoint, True, draft_length=draft_length)
    prompts, params = requests(10)
    first, again = (completions(engine, prompts, params) for _ in range(2))
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert [one.token_ids for one in first] == tokens(without, prompts, params)
    assert sum(one.cached_tokens for one in first) > 0
    assert [one.cached_tokens for one in again] == [
        (len(prompt) - 1) // 64 * 64 for prompt in prompts
    ]


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
