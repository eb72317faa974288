"""How many blocks a cache has, and how many tokens of prompts a step computes where nobody chose:
more of models with keys and values and of a mixture over latents, where memory is left for them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refused import refused

from quantkit.executor import memory_budget
from quantkit.executor.cache.cache import BlockAllocator, PagedCache, plan_cache
from quantkit.executor.memory_budget import (
    LONG_PREFILL_TOKENS,
    LONGEST_PREFILL_TOKENS,
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
FACTS = {
    "bytes_per_token": 100,
    "free_bytes": 400_000,
    "device_type": "cpu",
    "max_batch": 4,
    "context_len": 1000,
}


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
    plan = plan_cache(
        **FACTS | {"bytes_per_token": loaded.cache_token_bytes, "free_bytes": 1 << 34},
        max_model_len=None,
        cache_tokens=None,
    )
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


def of(loaded, **changes):
    """The model with another config."""
    own = {"cache": loaded.config.cache, "routing": loaded.config.routing, "recurrent": None}
    return replace(loaded, config=SimpleNamespace(**own | {"hidden_size": 256} | changes))


def test_others_have_the_steps_that_their_device_has(loaded):
    cache = loaded.config.cache
    for kind in ("cpu", "npu"):
        assert long_step_bytes(replace(loaded, device=SimpleNamespace(type=kind))) is None
    others = [
        (cache, None, None),
        (KeyValueCache(2, 16), None, ShortConvolutions),
        (CompressedCache, loaded.config.routing, None),
    ]
    for held, routing, recurrent in others:
        assert long_step_bytes(of(loaded, cache=held, routing=routing, recurrent=recurrent)) is None
    sparse = of(loaded, cache=replace(cache, index_dim=32))
    assert long_step_bytes(sparse) - long_step_bytes(of(loaded)) > 1 << 29


def test_models_with_keys_and_values_have_long_steps_too(loaded, monkeypatch):
    """Qwen3-8B's sizes: of a token 4096 numbers of 16 bits in eight rows, and 12,288 three
    times."""
    sizes = {"cache": KeyValueCache(8, 128), "routing": None, "hidden_size": 4096}
    dense = of(loaded, **sizes)
    needed = long_step_bytes(dense)
    assert needed > LONG_PREFILL_TOKENS * 2 * (8 * 4096 + 3 * 12288)
    net = DeltaNet(16, 32, 128, 128, 4, frozenset({0}))
    # Queries, keys and values twice, two rows of 32 and decays of each of 32 heads, in float32.
    more = LONG_PREFILL_TOKENS * 4 * (2 * 2048 + 2 * 4096 + 32 * (2 * 32 + 128))
    assert long_step_bytes(of(loaded, **sizes, recurrent=net)) == needed + more
    assert long_step_bytes(of(loaded, cache=KeyValueCache(8, 128), hidden_size=2048)) != needed
    plan = SimpleNamespace(num_blocks=0, block_size=64)
    monkeypatch.setattr(LoadedModel, "cache_token_bytes", 1)
    for count, tokens in ((needed, LONG_PREFILL_TOKENS), (needed - 1, PREFILL_TOKENS["cuda"])):
        free(monkeypatch, count)
        assert default_chunk_tokens(dense, plan) == tokens


def test_mixtures_with_keys_and_values_may_have_the_longest_steps(loaded, monkeypatch):
    held = KeyValueCache(8, 64)
    for other in (loaded, of(loaded, cache=held, routing=None)):
        assert long_step_bytes(other, LONGEST_PREFILL_TOKENS) is None
    mixture, plan = of(loaded, cache=held), SimpleNamespace(num_blocks=0, block_size=64)
    needed = long_step_bytes(mixture, LONGEST_PREFILL_TOKENS)
    assert needed > long_step_bytes(mixture)
    monkeypatch.setattr(LoadedModel, "cache_token_bytes", 1)
    for count, tokens in ((needed, LONGEST_PREFILL_TOKENS), (needed - 1, PREFILL_TOKENS["cuda"])):
        free(monkeypatch, count)
        assert default_chunk_tokens(mixture, plan, longest=LONGEST_PREFILL_TOKENS) == tokens


def test_weights_that_a_pass_decodes_are_counted(loaded, monkeypatch):
    """In long steps, and where a cache leaves no room for those."""
    decoded, mixture = 1 << 30, of(loaded, cache=KeyValueCache(8, 64))
    needed, options = long_step_bytes(mixture), EngineOptions(Path("model"), max_batch=1 << 20)
    free(monkeypatch, 1 << 32)
    short = replace(options, chunk_tokens=4096)
    per_block = 64 * loaded.cache_token_bytes
    before = plan_kv_cache(loaded, short).num_blocks
    monkeypatch.setattr(loaded.weights, "decoded_bytes", decoded)
    assert long_step_bytes(mixture) > needed + decoded
    fewer = before - plan_kv_cache(loaded, short).num_blocks
    assert abs(fewer * per_block - 0.9 * decoded) < 2 * per_block


def test_the_cache_leaves_room_and_nothing_is_refused_for_it(loaded, monkeypatch):
    needed, per_block = long_step_bytes(loaded), 64 * loaded.cache_token_bytes
    options = EngineOptions(Path("model"), max_batch=1 << 20)  # as much as there is
    # A third of all for steps would be too much.
    for whole, asked, expected in (
        (5 * needed, {}, 4 * needed),
        (5 * needed, {"chunk_tokens": 4096}, 0.9 * 5 * needed),
        (3 * needed, {}, 0.9 * 3 * needed),
    ):
        free(monkeypatch, whole)
        plan = plan_kv_cache(loaded, replace(options, **asked))
        assert abs(expected - (plan.num_blocks - 1) * per_block) < 2 * per_block
    # A context that fits beside short steps only.
    long = replace(loaded, config=replace(loaded.config, max_position_embeddings=1 << 40))
    free(monkeypatch, 5 * needed)
    most = int(0.88 * 5 * needed) // per_block * 64
    assert plan_kv_cache(long, replace(options, max_model_len=most)).max_model_len == most
    assert plan_kv_cache(long, replace(options, cache_tokens=most)).tokens >= most
    with refused("fewer than the context"):
        plan_kv_cache(long, replace(options, max_model_len=most // 88 * 92))


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


def test_r1_beside_its_weights_has_room_for_long_inputs():
    """A card of 64 GB that holds 44 GB of weights: three inputs of 60 000 tokens, within nine
    tenths of what is left."""
    bytes_per_token, one = 61 * 576 * 2, 60_000 + 512
    facts = {"bytes_per_token": bytes_per_token, "device_type": "npu", "context_len": 163_840}
    facts |= {"max_model_len": one, "cache_tokens": None}
    plan = plan_cache(**facts, free_bytes=19 * 10**9, max_batch=64)
    assert plan.tokens >= 3 * one
    padding = 2 * 64 * bytes_per_token  # a block, and rounding up to a whole one
    assert plan.num_blocks * plan.block_size * bytes_per_token <= 0.9 * 19e9 + padding
    plenty = plan_cache(**facts, free_bytes=400 * 10**9, max_batch=2)
    assert plenty.tokens < 2 * (one + 64), "no more than the batch can use"


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
