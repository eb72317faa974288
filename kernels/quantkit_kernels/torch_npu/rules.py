"""What the manuals of torch_npu demand of the operators called here, on the Atlas A2 (910B): data, asserted before every call.

The operators' own shape functions are lenient (a wrong K, groups of 33 and int8 activations pass), and a device answers a violated rule
with an error code at best. Source: op-plugin's documentation of the custom interfaces, as of August 2026; it covers more than is called.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
Arguments = SimpleNamespace
"""An operator's arguments by the names of its schema, defaults filled in."""


@dataclass(frozen=True)
class Rule:
    text: str
    holds: Callable[[Arguments], bool]


def violated(name: str, arguments: Arguments) -> str | None:
    """The first rule of operator `name` that does not hold, None where all do."""
    broken = next((rule for rule in RULES[name] if not rule.holds(arguments)), None)
    return None if broken is None else f"{name}: {broken.text}; got {_described(arguments)}"


def _described(arguments: Arguments) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in vars(arguments).items() if value is not None)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}"
    return f"[{', '.join(map(_short, value))}]" if isinstance(value, (list, tuple)) else str(value)


def _columns(weight: Tensor) -> int:
    """N of a weight [.., K, N]; an int32 carries eight int4."""
    return weight.shape[-1] * (8 if weight.dtype == torch.int32 else 1)


def _is_int4(weight: Tensor) -> bool:
    return weight.dtype == torch.int32


