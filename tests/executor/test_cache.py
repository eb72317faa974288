"""Blocks, and how many of them there are."""

import pytest
import torch
from refused import refused

from quantkit.executor.cache.cache import BlockAllocator, PagedCache, plan_cache

FACTS = {
    "bytes_per_token": 100,
    "free_bytes": 400_000,
    "device_type": "cpu",
    "max_batch": 4,
    "context_len": 1000,
}


def test_keys_and_values_lie_apart():
    cache = PagedCache(2, 4, 12, block_size=2, dtype=torch.float32, device="cpu", parts=(6, 6))
    keys, values = cache.heads(1, 3)
    assert keys.shape == values.shape == (4, 2, 2, 3)
    assert keys.data_ptr() == cache.layers[1][0].data_ptr()
    assert cache.nbytes == 2 * 4 * 2 * 12 * 4


def test_allocator_never_hands_out_the_padding_block():
    allocator = BlockAllocator(5)
    blocks = allocator.take(4)
    assert sorted(blocks) == [1, 2, 3, 4]
    allocator.give_back(blocks[1:3])
    assert allocator.num_free == 2
    assert sorted(allocator.take(2)) == sorted(blocks[1:3])


def test_plan_takes_what_the_batch_needs_or_what_there_is():
    plenty = plan_cache(**{**FACTS, "free_bytes": 10**9}, max_model_len=None, cache_tokens=None)
    assert plenty.tokens == 4 * 16 * 64  # four sequences of 1000 tokens, which share no block of 64
    assert plenty.max_model_len == 1000
    scarce = plan_cache(**{**FACTS, "free_bytes": 200_000}, max_model_len=None, cache_tokens=None)
    assert scarce.max_model_len == scarce.tokens == 512


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max_model_len": None, "cache_tokens": 1001}, "1000 fit in memory"),
        ({"max_model_len": 900, "cache_tokens": 100}, "fewer than the context of 900"),
    ],
)
def test_what_does_not_fit_is_refused(asked, said):
    with refused(said):
        plan_cache(**FACTS, **asked)
