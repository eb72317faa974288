"""How many tokens of prompts a step computes where nobody chose: more of models with keys and
values and of a mixture over latents, where memory is left for them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refused import refused

from quantkit.executor import memory_budget
from quantkit.executor.cache.cache import plan_cache
from quantkit.executor.memory_budget import (
    LONG_PREFILL_TOKENS,
    PREFILL_TOKENS,
    default_chunk_tokens,
    long_step_bytes,
    plan_kv_cache,
)
from quantkit.executor.options import EngineOptions
from quantkit.executor.weights.load import LoadedModel, load_model
from quantkit.models.architecture import CompressedCache, KeyValueCache
from quantkit.models.delta_rule import DeltaNet
from quantkit.models.short_conv import ShortConvolutions

CUDA = torch.device("cuda")


@pytest.fixture
def loaded(tiny_checkpoint, monkeypatch):
    """On a card, as far as headroom asks."""
    monkeypatch.setattr(LoadedModel, "cache_layout", SimpleNamespace(block_size=64))
    return replace(load_model(tiny_checkpoint, device="cpu", dtype="bfloat16"), device=CUDA)


def free(monkeypatch, count):
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: count)


def test_a_mixture_over_latents_has_long_steps_where_memory_is_left(loaded, monkeypatch):
    needed = long_step_bytes(loaded)
    rows = LONG_PREFILL_TOKENS * loaded.config.hidden_size * 2
    assert needed > rows * 2 * (
        loaded.config.routing.num_experts_per_tok + 1
    )  # what experts read and write of every pair
    plan = plan_cache(bytes_per_token=loaded.cache_token_bytes, free_bytes=1 << 34, device_type="cuda", max_batch=2, context_len=512,
                      max_model_len=None, cache_tokens=None)  # fmt: skip
    held = plan.num_blocks * plan.block_size * loaded.cache_token_bytes
    free(monkeypatch, held + needed)
    assert default_chunk_tokens(loaded, plan) == LONG_PREFILL_TOKENS
    free(monkeypatch, held + needed - 1)
    assert default_chunk_tokens(loaded, plan) == PREFILL_TOKENS["cuda"]
    drafts = replace(loaded)  # its cache has as many blocks
    free(monkeypatch, 2 * held + needed - 1)
    assert default_chunk_tokens(loaded, plan, drafts) == PREFILL_TOKENS["cuda"]
    free(monkeypatch, 2 * held + needed)
    assert default_chunk_tokens(loaded, plan, drafts) == LONG_PREFILL_TOKENS
    with monkeypatch.context() as patched:  # another rank has less
        free(patched, held + needed)
        patched.setattr(type(loaded.weights.ranks), "minimum", lambda self, value: value - 1)
        assert default_chunk_tokens(loaded, plan) == PREFILL_TOKENS["cuda"]


def test_others_have_the_steps_that_their_device_has(loaded):
    cache = loaded.config.cache
    for kind in ("cpu", "npu"):
        assert long_step_bytes(replace(loaded, device=SimpleNamespace(type=kind))) is None
    asked = loaded.config.routing
    others = [
        (cache, None, None),
        (KeyValueCache(2, 16), None, ShortConvolutions),
        (CompressedCache, asked, None),
    ]
    for held, routing, recurrent in others:
        config = SimpleNamespace(cache=held, routing=routing, recurrent=recurrent, hidden_size=256)
        assert long_step_bytes(replace(loaded, config=config)) is None
    config = SimpleNamespace(
        cache=replace(cache, index_dim=32), routing=asked, recurrent=None, hidden_size=256
    )
    sparse = long_step_bytes(replace(loaded, config=config))
    config.cache = cache
    assert sparse - long_step_bytes(replace(loaded, config=config)) > 1 << 29


def test_models_with_keys_and_values_have_long_steps_too(loaded, monkeypatch):
    """Qwen3-8B's sizes: of a token 4096 numbers of 16 bits in eight rows, and 12,288 three
    times."""
    config = SimpleNamespace(
        cache=KeyValueCache(8, 128), routing=None, recurrent=None, hidden_size=4096
    )
    dense = replace(loaded, config=config)
    needed = long_step_bytes(dense)
    assert needed > LONG_PREFILL_TOKENS * 2 * (8 * 4096 + 3 * 12288)
    net = DeltaNet(16, 32, 128, 128, 4, frozenset({0}))
    recurrent = replace(dense, config=SimpleNamespace(**{**vars(config), "recurrent": net}))
    # Queries, keys and values twice, two rows of 32 and decays of each of 32 heads, in float32.
    more = LONG_PREFILL_TOKENS * 4 * (2 * 2048 + 2 * 4096 + 32 * (2 * 32 + 128))
    assert long_step_bytes(recurrent) == needed + more
    mixture = replace(
        dense,
        config=SimpleNamespace(
            **{**vars(config), "routing": loaded.config.routing, "hidden_size": 2048}
        ),
    )
    assert long_step_bytes(mixture) != needed
    plan = SimpleNamespace(num_blocks=0, block_size=64)
    monkeypatch.setattr(LoadedModel, "cache_token_bytes", 1)
    for count, tokens in ((needed, LONG_PREFILL_TOKENS), (needed - 1, PREFILL_TOKENS["cuda"])):
        free(monkeypatch, count)
        assert default_chunk_tokens(dense, plan) == tokens


def test_the_cache_leaves_room_and_nothing_is_refused_for_it(loaded, monkeypatch):
    needed = long_step_bytes(loaded)
    per_block = 64 * loaded.cache_token_bytes
    options = EngineOptions(Path("model"), max_batch=1 << 20)  # as much as there is
    whole = 5 * needed
    free(monkeypatch, whole)
    plan = plan_kv_cache(loaded, options)
    assert abs(whole - needed - (plan.num_blocks - 1) * per_block) < 2 * per_block
    chosen = plan_kv_cache(loaded, replace(options, chunk_tokens=4096))
    assert abs(0.9 * whole - (chosen.num_blocks - 1) * per_block) < 2 * per_block
    few = 3 * needed  # a third of it for steps would be too much
    free(monkeypatch, few)
    assert (
        abs(0.9 * few - (plan_kv_cache(loaded, options).num_blocks - 1) * per_block) < 2 * per_block
    )
    # A context that fits beside short steps only.
    long = replace(loaded, config=replace(loaded.config, max_position_embeddings=1 << 40))
    free(monkeypatch, whole)
    most = int(0.88 * whole) // per_block * 64
    assert plan_kv_cache(long, replace(options, max_model_len=most)).max_model_len == most
    with refused("fewer than the context"):
        plan_kv_cache(long, replace(options, max_model_len=int(0.92 * whole) // per_block * 64))
    asked = plan_kv_cache(long, replace(options, cache_tokens=most))
    assert asked.tokens >= most
