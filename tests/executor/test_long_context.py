"""Inputs of 60 000 tokens: planned, scheduled in chunks, and attended to as far back as they
reach."""

import pytest
import torch

from quantkit.executor.cache.cache import PagedCache, plan_cache
from quantkit.executor.runner.attention_context import Chunk, DecodeContext, PrefillContext
from quantkit.executor.weights.load import load_model

INPUT, OUTPUT, CHUNK = 60_000, 512, 2048
R1_BYTES_PER_TOKEN = 61 * 576 * 2


def r1_plan(free_gb, max_batch=64):
    plan = plan_cache(
        bytes_per_token=R1_BYTES_PER_TOKEN,
        free_bytes=int(free_gb * 1e9),
        device_type="npu",
        max_batch=max_batch,
        context_len=163_840,
        max_model_len=INPUT + OUTPUT,
        cache_tokens=None,
    )
    return {"tokens": plan.tokens, "bytes": plan.num_blocks * plan.block_size * R1_BYTES_PER_TOKEN}


def test_r1_beside_its_weights_has_room_for_long_inputs():
    """A card of 64 GB that holds 44 GB of weights: several such inputs at once, within nine tenths
    of what is left."""
    plan = r1_plan(free_gb=19)
    assert plan["tokens"] >= 3 * (INPUT + OUTPUT)
    assert (
        plan["bytes"] <= 0.9 * 19e9 + 2 * 64 * R1_BYTES_PER_TOKEN
    )  # the padding block, and rounding up to a whole one
    assert r1_plan(free_gb=400, max_batch=2)["tokens"] < 2 * (INPUT + OUTPUT + 64), (
        "no more than the batch can use"
    )


@torch.inference_mode()
@pytest.mark.parametrize("new", [1, 9])
def test_absorbed_decoding_is_expanded_prefill_at_60k(tiny_dense_checkpoint, new):
    """Two ways to the last token's hidden state: keys expanded in parts and merged, and one pass
    over the latents as they are."""
    loaded = load_model(tiny_dense_checkpoint, device="cpu", dtype="float32")
    config = loaded.config
    blocks = torch.randperm(-(-INPUT // 64), generator=torch.Generator().manual_seed(1)) + 1
    cache = PagedCache(
        config.num_hidden_layers,
        len(blocks) + 1,
        config.cache_width,
        block_size=64,
        dtype=torch.float32,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(2)
    for layer in cache.layers:
        layer.normal_(generator=generator)
    tokens = torch.arange(10, 10 + new)
    prefilled = loaded.model(tokens, PrefillContext(cache, [Chunk(INPUT - new, new, blocks)]))[-1]
    position = torch.tensor([INPUT - 1])
    slot = blocks[position // 64] * 64 + position % 64
    decoded = loaded.model(tokens[-1:], DecodeContext(cache, position, blocks[None], slot))[0]
    torch.testing.assert_close(decoded, prefilled, rtol=0, atol=2e-5)
    cache.layers[1][blocks[0], 0] += 40.0
    changed = loaded.model(tokens[-1:], DecodeContext(cache, position, blocks[None], slot))[0]
    assert not torch.allclose(changed, decoded, atol=1e-4), "the first token is not seen"
