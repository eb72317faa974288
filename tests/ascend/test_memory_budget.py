"""The cache of an NPU is sized by what a prompt's operators left free."""

from types import SimpleNamespace

import torch
from ascend import npu_double
from refused import refused

from quantkit.executor import memory_budget
from quantkit.executor.options import EngineOptions
from quantkit.executor.weights.load import load_model


def test_a_prompt_is_computed_before_memory_is_asked_for(monkeypatch):
    order = []
    monkeypatch.setattr(memory_budget, "warm_up", lambda loaded, tokens: order.append(tokens))
    monkeypatch.setattr(
        memory_budget, "free_bytes", lambda device: order.append(device.type) or 1000
    )
    for kind in ("npu", "cpu", "cuda"):
        loaded = SimpleNamespace(
            device=SimpleNamespace(type=kind), config=SimpleNamespace(max_position_embeddings=512)
        )
        assert memory_budget.free_cache_bytes(loaded, 2048) == 1000
    assert order == [512, "npu", "cpu", "cuda"]


def test_the_engine_asks_so(quantized, monkeypatch):
    """For as many tokens as a step computes, and plans with the answer."""
    asked = []

    def free(loaded, tokens):
        asked.append(tokens)
        return 1 << 20

    monkeypatch.setattr(memory_budget, "free_cache_bytes", free)
    loaded = load_model(quantized("rtn-w4a16"), device="cpu", dtype="bfloat16", backend="reference")
    planned = memory_budget.plan_kv_cache(
        loaded, EngineOptions("model", chunk_tokens=96, max_batch=64)
    )
    per_token = loaded.num_cached_layers * loaded.cache_width * loaded.cache_dtype.itemsize
    assert planned.tokens <= (1 << 18) // per_token + planned.block_size  # a quarter of it on a CPU
    memory_budget.plan_kv_cache(loaded, EngineOptions("model", max_batch=64))
    with monkeypatch.context() as patched:
        patched.setattr(type(loaded), "sequence_bytes", lambda self, *sizes: 1 << 19)
        assert (
            memory_budget.plan_kv_cache(loaded, EngineOptions("model", max_batch=64)).tokens
            <= planned.tokens // 2 + planned.block_size
        )
    asked.pop()
    assert asked == [96, memory_budget.PREFILL_TOKENS["cpu"]]


def test_the_prompt_goes_through_every_operator(quantized, monkeypatch):
    with npu_double.installed() as called:
        loaded = load_model(
            quantized("rtn-w4a16"), device="cpu", dtype="bfloat16", backend="torch_npu"
        )
        called.clear()
        memory_budget.warm_up(loaded, 40)
        assert {
            "npu_grouped_matmul",
            "npu_weight_quant_batchmatmul",
            "npu_moe_init_routing_v2",
        } <= set(called)
        heads = []
        with monkeypatch.context() as patched:
            patched.setattr(
                type(loaded.model), "logits", lambda self, hidden: heads.append(len(hidden))
            )
            memory_budget.warm_up(loaded, 2 * loaded.cache_layout.block_size + 1)
        assert heads == [1], "of the last token, as a step asks"
        given = []
        monkeypatch.setattr(
            type(loaded.model), "__call__", lambda self, ids, context: given.append(ids) or full()
        )
        with refused("too little memory for a prompt of 40 tokens"):
            memory_budget.warm_up(loaded, 40)
    assert [len(ids) for ids in given] == [40]


def full():
    raise torch.OutOfMemoryError("NPU out of memory. Tried to allocate 1.76 GiB\nmore")