def _antiquant_shapes(a: Arguments) -> bool:
    k, n = a.weight.shape[0], _columns(a.weight)
    if a.antiquant_group_size:
        return tuple(a.antiquant_scale.shape) == (-(-k // a.antiquant_group_size), n)
    return tuple(a.antiquant_scale.shape) in ((1,), (1, 1), (n,), (1, n))


WEIGHT_QUANT_BATCHMATMUL = (
    Rule("x is fp16 or bf16 [M, K]", lambda a: a.x.dim() == 2 and a.x.dtype in HALVES),
    Rule("nothing is empty", lambda a: a.x.numel() > 0 and a.weight.numel() > 0),
    Rule("weight is int8 or int32 (eight int4) [K, N]", lambda a: a.weight.dim() == 2 and a.weight.dtype in (torch.int8, torch.int32)),
    Rule("weight has x's K", lambda a: a.weight.shape[0] == a.x.shape[1]),
    Rule("an int4 weight is contiguous", lambda a: not _is_int4(a.weight) or a.weight.is_contiguous()),
    Rule("K and N are in 1..65535", lambda a: a.x.shape[1] <= 65535 and _columns(a.weight) <= 65535),
    Rule(
        "antiquant_group_size is 0 or a multiple of 32 in 32..K-1",
        lambda a: a.antiquant_group_size == 0 or (a.antiquant_group_size % 32 == 0 and 32 <= a.antiquant_group_size < a.x.shape[1]),
    ),
    Rule("antiquant_scale is of x's dtype", lambda a: a.antiquant_scale.dtype == a.x.dtype),
    Rule("antiquant_scale is (1,), (N,) or (K/group, N)", _antiquant_shapes),
    Rule(
        "antiquant_offset has antiquant_scale's shape and dtype",
        lambda a: (
            a.antiquant_offset is None
            or (a.antiquant_offset.shape == a.antiquant_scale.shape and a.antiquant_offset.dtype == a.antiquant_scale.dtype)
        ),
    ),
    Rule("output is not quantized, no bias: not used here", lambda a: a.quant_scale is None and a.quant_offset is None and a.bias is None),
    Rule("inner_precise is 0 for an ND weight", lambda a: a.inner_precise == 0),
    Rule("weight_dtype is not set on the A2", lambda a: a.weight_dtype is None),
)

QUANT_MATMUL = (
    Rule("x1 and x2 are int8", lambda a: a.x1.dtype == torch.int8 and a.x2.dtype == torch.int8),
    Rule("x1 is [.., M, K] of 2 to 6 dimensions, x2 [K, N]", lambda a: 2 <= a.x1.dim() <= 6 and a.x2.dim() == 2),
    Rule("x2 has x1's K", lambda a: a.x2.shape[0] == a.x1.shape[-1]),
    Rule("last dimensions are at most 65535", lambda a: max(a.x1.shape[-1], a.x2.shape[-1]) <= 65535),
    Rule("scale is (1,) or (N,)", lambda a: tuple(a.scale.shape) in ((1,), (a.x2.shape[1],))),
    Rule("output_dtype is given: the default is int8", lambda a: a.output_dtype in HALVES),
    Rule(
        "scale is fp32, or bf16 for bf16 outputs",
        lambda a: a.scale.dtype in (torch.float32, a.output_dtype) and a.scale.dtype != torch.half,
    ),
    Rule(
        "pertoken_scale is fp32 (M,)",
        lambda a: a.pertoken_scale is None or (a.pertoken_scale.dtype == torch.float32 and a.pertoken_scale.shape == (a.x1.shape[-2],)),
    ),
    Rule("fp16 outputs with an fp32 scale take a pertoken_scale", lambda a: a.output_dtype != torch.half or a.pertoken_scale is not None),
    Rule("offset goes with int8 outputs only", lambda a: a.offset is None),
    Rule("bias is not used here", lambda a: a.bias is None),
)

DYNAMIC_QUANT = (
    Rule("input is fp16 or bf16", lambda a: a.input.dtype in HALVES),
    Rule("input has more than one dimension", lambda a: a.input.dim() > 1),
    Rule("dst_type is int8 (None) on this path", lambda a: a.dst_type is None),
    Rule("quant_mode and dst_type_max are left alone on the A2", lambda a: a.quant_mode == "pertoken" and a.dst_type_max == 0.0),
    Rule("smooth_scales are not used here", lambda a: a.smooth_scales is None and a.group_index is None),
)


def _grouped_rows(a: Arguments) -> bool:
    # Reading the counts would make a device wait: their sum is checked where that costs nothing.
    return a.group_list.device.type != "cpu" or sum(a.group_list.tolist()) == a.x[0].shape[0]


def _grouped_dtypes(a: Arguments) -> bool:
    x, weight = a.x[0].dtype, a.weight[0].dtype
    if x == torch.int8:
        return bool(weight == torch.int8)
    if a.antiquant_scale is None:
        return x in FLOATS and weight == x and a.output_dtype in (None, x)
    return x in HALVES and weight in (torch.int8, torch.int32)


def _grouped_scales(a: Arguments) -> bool:
    weight, scale = a.weight[0], a.antiquant_scale
    if scale is None:
        return True
    e, n = weight.shape[0], _columns(weight)
    per_group = scale[0].dim() == 3 and scale[0].shape[0] == e and scale[0].shape[2] == n and weight.shape[1] % scale[0].shape[1] == 0
    return tuple(scale[0].shape) == (e, n) or (_is_int4(weight) and per_group)


GROUPED_MATMUL = (
    Rule("one x, one weight, one output", lambda a: len(a.x) == len(a.weight) == 1 and a.split_item in (2, 3)),
    Rule("groups are along M", lambda a: a.group_type == 0),
    Rule("group_list holds int64 counts of 2 to 1024 experts", lambda a: a.group_list_type == 1 and a.group_list.dtype == torch.int64),
    Rule("group_list has one count per expert", lambda a: 2 <= a.group_list.shape[0] == a.weight[0].shape[0] <= 1024),
    Rule("counts add up to the rows of x", _grouped_rows),
    Rule("x is [M, K], weight [E, K, N] with x's K", lambda a: a.x[0].dim() == 2 and a.weight[0].shape[1] == a.x[0].shape[1]),
    Rule("x is not transposed", lambda a: a.x[0].is_contiguous()),
    Rule("last dimensions are below 65536", lambda a: max(a.x[0].shape[-1], a.weight[0].shape[-1]) < 65536),
    Rule("int8 x with int8 weight, 16-bit x with int8 or int4 weight and antiquant_scale, or both of one float dtype", _grouped_dtypes),
    Rule("antiquant_scale is [E, N], or [E, G, N] for int4 with G dividing K", _grouped_scales),
    Rule("antiquant_scale is of x's dtype", lambda a: a.antiquant_scale is None or a.antiquant_scale[0].dtype == a.x[0].dtype),
    Rule(
        "antiquant_offset is given with antiquant_scale, of its shape and dtype",
        lambda a: (
            (a.antiquant_offset is None) == (a.antiquant_scale is None)
            and (a.antiquant_scale is None or a.antiquant_offset[0].shape == a.antiquant_scale[0].shape)
            and (a.antiquant_scale is None or a.antiquant_offset[0].dtype == a.antiquant_scale[0].dtype)
        ),
    ),
    Rule(
        "int8: scale [E, N] is bf16 for bf16 outputs and fp32 for fp16 outputs",
        lambda a: (
            a.x[0].dtype != torch.int8
            or (
                tuple(a.scale[0].shape) == (a.weight[0].shape[0], a.weight[0].shape[2])
                and (a.scale[0].dtype, a.output_dtype) in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16))
            )
        ),
    ),
    Rule(
        "int8: per_token_scale is fp32 (M,)",
        lambda a: (
            a.x[0].dtype != torch.int8 or (a.per_token_scale[0].dtype == torch.float32 and a.per_token_scale[0].shape == (a.x[0].shape[0],))
        ),
    ),
    Rule("offset and activation_* are not to be given", lambda a: a.offset is None and a.activation_input is None),
    Rule("bias and act_type are not used here", lambda a: a.bias is None and a.act_type == 0),
)

