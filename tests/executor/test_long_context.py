"""Inputs of 60 000 tokens: planned, scheduled in chunks, and attended to as far back as they
reach."""

from quantkit.executor.cache.cache import plan_cache

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
