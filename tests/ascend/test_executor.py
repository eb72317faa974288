"""The executor on the double of torch_npu: the built-in model in each grid, and unquantized.

Two statements. What the double gives is what the manuals say, to the bit: a second computation in
float64 with the operators' roundings (exact.py) has the same tokens and the same log-probabilities.
And those roundings cost no more than bf16 or fp16 themselves do: along one text, the double is as
far from float32 as the reference backend is.
"""

import functools

import pytest
import torch
from ascend import exact, npu_double
from refused import refused

from quantkit import Engine, SamplingParams
from quantkit.common.assets import builtin_model
from quantkit.executor.cache.cache import PagedCache
from quantkit.executor.runner.attention_context import DecodeContext
from quantkit.executor.runner.prompt_context import Chunk, PrefillContext
from quantkit.executor.weights.load import load_model

QUESTIONS = ("What is 12 + 7?", "Tom has 5 apples and buys 8 more. How many apples does Tom have?")
ALONG = (*QUESTIONS, "A box holds 6 pens. How many pens are in 4 boxes?")
"""Some 100 tokens of answers: of one answer's, a token or two would decide the mean."""
DTYPES = ("bfloat16", "float16")
ALWAYS = {
    "npu_rms_norm",
    "npu_add_rms_norm",
    "npu_swiglu",
    "npu_moe_gating_top_k",
    "npu_rotary_mul",
    "npu_fused_infer_attention_score_v2",
}
ROUTED = {"npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_moe_finalize_routing"}
CALLED = {
    "rtn-w4a16": ROUTED | {"npu_weight_quant_batchmatmul"},
    "awq-w4a16": ROUTED | {"npu_weight_quant_batchmatmul"},
    "int8-a8w8c16": ROUTED | {"npu_dynamic_quant", "npu_quant_matmul", "npu_format_cast"},
    "int4-w4a8": ROUTED | {"npu_dynamic_quant", "npu_quant_matmul", "npu_format_cast"},
    "fp4-w4a16": set(),
    "bf16": ROUTED,
}


@pytest.fixture
def model(request, quantized):
    return builtin_model("tiny-r1") if request.param == "bf16" else quantized(request.param)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def answers(path, dtype, backend):
    engine = Engine.load(
        path, device="cpu", dtype=dtype, backend=backend, max_batch=4, max_model_len=256
    )
    prompts = [
        engine.tokenizer.encode_chat([{"role": "user", "content": question}])
        for question in QUESTIONS
    ]
    params = SamplingParams(max_new_tokens=12, logprobs=2)
    return sorted(engine.generate(prompts, params), key=lambda done: done.index)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("model", "scheme"), [(scheme, scheme) for scheme in CALLED], indirect=["model"]
)
def test_the_double_is_exact(model, scheme, dtype):
    with exact.ExactProducts(), exact.installed():
        expected = answers(model, dtype, "reference")
    with exact.ExactProducts(), npu_double.installed() as called:
        got = answers(model, dtype, "torch_npu")
    assert set(called) == ALWAYS | CALLED[scheme]
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    assert [one.logprobs for one in got] == [one.logprobs for one in expected]


def test_an_fp8_checkpoint(tiny_checkpoint):
    """What a published source holds: expanded at load, multiplied by torch."""
    with exact.ExactProducts(), exact.installed():
        expected = forced(tiny_checkpoint, "bfloat16", "reference", [(list(range(1, 20)), 12)])
    with exact.ExactProducts(), npu_double.installed() as called:
        got = forced(tiny_checkpoint, "bfloat16", "torch_npu", [(list(range(1, 20)), 12)])
    assert set(called) >= ROUTED
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
# int4-w4a8 rounds as INT8 does, and rtn-w4a16 as AWQ.
@pytest.mark.parametrize("model", sorted(CALLED.keys() - {"int4-w4a8", "rtn-w4a16"}), indirect=True)
def test_as_far_from_float32_as_the_reference(model, dtype):
    texts, ideal = in_float32(model)
    reference = forced(model, dtype, "reference", texts)
    with npu_double.installed():
        ours = forced(model, dtype, "torch_npu", texts)
    assert len(ours) > 80
    assert divergence(ideal, ours) < max(
        2 * divergence(ideal, reference), 1e-5
    )  # in fp16 both are next to nothing
    # A greedy token may differ only where the two best are closer than the reference's own rounding
    # moves them.
    best = ideal.topk(2, dim=-1)
    gap = best.values[:, 0] - best.values[:, 1]
    moved = reference.gather(1, best.indices)
    noise = (moved[:, 0] - moved[:, 1] - gap).abs().max()
    differs = ours.argmax(dim=-1) != reference.argmax(dim=-1)
    assert bool((gap[differs] < 2 * noise).all())


Text = tuple[list[int], int]
"""Token ids, and how many of them are the prompt."""


@functools.cache
def in_float32(model):
    """The questions with the reference's answers, and its log-probabilities along them."""
    engine = Engine.load(
        model, device="cpu", dtype="float32", backend="reference", max_batch=4, max_model_len=256
    )
    prompts = [
        engine.tokenizer.encode_chat([{"role": "user", "content": question}]) for question in ALONG
    ]
    done = sorted(
        engine.generate(prompts, SamplingParams(max_new_tokens=60)), key=lambda one: one.index
    )
    texts = [(prompt + one.token_ids, len(prompt)) for prompt, one in zip(prompts, done)]
    return texts, forced(model, "float32", "reference", texts)


def forced(path, dtype, backend, texts):
    """Log-probabilities float64 [steps, vocab] after every text's prompt, then after each later
    token, decoded a token of each text at a time."""
    loaded = load_model(path, device="cpu", dtype=dtype, backend=backend)
    layout = loaded.cache_layout
    parts, size = layout.widths if len(layout.widths) > 1 else (), layout.block_size
    tables = torch.arange(1, 1 + 7 * len(texts)).view(-1, 7)
    cache = PagedCache(
        loaded.num_cached_layers,
        1 + tables.numel(),
        loaded.cache_width,
        block_size=size,
        dtype=loaded.dtype,
        device="cpu",
        parts=parts,
    )
    rows = []
    for (text, prompt), table in zip(texts, tables):
        context = PrefillContext(cache, [Chunk(0, prompt, table)])
        hidden = loaded.model(torch.tensor(text[:prompt]), context)
        rows.append(loaded.model.logits(hidden[-1:]))
    for step in range(max(len(text) - prompt for text, prompt in texts)):
        left = [one for one, (text, prompt) in enumerate(texts) if prompt + step < len(text)]
        positions, blocks = torch.tensor([texts[one][1] + step for one in left]), tables[left]
        slots = blocks[torch.arange(len(left)), positions // size] * size + positions % size
        ids = torch.tensor([texts[one][0][texts[one][1] + step] for one in left])
        hidden = loaded.model(ids, DecodeContext(cache, positions, blocks, slots))
        rows.append(loaded.model.logits(hidden))
    return torch.cat(rows).double().log_softmax(dim=-1)


def divergence(ideal, other):
    """Mean KL divergence per step, in nats."""
    return float((ideal.exp() * (ideal - other)).sum(dim=-1).mean())


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_a_cache_in_8_bits_is_refused(tiny_dense_checkpoint, cache):
    with (
        npu_double.installed(),
        refused(f"no cache of {cache} .* leave --cache out"),
    ):
        load_model(tiny_dense_checkpoint, device="cpu", backend="torch_npu", cache=cache)