MOE_GATING_TOP_K = (
    Rule("x is a float [T, E] of at most 2048 experts", lambda a: a.x.dim() == 2 and a.x.dtype in FLOATS and a.x.shape[1] <= 2048),
    Rule("bias is [E] of x's dtype", lambda a: a.bias is None or (a.bias.dtype == a.x.dtype and a.bias.shape == (a.x.shape[1],))),
    Rule("experts split into the groups", lambda a: a.x.shape[1] % a.group_count == 0),
    Rule("a group has more than two experts", lambda a: a.x.shape[1] // a.group_count > 2),
    Rule("groups padded to 32 experts are at most 2048", lambda a: -(-(a.x.shape[1] // a.group_count) // 32) * 32 * a.group_count <= 2048),
    Rule("k_group is in 1..group_count", lambda a: 1 <= a.k_group <= a.group_count),
    Rule("k is at most the experts of the kept groups", lambda a: 1 <= a.k <= a.x.shape[1] // a.group_count * a.k_group),
    Rule("modes are 0 or 1, renorm is 0", lambda a: a.norm_type in (0, 1) and a.group_select_mode in (0, 1) and a.renorm == 0),
)

MOE_INIT_ROUTING_V2 = (
    Rule("x is a float or int8 [T, H]", lambda a: a.x.dim() == 2 and a.x.dtype in (*FLOATS, torch.int8)),
    Rule("expert_idx is int32 [T, k]", lambda a: a.expert_idx.dtype == torch.int32 and a.expert_idx.shape[0] == a.x.shape[0]),
    Rule("quant_mode is -1 (none) or 1 (int8 per token)", lambda a: a.quant_mode in (-1, 1)),
    Rule("a quantized x is a float", lambda a: a.quant_mode == -1 or a.x.dtype in FLOATS),
    Rule("nothing is dropped", lambda a: a.drop_pad_mode == 0 and a.active_num == a.expert_idx.numel()),
    Rule("all experts are active", lambda a: list(a.active_expert_range) == [0, a.expert_num]),
    Rule("counts are asked for", lambda a: a.expert_tokens_num_type == 1 and a.expert_tokens_num_flag),
    Rule("rows are where tokens went (gather)", lambda a: a.row_idx_type == 0),
    Rule("scale and offset are not used here", lambda a: a.scale is None and a.offset is None),
)

MOE_FINALIZE_ROUTING = (
    Rule("rows are a float [T * k, H]", lambda a: a.expanded_permuted_rows.dim() == 2 and a.expanded_permuted_rows.dtype in FLOATS),
    Rule("scales are [T, k] of the rows' dtype", lambda a: a.scales.dim() == 2 and a.scales.dtype == a.expanded_permuted_rows.dtype),
    Rule("there is a row for every scale", lambda a: a.scales.numel() == a.expanded_permuted_rows.shape[0]),
    Rule(
        "expanded_src_to_dst_row is int32 [T * k]",
        lambda a: a.expanded_src_to_dst_row.dtype == torch.int32 and a.expanded_src_to_dst_row.shape == (a.scales.numel(),),
    ),
    Rule("drop_pad_mode is 2: nothing dropped, token-major indices", lambda a: a.drop_pad_mode == 2),
    Rule("skips and bias are not used here", lambda a: a.skip1 is None and a.skip2 is None and a.bias is None),
)

SWIGLU = (
    Rule("input is a contiguous float", lambda a: a.input.dtype in FLOATS and a.input.is_contiguous()),
    Rule("input is not empty", lambda a: a.input.numel() > 0),
    Rule("input has 1 to 8 dimensions, the split one even", lambda a: 1 <= a.input.dim() <= 8 and a.input.shape[a.dim] % 2 == 0),
)

RMS_NORM = (
    Rule(
        "gamma is of input's dtype, or fp32 with a 16-bit input",
        lambda a: a.input.dtype in FLOATS and a.gamma.dtype in (a.input.dtype, torch.float32),
    ),
    Rule("gamma is the last dimension of input", lambda a: a.gamma.shape == a.input.shape[-1:]),
)

ADD_RMS_NORM = (
    Rule("x1, x2 and gamma are of one float dtype", lambda a: a.x1.dtype in FLOATS and a.x1.dtype == a.x2.dtype == a.gamma.dtype),
    Rule("x1 and x2 are of one shape, not empty", lambda a: a.x1.shape == a.x2.shape and a.x1.numel() > 0),
    Rule("gamma is the last dimension", lambda a: a.gamma.shape == a.x1.shape[-1:]),
)


ROTARY_MUL = (
    Rule("input is a float [T, heads, D]", lambda a: a.input.dim() == 3 and a.input.dtype in FLOATS),
    Rule(
        "fewer than 1000 heads, D even and below 896",
        lambda a: a.input.shape[1] < 1000 and a.input.shape[2] < 896 and a.input.shape[2] % 2 == 0,
    ),
    Rule("r1 and r2 are [T, 1, D]", lambda a: a.r1.shape == a.r2.shape == (a.input.shape[0], 1, a.input.shape[2])),
    Rule("r1 and r2 are of input's dtype", lambda a: a.r1.dtype == a.r2.dtype == a.input.dtype),
    Rule("rotary_mode is half or interleave, without a matrix", lambda a: a.rotary_mode in ("half", "interleave") and a.rotate is None),
)


def _mla(a: Arguments) -> bool:
    heads = a.num_heads
    return a.query_rope is None or (
        a.query.shape[-1] == 512
        and a.query_rope.shape[-1] == a.key_rope.shape[-1] == 64
        and heads <= 128
        and heads & (heads - 1) == 0
        and a.num_key_value_heads == 1
    )


FUSED_INFER_ATTENTION_SCORE = (
    Rule(
        "query, key and value are fp16 or bf16 of one dtype",
        lambda a: a.query.dtype in HALVES and a.query.dtype == a.key.dtype == a.value.dtype,
    ),
    Rule("layout BNSD: [B, heads, S, D]", lambda a: a.input_layout == "BNSD" and a.query.dim() == a.key.dim() == 4),
    Rule("everything is contiguous", lambda a: a.query.is_contiguous() and a.key.is_contiguous() and a.value.is_contiguous()),
    Rule("num_heads is the query's", lambda a: a.num_heads == a.query.shape[1] <= 256),
    Rule("num_key_value_heads is the key's", lambda a: a.num_key_value_heads == a.key.shape[1] == a.value.shape[1]),
    Rule("heads share keys evenly", lambda a: a.num_heads % a.num_key_value_heads == 0),
    Rule(
        "64 heads share a key at most, 128 with a rotary part",
        lambda a: a.query_rope is not None or a.num_heads // a.num_key_value_heads <= 64,
    ),
    Rule("D is at most 512 and a multiple of 16", lambda a: a.query.shape[-1] <= 512 and a.query.shape[-1] % 16 == 0),
    Rule("key and value have query's D", lambda a: a.query.shape[-1] == a.key.shape[-1] == a.value.shape[-1]),
    Rule("a rotary part of 64 goes with D = 512, one key head and a power of two of at most 128 heads", _mla),
    Rule("B is at most 65536", lambda a: a.query.shape[0] <= 65536),
    Rule("sparse_mode is 0", lambda a: a.sparse_mode == 0),
    Rule(
        "atten_mask is bool [B, 1, S, KV]",
        lambda a: (
            a.atten_mask is None
            or (a.atten_mask.dtype == torch.bool and tuple(a.atten_mask.shape) == (a.query.shape[0], 1, a.query.shape[2], a.key.shape[2]))
        ),
    ),
    Rule("scale is given: the default is 1", lambda a: a.scale != 1.0),
)

FORMAT_CAST = (Rule("acl_format is 2 (ND) or 29 (FRACTAL_NZ)", lambda a: a.acl_format in (2, 29)),)

PREFETCH = (
    Rule("max_size is positive", lambda a: a.max_size > 0),
    Rule("offset lies within the tensor", lambda a: 0 <= a.offset < a.input.numel() * a.input.element_size()),
)

PROLOG_HIDDEN = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
PROLOG_Q_LORA = (1536, 2048)
PROLOG_NOPE = (128, 192)
PROLOG_LATENT, PROLOG_ROPE = 512, 64
PROLOG_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
PROLOG_WEIGHTS = {0: (torch.bfloat16,) * 3, 1: (torch.bfloat16, torch.int8, torch.bfloat16), 2: (torch.int8,) * 3}
"""By weight_quant_mode: the dtypes of weight_dq, weight_uq_qr and weight_dkv_kr. FP8 modes are for newer chips, 4-bit ones do not exist."""


def _prolog_sizes(a: Arguments) -> bool:
    heads, nope, latent = a.weight_uk.shape
    return (
        a.token_x.shape[-1] in PROLOG_HIDDEN
        and a.weight_dq.shape[1] in PROLOG_Q_LORA
        and heads in PROLOG_HEADS
        and nope in PROLOG_NOPE
        and latent == PROLOG_LATENT
    )


def _prolog_weights_fit(a: Arguments) -> bool:
    hidden, q_lora = a.weight_dq.shape
    heads, nope, latent = a.weight_uk.shape
    return (
        a.token_x.shape[-1] == hidden
        and tuple(a.weight_uq_qr.shape) == (q_lora, heads * (nope + PROLOG_ROPE))
        and tuple(a.weight_dkv_kr.shape) == (hidden, latent + PROLOG_ROPE)
    )


def _prolog_scales(a: Arguments) -> bool:
    every = (a.dequant_scale_x, a.dequant_scale_w_dq, a.dequant_scale_w_dkv_kr)
    uq = a.dequant_scale_w_uq_qr
    if a.weight_quant_mode == 0:
        return uq is None and all(scale is None for scale in every)
    fits = uq is not None and uq.dtype == torch.float32 and tuple(uq.shape) == (1, a.weight_uq_qr.shape[1])
    if a.weight_quant_mode == 1:
        return fits and all(scale is None for scale in every)
    shapes = ((a.token_x.shape[0], 1), (1, a.weight_dq.shape[1]), (1, a.weight_dkv_kr.shape[1]))
    return fits and all(
        scale is not None and scale.dtype == torch.float32 and tuple(scale.shape) == shape for scale, shape in zip(every, shapes)
    )


MLA_PROLOG_V3 = (
    Rule("hidden size, low rank, heads and head size are ones it was made for", _prolog_sizes),
    Rule("weights are [He, Hcq], [Hcq, N * (D + 64)], [N, D, 512] and [He, 576]", _prolog_weights_fit),
    Rule(
        "weights are bf16 (mode 0), bf16 but for int8 weight_uq_qr (1), or int8 (2)",
        lambda a: (a.weight_dq.dtype, a.weight_uq_qr.dtype, a.weight_dkv_kr.dtype) == PROLOG_WEIGHTS.get(a.weight_quant_mode),
    ),
    Rule(
        "token_x is [T, He], int8 in mode 2 and bf16 else",
        lambda a: a.token_x.dim() == 2 and a.token_x.dtype == (torch.int8 if a.weight_quant_mode == 2 else torch.bfloat16),
    ),
    Rule("fp32 scales are given for what is int8, and for nothing else", _prolog_scales),
    Rule(
        "weight_uk, gains, angles and caches are bf16",
        lambda a: all(
            one.dtype == torch.bfloat16
            for one in (a.weight_uk, a.rmsnorm_gamma_cq, a.rmsnorm_gamma_ckv, a.rope_sin, a.rope_cos, a.kv_cache, a.kr_cache)
        ),
    ),
    Rule("angles are [T, 64]", lambda a: tuple(a.rope_sin.shape) == tuple(a.rope_cos.shape) == (a.token_x.shape[0], PROLOG_ROPE)),
    Rule(
        "caches are [blocks, block, 1, 512] and [blocks, block, 1, 64], blocks of 16 to 1024 in multiples of 16",
        lambda a: (
            tuple(a.kv_cache.shape[2:]) == (1, PROLOG_LATENT)
            and tuple(a.kr_cache.shape) == (*a.kv_cache.shape[:2], 1, PROLOG_ROPE)
            and a.kv_cache.shape[1] in range(16, 1025, 16)
        ),
    ),
    Rule(
        "cache_index is int64 [T]",
        lambda a: a.cache_index is not None and a.cache_index.dtype == torch.int64 and a.cache_index.shape == a.token_x.shape[:1],
    ),
    Rule("everything is contiguous", lambda a: all(one.is_contiguous() for one in vars(a).values() if isinstance(one, Tensor))),
    Rule(
        "caches and query are not quantized, blocks are PA_BSND: not used here",
        lambda a: (a.cache_mode, a.kv_cache_quant_mode, a.query_quant_mode, a.ckvkr_repo_mode) == ("PA_BSND", 0, 0, 0),
    ),
    Rule(
        "smooth scales, clips, factors and the normed query are not used here",
        lambda a: (
            a.smooth_scales_cq is None
            and a.k_nope_clip_alpha is None
            and a.actual_seq_len is None
            and not a.query_norm_flag
            and a.qc_qr_scale == a.kc_scale == 1.0
        ),
    ),
)

RULES: dict[str, tuple[Rule, ...]] = {
    "npu_weight_quant_batchmatmul": WEIGHT_QUANT_BATCHMATMUL,
    "npu_quant_matmul": QUANT_MATMUL,
    "npu_dynamic_quant": DYNAMIC_QUANT,
    "npu_grouped_matmul": GROUPED_MATMUL,
    "npu_moe_gating_top_k": MOE_GATING_TOP_K,
    "npu_moe_init_routing_v2": MOE_INIT_ROUTING_V2,
    "npu_moe_finalize_routing": MOE_FINALIZE_ROUTING,
    "npu_swiglu": SWIGLU,
    "npu_rms_norm": RMS_NORM,
    "npu_add_rms_norm": ADD_RMS_NORM,
    "npu_rotary_mul": ROTARY_MUL,
    "npu_fused_infer_attention_score": FUSED_INFER_ATTENTION_SCORE,
    "npu_mla_prolog_v3": MLA_PROLOG_V3,
    "npu_format_cast": FORMAT_CAST,
    "npu_prefetch": PREFETCH,
}
