"""Backend torch_npu on the double: every operator against float64, and every rule shown to refuse something."""

from typing import Any

import pytest
import torch
from kernel_weights import exact_experts, layer, random_experts
from quantkit_kernels import (
    Fp4,
    Routing,
    dequantize,
    functional,
    prepare,
    reference,
    route,
    torch_npu,
)
from quantkit_kernels.samples import TOLERANCE, distance, exact_linear, random_weight
from quantkit_kernels.torch_npu import calls, layout, rules

GRIDS = ("int4-asym-32", "int4-asym-128", "int4-sym-128", "int8", "fp4", "dense")
HALVES = (torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("called")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("grid", GRIDS)
def test_linear(grid: str, dtype: torch.dtype, called: list[str]) -> None:
    called.clear()
    rng = torch.Generator().manual_seed(1)
    weight = random_weight(grid, 264, 384, rng)
    linear = prepare(weight, backend="torch_npu", dtype=dtype)
    for rows in (1, 7):
        x = random(rows, 384, dtype=dtype, seed=rows)
        assert distance(linear(x), exact_linear(x, weight)) < TOLERANCE[dtype]
    expected = {
        "int4": {"npu_weight_quant_batchmatmul"},
        "int8": {"npu_format_cast", "npu_dynamic_quant", "npu_quant_matmul"},
        "fp4": set(),
        "dense": set(),
    }
    assert set(called) == expected[grid.split("-")[0]]


def test_int4_of_one_group_per_row_is_per_channel() -> None:
    weight = random_weight("int4-asym-128", 16, 128, torch.Generator().manual_seed(1))
    x = random(3, 128)
    assert distance(prepare(weight, backend="torch_npu")(x), exact_linear(x, weight)) < TOLERANCE[torch.bfloat16]


def test_fp4_decodes_exactly() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(8, 4)
    scale = torch.tensor([0.001953125, 0.015625, 1.0, 448.0]).to(torch.float8_e4m3fn).repeat(8, 1)
    weight = Fp4(codes, scale, torch.tensor(0.5))
    decoded = prepare(weight, backend="torch_npu", dtype=torch.bfloat16)(torch.eye(64).bfloat16()).T
    assert torch.equal(decoded.double(), dequantize(weight, torch.float64))


@pytest.mark.parametrize("grid", GRIDS)
def test_experts(grid: str) -> None:
    rng = torch.Generator().manual_seed(2)
    weights = random_experts(grid, 6, 256, 128, rng)
    experts = layer(weights, "torch_npu", torch.bfloat16)
    for tokens, top_k in ((1, 1), (5, 2), (33, 4)):
        x = random(tokens, 256, seed=tokens)
        ids = torch.rand(tokens, 6, generator=rng).topk(top_k, dim=-1).indices
        topk_weights = torch.rand(tokens, top_k, generator=rng)
        assert distance(experts(x, ids, topk_weights), exact_experts(x, ids, topk_weights, weights)) < 1.5e-2, tokens


def test_norms_and_activation(called: list[str]) -> None:
    called.clear()
    x, residual, gain = random(5, 7168), random(5, 7168, seed=1), random(7168, seed=2)
    for ours, twin in zip(
        (functional.rms_norm(x, gain, 1e-6, backend="torch_npu"), *functional.add_rms_norm(x, residual, gain, 1e-6, backend="torch_npu")),
        (reference.rms_norm(x, gain, 1e-6), *reference.add_rms_norm(x, residual, gain, 1e-6)),
    ):
        assert distance(ours, twin.double()) < 4e-3
    assert distance(functional.silu_and_mul(x, backend="torch_npu"), reference.silu_and_mul(x).double()) < 4e-3
    assert called == ["npu_rms_norm", "npu_add_rms_norm", "npu_swiglu"]


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_route(scoring: str, norm_topk_prob: bool, called: list[str]) -> None:
    called.clear()
    logits, bias = random(9, 256, dtype=torch.float32), random(256, dtype=torch.float32, seed=1) / 10
    rule = Routing(256, 8, norm_topk_prob, scoring, n_group=8, topk_group=4, routed_scaling_factor=2.5)
    ids, weights = route(logits, bias, rule, backend="torch_npu")
    twin_ids, twin_weights = reference.route(logits, bias, rule)
    assert torch.equal(ids, twin_ids)
    torch.testing.assert_close(weights, twin_weights, rtol=1e-5, atol=1e-6)
    assert bool(called) == ((scoring == "sigmoid") == norm_topk_prob)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope(interleaved: bool, called: list[str]) -> None:
    called.clear()
    x, positions = random(5, 16, 64), torch.tensor([3, 0, 7, 7, 1])
    angles = random(8, 32, dtype=torch.float32, seed=1)
    ours = functional.rope(x, positions, angles.cos(), angles.sin(), interleaved=interleaved, backend="torch_npu")
    assert distance(ours, reference.rope(x, positions, angles.cos(), angles.sin(), interleaved).double()) < 4e-3
    assert called == ["npu_rotary_mul"]


def test_prefetch_names_every_tensor(called: list[str]) -> None:
    linear = prepare(random_weight("int8", 64, 64, torch.Generator().manual_seed(1)), backend="torch_npu")
    called.clear()
    torch_npu.prefetch(linear.held())
    assert called == ["npu_prefetch"] * 2


def test_carriers_are_low_nibble_first() -> None:
    assert layout.carry_int4(torch.tensor([[1, 2, 3, 4, 5, 6, 7, -8]], dtype=torch.int8)).item() == 0x87654321 - (1 << 32)
    codes = torch.randint(-8, 8, (5, 48), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layout.uncarry_int4(layout.carry_int4(codes)), codes)


def test_offset_is_added() -> None:
    """The sign that decides: with the zero point subtracted a second time the product would be far off."""
    weight = random_weight("int4-asym-32", 8, 64, torch.Generator().manual_seed(3))
    carriers, scale, offset = layout.int4_tensors(weight, torch.float16)
    x = random(2, 64, dtype=torch.float16)
    assert distance(calls.weight_quant_matmul(x, carriers, scale, offset, 32), exact_linear(x, weight)) < 2e-3
    assert distance(calls.weight_quant_matmul(x, carriers, scale, -offset, 32), exact_linear(x, weight)) > 0.1


def good_calls() -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """One call of each operator that keeps every rule."""
    x, carriers, scale = random(4, 128), torch.zeros(128, 8, dtype=torch.int32), random(4, 64)
    counts = torch.tensor([1, 3])
    routing = {"active_num": 8, "expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "active_expert_range": [0, 4]}
    q, latents = random(2, 16, 1, 512), random(3, 1, 16, 512)
    attention: dict[str, Any] = {"num_heads": 16, "num_key_value_heads": 1, "scale": 0.1, "input_layout": "BNSD"}
    attention |= {"query_rope": random(2, 16, 1, 64), "key_rope": random(3, 1, 16, 64), "block_size": 16}
    attention |= {"block_table": torch.tensor([[1, 2], [2, 0]]).int(), "actual_seq_lengths_kv": [20, 3]}
    angles = random(2, 1, 1, 64), random(2, 1, 1, 64)
    int8 = torch.ones(4, 128, dtype=torch.int8)
    prolog = [random(4, 1024), random(1024, 1536), random(1536, 2 * 192), random(2, 128, 512), random(1024, 576), random(1536), random(512)]
    prolog += [random(4, 64), random(4, 64), torch.zeros(2, 16, 1, 512).bfloat16(), torch.zeros(2, 16, 1, 64).bfloat16()]
    return {
        "npu_weight_quant_batchmatmul": ([x, carriers, scale, scale], {"antiquant_group_size": 32}),
        "npu_quant_matmul": ([int8, int8.T, torch.ones(4)], {"pertoken_scale": torch.ones(4), "output_dtype": torch.bfloat16}),
        "npu_dynamic_quant": ([x], {}),
        "npu_grouped_matmul": (
            [[x], [torch.zeros(2, 128, 8, dtype=torch.int32)]],
            {"antiquant_scale": [random(2, 4, 64)], "antiquant_offset": [random(2, 4, 64)], "group_list": counts}
            | {"group_list_type": 1, "group_type": 0, "split_item": 2},
        ),
        "npu_moe_gating_top_k": ([random(3, 64), 4], {"bias": random(64), "k_group": 2, "group_count": 4, "norm_type": 1}),
        "npu_moe_init_routing_v2": ([x, torch.zeros(4, 2, dtype=torch.int32)], routing),
        "npu_moe_finalize_routing": (
            [random(8, 16), None, None, None, random(4, 2), torch.arange(8, dtype=torch.int32), None],
            {"drop_pad_mode": 2},
        ),
        "npu_swiglu": ([x], {}),
        "npu_rms_norm": ([x, random(128)], {}),
        "npu_add_rms_norm": ([x, x, random(128)], {}),
        "npu_rotary_mul": ([random(4, 16, 64), random(4, 1, 64), random(4, 1, 64), "interleave"], {}),
        "npu_fused_infer_attention_score": ([q, latents, latents], attention),
        "npu_interleave_rope": ([random(4, 16, 1, 64), random(4, 1, 1, 64), random(4, 1, 1, 64)], {}),
        "npu_kv_rmsnorm_rope_cache": (
            [random(2, 1, 1, 576), random(512), *angles, torch.tensor([3, 17]), random(2, 16, 1, 64), random(2, 16, 1, 512)],
            {"cache_mode": "PA"},
        ),
        "npu_mla_prolog_v3": (prolog, {"cache_index": torch.arange(4)}),
        "npu_format_cast": ([int8, 29], {}),
        "npu_prefetch": ([int8, None, 64], {}),
    }


BAD = [
    ("npu_weight_quant_batchmatmul", "x", torch.ones(4, 128, dtype=torch.int8), "fp16 or bf16"),
    ("npu_weight_quant_batchmatmul", "x", torch.empty(0, 128, dtype=torch.bfloat16), "empty"),
    ("npu_weight_quant_batchmatmul", "weight", torch.zeros(128, 8), "int8 or int32"),
    ("npu_weight_quant_batchmatmul", "weight", torch.zeros(96, 8, dtype=torch.int32), "x's K"),
    ("npu_weight_quant_batchmatmul", "weight", torch.zeros(8, 128, dtype=torch.int32).T, "contiguous"),
    ("npu_weight_quant_batchmatmul", "weight", torch.zeros(128, 8192, dtype=torch.int32), "65535"),
    ("npu_weight_quant_batchmatmul", "antiquant_group_size", 33, "multiple of 32"),
    ("npu_weight_quant_batchmatmul", "antiquant_group_size", 128, "multiple of 32"),
    ("npu_weight_quant_batchmatmul", "antiquant_scale", torch.ones(4, 64), "x's dtype"),
    ("npu_weight_quant_batchmatmul", "antiquant_scale", random(4, 32), "K/group, N"),
    ("npu_weight_quant_batchmatmul", "antiquant_offset", random(2, 64), "antiquant_scale's shape"),
    ("npu_weight_quant_batchmatmul", "bias", random(64), "no bias"),
    ("npu_weight_quant_batchmatmul", "inner_precise", 1, "inner_precise"),
    ("npu_weight_quant_batchmatmul", "weight_dtype", 1, "weight_dtype"),
    ("npu_quant_matmul", "x1", random(4, 128), "int8"),
    ("npu_quant_matmul", "x1", torch.ones(128, dtype=torch.int8), "2 to 6"),
    ("npu_quant_matmul", "x1", torch.ones(4, 64, dtype=torch.int8), "x1's K"),
    ("npu_quant_matmul", "scale", torch.ones(5), "(N,)"),
    ("npu_quant_matmul", "output_dtype", None, "output_dtype"),
    ("npu_quant_matmul", "scale", torch.ones(4, dtype=torch.float16), "bf16 for bf16"),
    ("npu_quant_matmul", "pertoken_scale", torch.ones(5), "pertoken_scale"),
    ("npu_quant_matmul", "offset", torch.ones(1), "offset"),
    ("npu_quant_matmul", "bias", torch.ones(4), "bias"),
    ("npu_dynamic_quant", "input", torch.ones(4, 8), "fp16 or bf16"),
    ("npu_dynamic_quant", "input", random(8), "dimension"),
    ("npu_dynamic_quant", "dst_type", 1, "dst_type"),
    ("npu_dynamic_quant", "quant_mode", "pertensor", "quant_mode"),
    ("npu_dynamic_quant", "smooth_scales", random(128), "smooth"),
    ("npu_grouped_matmul", "split_item", 0, "one output"),
    ("npu_grouped_matmul", "group_type", -1, "along M"),
    ("npu_grouped_matmul", "group_list_type", 0, "counts"),
    ("npu_grouped_matmul", "group_list", torch.tensor([4]), "per expert"),
    ("npu_grouped_matmul", "group_list", torch.tensor([1, 2]), "add up"),
    ("npu_grouped_matmul", "x", [random(4, 96)], "x's K"),
    ("npu_grouped_matmul", "x", [random(128, 4).T], "transposed"),
    ("npu_grouped_matmul", "weight", [torch.zeros(2, 128, 8)], "16-bit x"),
    ("npu_grouped_matmul", "antiquant_scale", None, "one float dtype"),
    ("npu_grouped_matmul", "antiquant_scale", [random(2, 5, 64)], "G dividing K"),
    ("npu_grouped_matmul", "antiquant_scale", [torch.ones(2, 4, 64)], "x's dtype"),
    ("npu_grouped_matmul", "antiquant_offset", None, "antiquant_offset"),
    ("npu_grouped_matmul", "offset", [torch.ones(1)], "offset"),
    ("npu_grouped_matmul", "act_type", 1, "act_type"),
    ("npu_moe_gating_top_k", "x", torch.ones(3, 64, dtype=torch.int32), "float"),
    ("npu_moe_gating_top_k", "bias", torch.ones(64), "x's dtype"),
    ("npu_moe_gating_top_k", "group_count", 5, "split"),
    ("npu_moe_gating_top_k", "group_count", 32, "more than two"),
    ("npu_moe_gating_top_k", "k_group", 5, "k_group"),
    ("npu_moe_gating_top_k", "k", 33, "kept groups"),
    ("npu_moe_gating_top_k", "renorm", 1, "renorm"),
    ("npu_moe_init_routing_v2", "x", torch.ones(4, 8, dtype=torch.int32), "int8"),
    ("npu_moe_init_routing_v2", "expert_idx", torch.zeros(4, 2, dtype=torch.int64), "int32"),
    ("npu_moe_init_routing_v2", "quant_mode", 0, "quant_mode"),
    ("npu_moe_init_routing_v2", "active_num", 4, "dropped"),
    ("npu_moe_init_routing_v2", "active_expert_range", [0, 2], "active"),
    ("npu_moe_init_routing_v2", "expert_tokens_num_type", 0, "counts"),
    ("npu_moe_init_routing_v2", "row_idx_type", 1, "gather"),
    ("npu_moe_init_routing_v2", "scale", torch.ones(1), "not used"),
    ("npu_moe_finalize_routing", "expanded_permuted_rows", random(2, 4, 16), "[T * k, H]"),
    ("npu_moe_finalize_routing", "scales", torch.ones(4, 2), "rows' dtype"),
    ("npu_moe_finalize_routing", "scales", random(3, 2), "every scale"),
    ("npu_moe_finalize_routing", "expanded_src_to_dst_row", torch.arange(8), "int32"),
    ("npu_moe_finalize_routing", "drop_pad_mode", 0, "token-major"),
    ("npu_moe_finalize_routing", "bias", random(4, 16), "bias"),
    ("npu_swiglu", "input", random(128, 4).T, "contiguous"),
    ("npu_swiglu", "input", random(0, 4), "empty"),
    ("npu_swiglu", "input", random(4, 5), "even"),
    ("npu_rms_norm", "gamma", torch.ones(128, dtype=torch.float16), "gamma"),
    ("npu_rms_norm", "gamma", random(64), "last dimension"),
    ("npu_add_rms_norm", "gamma", torch.ones(128), "one float dtype"),
    ("npu_add_rms_norm", "x2", random(3, 128), "one shape"),
    ("npu_add_rms_norm", "gamma", random(64), "last dimension"),
    ("npu_rotary_mul", "input", random(4, 64), "[T, heads, D]"),
    ("npu_rotary_mul", "input", random(4, 16, 63), "even"),
    ("npu_rotary_mul", "r1", random(4, 16, 64), "[T, 1, D]"),
    ("npu_rotary_mul", "r2", torch.ones(4, 1, 64), "input's dtype"),
    ("npu_rotary_mul", "rotary_mode", "quarter", "rotary_mode"),
    ("npu_interleave_rope", "x", random(4, 16, 64), "[T, heads, 1, 64]"),
    ("npu_interleave_rope", "cos", random(4, 1, 1, 32), "[T, 1, 1, 64]"),
    ("npu_interleave_rope", "sin", torch.ones(4, 1, 1, 64), "x's dtype"),
    ("npu_interleave_rope", "x", random(16, 4, 1, 64).transpose(0, 1), "contiguous"),
    ("npu_kv_rmsnorm_rope_cache", "kv", random(2, 1, 1, 512), "576"),
    ("npu_kv_rmsnorm_rope_cache", "gamma", torch.ones(512), "kv's dtype"),
    ("npu_kv_rmsnorm_rope_cache", "cos", random(2, 1, 1, 32), "[T, 1, 1, 64]"),
    ("npu_kv_rmsnorm_rope_cache", "index", torch.tensor([3, 17]).int(), "int64"),
    ("npu_kv_rmsnorm_rope_cache", "k_cache", torch.zeros(2, 16, 1, 64), "kv's dtype"),
    ("npu_kv_rmsnorm_rope_cache", "ckv_cache", random(16, 2, 1, 512).transpose(0, 1), "contiguous"),
    ("npu_kv_rmsnorm_rope_cache", "cache_mode", "Norm", "PA"),
    ("npu_kv_rmsnorm_rope_cache", "is_output_kv", True, "not used"),
    ("npu_fused_infer_attention_score", "key", torch.ones(3, 1, 16, 512), "one dtype"),
    ("npu_fused_infer_attention_score", "input_layout", "BSH", "BNSD"),
    ("npu_fused_infer_attention_score", "query", random(2, 16, 2, 512), "[B, heads, 1, D]"),
    ("npu_fused_infer_attention_score", "query", random(2, 512, 1, 16).permute(0, 3, 2, 1), "contiguous"),
    ("npu_fused_infer_attention_score", "num_heads", 8, "num_heads"),
    ("npu_fused_infer_attention_score", "block_table", None, "no other cache"),
    ("npu_fused_infer_attention_score", "block_table", torch.tensor([[1, 2], [2, 0]]), "int32"),
    ("npu_fused_infer_attention_score", "num_key_value_heads", 2, "key heads"),
    ("npu_fused_infer_attention_score", "block_size", 128, "block_size"),
    ("npu_fused_infer_attention_score", "query_rope", random(2, 16, 1, 32), "rotary part of 64"),
    ("npu_fused_infer_attention_score", "value", random(3, 1, 16, 256), "same shape"),
    ("npu_fused_infer_attention_score", "actual_seq_lengths_kv", None, "length per row"),
    ("npu_fused_infer_attention_score", "actual_seq_lengths_kv", [20, 33], "within its blocks"),
    ("npu_fused_infer_attention_score", "sparse_mode", 3, "sparse_mode"),
    ("npu_fused_infer_attention_score", "atten_mask", torch.zeros(2, 1, 1, 32, dtype=torch.bool), "mask"),
    ("npu_fused_infer_attention_score", "scale", 1.0, "scale"),
    ("npu_mla_prolog_v3", "weight_uk", random(3, 128, 512), "made for"),
    ("npu_mla_prolog_v3", "token_x", random(4, 1000), "made for"),
    ("npu_mla_prolog_v3", "weight_dkv_kr", random(1024, 512), "[He, 576]"),
    ("npu_mla_prolog_v3", "weight_uq_qr", torch.ones(1536, 384, dtype=torch.int8), "mode 0"),
    ("npu_mla_prolog_v3", "weight_quant_mode", 3, "mode 0"),
    ("npu_mla_prolog_v3", "token_x", torch.ones(4, 1024, dtype=torch.int8), "mode 2"),
    ("npu_mla_prolog_v3", "dequant_scale_w_uq_qr", torch.ones(1, 384), "scales"),
    ("npu_mla_prolog_v3", "rmsnorm_gamma_cq", torch.ones(1536), "bf16"),
    ("npu_mla_prolog_v3", "rope_cos", random(4, 32), "[T, 64]"),
    ("npu_mla_prolog_v3", "kv_cache", torch.zeros(2, 8, 1, 512).bfloat16(), "blocks of 16 or 128"),
    ("npu_mla_prolog_v3", "cache_index", torch.arange(4).int(), "int64"),
    ("npu_mla_prolog_v3", "weight_dq", random(1536, 1024).T, "contiguous"),
    ("npu_mla_prolog_v3", "cache_mode", "PA_NZ", "PA_BSND"),
    ("npu_mla_prolog_v3", "query_norm_flag", True, "not used"),
    ("npu_format_cast", "acl_format", 3, "acl_format"),
    ("npu_prefetch", "max_size", 0, "max_size"),
    ("npu_prefetch", "offset", 512, "offset"),
]


@pytest.mark.parametrize("name", rules.RULES)
def test_a_good_call_passes(name: str) -> None:
    args, kwargs = good_calls()[name]
    calls.call(name, *args, **kwargs)


@pytest.mark.parametrize(("name", "argument", "value", "text"), BAD)
def test_a_bad_call_is_refused(name: str, argument: str, value: Any, text: str) -> None:
    args, kwargs = good_calls()[name]
    arguments = calls.bind(name, args, kwargs)
    setattr(arguments, argument, value)
    broken = rules.violated(name, arguments)
    assert broken is not None
    assert text in broken
    given = {key: item for key, item in vars(arguments).items() if item is not None}
    with pytest.raises(AssertionError, match=name):
        calls.call(name, **given)


def test_unusable_names_the_reason() -> None:
    cpu = torch.device("cpu")
    assert "bfloat16 and float16" in (torch_npu.unusable("linear_int8", cpu, torch.float32, ()) or "")
    assert "multiples of 8, not 12" in (torch_npu.unusable("linear_int4", cpu, torch.bfloat16, ((12, 64),)) or "")
    assert torch_npu.unusable("linear_int4", cpu, torch.bfloat16, ((16, 64),)) is None
    assert "does not run on cuda" in (torch_npu.unusable("rms_norm", torch.device("cuda"), None, ()) or "")
    assert torch_npu.unusable("experts_dense", cpu, torch.float32, ()) is None
