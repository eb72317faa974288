"""What the manuals of torch_npu demand of the operators called here, on the Atlas A2 (910B): data,
asserted before every call.

The operators' own shape functions are lenient (a wrong K, groups of 33 and int8 activations pass),
and a device answers a violated rule with an error code at best. Source: op-plugin's documentation
of the custom interfaces, as of August 2026; it covers more than is called.
"""

from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.torch_npu.attention_rules import (
    FUSED_INFER_ATTENTION_SCORE,
    INTERLEAVE_ROPE,
    KV_RMSNORM_ROPE_CACHE,
    MLA_PROLOG_V3,
    ROTARY_MUL,
    TRANSPOSE_BATCHMATMUL,
)
from quantkit_kernels.torch_npu.rule import FLOATS, HALVES, Arguments, Rule


def violated(name: str, arguments: Arguments) -> str | None:
    """The first rule of operator `name` that does not hold, None where all do."""
    broken = next((rule for rule in RULES[name] if not rule.holds(arguments)), None)
    return None if broken is None else f"{name}: {broken.text}; got {_described(arguments)}"


def _described(arguments: Arguments) -> str:
    return ", ".join(
        f"{name} {_short(value)}" for name, value in vars(arguments).items() if value is not None
    )


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
    Rule(
        "weight is int8 or int32 (eight int4) [K, N]",
        lambda a: a.weight.dim() == 2 and a.weight.dtype in (torch.int8, torch.int32),
    ),
    Rule("weight has x's K", lambda a: a.weight.shape[0] == a.x.shape[1]),
    Rule(
        "an int4 weight is contiguous", lambda a: not _is_int4(a.weight) or a.weight.is_contiguous()
    ),
    Rule(
        "K and N are in 1..65535", lambda a: a.x.shape[1] <= 65535 and _columns(a.weight) <= 65535
    ),
    Rule(
        "antiquant_group_size is 0 or a multiple of 32 in 32..K-1",
        lambda a: (
            a.antiquant_group_size == 0
            or (a.antiquant_group_size % 32 == 0 and 32 <= a.antiquant_group_size < a.x.shape[1])
        ),
    ),
    Rule("antiquant_scale is of x's dtype", lambda a: a.antiquant_scale.dtype == a.x.dtype),
    Rule("antiquant_scale is (1,), (N,) or (K/group, N)", _antiquant_shapes),
    Rule(
        "antiquant_offset has antiquant_scale's shape and dtype",
        lambda a: (
            a.antiquant_offset is None
            or (
                a.antiquant_offset.shape == a.antiquant_scale.shape
                and a.antiquant_offset.dtype == a.antiquant_scale.dtype
            )
        ),
    ),
    Rule(
        "output is not quantized, no bias: not used here",
        lambda a: a.quant_scale is None and a.quant_offset is None and a.bias is None,
    ),
    Rule("inner_precise is 0 for an ND weight", lambda a: a.inner_precise == 0),
    Rule("weight_dtype is not set on the A2", lambda a: a.weight_dtype is None),
)

QUANT_MATMUL = (
    Rule("x1 and x2 are int8", lambda a: a.x1.dtype == torch.int8 and a.x2.dtype == torch.int8),
    Rule(
        "x1 is [.., M, K] of 2 to 6 dimensions, x2 [K, N]",
        lambda a: 2 <= a.x1.dim() <= 6 and a.x2.dim() == 2,
    ),
    Rule("x2 has x1's K", lambda a: a.x2.shape[0] == a.x1.shape[-1]),
    Rule(
        "last dimensions are at most 65535", lambda a: max(a.x1.shape[-1], a.x2.shape[-1]) <= 65535
    ),
    Rule("scale is (1,) or (N,)", lambda a: tuple(a.scale.shape) in ((1,), (a.x2.shape[1],))),
    Rule("output_dtype is given: the default is int8", lambda a: a.output_dtype in HALVES),
    Rule(
        "scale is fp32, or bf16 for bf16 outputs",
        lambda a: a.scale.dtype in (torch.float32, a.output_dtype) and a.scale.dtype != torch.half,
    ),
    Rule(
        "pertoken_scale is fp32 (M,)",
        lambda a: (
            a.pertoken_scale is None
            or (
                a.pertoken_scale.dtype == torch.float32
                and a.pertoken_scale.shape == (a.x1.shape[-2],)
            )
        ),
    ),
    Rule(
        "fp16 outputs with an fp32 scale take a pertoken_scale",
        lambda a: a.output_dtype != torch.half or a.pertoken_scale is not None,
    ),
    Rule("offset goes with int8 outputs only", lambda a: a.offset is None),
    Rule("bias is not used here", lambda a: a.bias is None),
)

DYNAMIC_QUANT = (
    Rule("input is fp16 or bf16", lambda a: a.input.dtype in HALVES),
    Rule("input has more than one dimension", lambda a: a.input.dim() > 1),
    Rule("dst_type is int8 (None) on this path", lambda a: a.dst_type is None),
    Rule(
        "quant_mode and dst_type_max are left alone on the A2",
        lambda a: a.quant_mode == "pertoken" and a.dst_type_max == 0.0,
    ),
    Rule(
        "smooth_scales are not used here",
        lambda a: a.smooth_scales is None and a.group_index is None,
    ),
)


NARROW_INPUTS = 18432
"""Of int8 rows by int4 weights: aclnnGroupedMatmulV4 (ops-transformer at 50e9ae9), which has this
for the A2; op-plugin's page has not."""


def _grouped_rows(a: Arguments) -> bool:
    # Reading the counts would make a device wait: their sum is checked where that costs nothing.
    return a.group_list.device.type != "cpu" or sum(a.group_list.tolist()) == a.x[0].shape[0]


def _grouped_dtypes(a: Arguments) -> bool:
    x, weight = a.x[0].dtype, a.weight[0].dtype
    if x == torch.int8:
        return weight in (torch.int8, torch.int32)
    if a.antiquant_scale is None:
        return x in FLOATS and weight == x and a.output_dtype in (None, x)
    return x in HALVES and weight in (torch.int8, torch.int32)


def _grouped_scales(a: Arguments) -> bool:
    weight, scale = a.weight[0], a.antiquant_scale
    if scale is None:
        return True
    e, n = weight.shape[0], _columns(weight)
    per_group = (
        scale[0].dim() == 3
        and scale[0].shape[0] == e
        and scale[0].shape[2] == n
        and weight.shape[1] % scale[0].shape[1] == 0
    )
    return tuple(scale[0].shape) == (e, n) or (_is_int4(weight) and per_group)


def _narrow(a: Arguments) -> bool:
    """int8 rows by int4 weights (A8W4)."""
    return a.x[0].dtype == torch.int8 and _is_int4(a.weight[0])


GROUPED_MATMUL = (
    Rule(
        "one x, one weight, one output",
        lambda a: len(a.x) == len(a.weight) == 1 and a.split_item in (2, 3),
    ),
    Rule("groups are along M", lambda a: a.group_type == 0),
    Rule(
        "group_list holds int64 counts of 2 to 1024 experts",
        lambda a: a.group_list_type == 1 and a.group_list.dtype == torch.int64,
    ),
    Rule(
        "group_list has one count per expert",
        lambda a: 2 <= a.group_list.shape[0] == a.weight[0].shape[0] <= 1024,
    ),
    Rule("counts add up to the rows of x", _grouped_rows),
    Rule(
        "x is [M, K], weight [E, K, N] with x's K",
        lambda a: a.x[0].dim() == 2 and a.weight[0].shape[1] == a.x[0].shape[1],
    ),
    Rule("x is not transposed", lambda a: a.x[0].is_contiguous()),
    Rule(
        "last dimensions are below 65536",
        lambda a: max(a.x[0].shape[-1], _columns(a.weight[0])) < 65536,
    ),
    Rule(
        "int8 x with int8 or int4 weight, 16-bit x with these and antiquant_scale, or both of one "
        "float dtype",
        _grouped_dtypes,
    ),
    Rule("antiquant_scale is [E, N], or [E, G, N] for int4 with G dividing K", _grouped_scales),
    Rule(
        "antiquant_scale is of x's dtype",
        lambda a: a.antiquant_scale is None or a.antiquant_scale[0].dtype == a.x[0].dtype,
    ),
    Rule(
        "antiquant_offset is given with antiquant_scale, of its shape and dtype",
        lambda a: (
            (a.antiquant_offset is None) == (a.antiquant_scale is None)
            and (
                a.antiquant_scale is None
                or a.antiquant_offset[0].shape == a.antiquant_scale[0].shape
            )
            and (
                a.antiquant_scale is None
                or a.antiquant_offset[0].dtype == a.antiquant_scale[0].dtype
            )
        ),
    ),
    Rule(
        "int8: scale [E, N] is bf16 for bf16 outputs and fp32 for fp16 outputs",
        lambda a: (
            a.x[0].dtype != torch.int8
            or _narrow(a)
            or (
                tuple(a.scale[0].shape) == (a.weight[0].shape[0], a.weight[0].shape[2])
                and (a.scale[0].dtype, a.output_dtype)
                in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16))
            )
        ),
    ),
    Rule(
        "int8: per_token_scale is fp32 (M,)",
        lambda a: (
            a.x[0].dtype != torch.int8
            or (
                a.per_token_scale[0].dtype == torch.float32
                and a.per_token_scale[0].shape == (a.x[0].shape[0],)
            )
        ),
    ),
    Rule(
        "int8 by int4: scale is int64 [E, 1, N], bias fp32 [E, N], outputs have 16 bits",
        lambda a: (
            not _narrow(a)
            or (
                (a.scale[0].dtype, tuple(a.scale[0].shape))
                == (torch.int64, (a.weight[0].shape[0], 1, _columns(a.weight[0])))
                and a.bias is not None
                and (a.bias[0].dtype, tuple(a.bias[0].shape))
                == (torch.float32, (a.weight[0].shape[0], _columns(a.weight[0])))
                and a.output_dtype in HALVES
            )
        ),
    ),
    Rule(
        "int8 by int4: the weight is contiguous",
        lambda a: not _narrow(a) or a.weight[0].is_contiguous(),
    ),
    Rule(
        f"int8 by int4: K is at most {NARROW_INPUTS}",
        lambda a: not _narrow(a) or a.x[0].shape[1] <= NARROW_INPUTS,
    ),
    Rule(
        "offset and activation_* are not to be given",
        lambda a: a.offset is None and a.activation_input is None,
    ),
    Rule(
        "a bias goes with int8 by int4 only, act_type is not used here",
        lambda a: (a.bias is None or _narrow(a)) and a.act_type == 0,
    ),
)

MOE_GATING_TOP_K = (
    Rule(
        "x is a float [T, E] of at most 2048 experts",
        lambda a: a.x.dim() == 2 and a.x.dtype in FLOATS and a.x.shape[1] <= 2048,
    ),
    Rule(
        "bias is [E] of x's dtype",
        lambda a: a.bias is None or (a.bias.dtype == a.x.dtype and a.bias.shape == (a.x.shape[1],)),
    ),
    Rule("experts split into the groups", lambda a: a.x.shape[1] % a.group_count == 0),
    Rule("a group has more than two experts", lambda a: a.x.shape[1] // a.group_count > 2),
    Rule(
        "groups padded to 32 experts are at most 2048",
        lambda a: -(-(a.x.shape[1] // a.group_count) // 32) * 32 * a.group_count <= 2048,
    ),
    Rule("k_group is in 1..group_count", lambda a: 1 <= a.k_group <= a.group_count),
    Rule(
        "k is at most the experts of the kept groups",
        lambda a: 1 <= a.k <= a.x.shape[1] // a.group_count * a.k_group,
    ),
    Rule(
        "modes are 0 or 1, renorm is 0",
        lambda a: a.norm_type in (0, 1) and a.group_select_mode in (0, 1) and a.renorm == 0,
    ),
)

MOE_INIT_ROUTING_V2 = (
    Rule(
        "x is a float or int8 [T, H]",
        lambda a: a.x.dim() == 2 and a.x.dtype in (*FLOATS, torch.int8),
    ),
    Rule(
        "expert_idx is int32 [T, k]",
        lambda a: a.expert_idx.dtype == torch.int32 and a.expert_idx.shape[0] == a.x.shape[0],
    ),
    Rule("quant_mode is -1 (none) or 1 (int8 per token)", lambda a: a.quant_mode in (-1, 1)),
    Rule("a quantized x is a float", lambda a: a.quant_mode == -1 or a.x.dtype in FLOATS),
    Rule(
        "nothing is dropped",
        lambda a: a.drop_pad_mode == 0 and a.active_num == a.expert_idx.numel(),
    ),
    Rule("all experts are active", lambda a: list(a.active_expert_range) == [0, a.expert_num]),
    Rule(
        "counts are asked for, or where they add up",
        lambda a: a.expert_tokens_num_type in (0, 1) and a.expert_tokens_num_flag,
    ),
    Rule("rows are where tokens went (gather)", lambda a: a.row_idx_type == 0),
    Rule("scale and offset are not used here", lambda a: a.scale is None and a.offset is None),
)

MOE_FINALIZE_ROUTING = (
    Rule(
        "rows are a float [T * k, H]",
        lambda a: a.expanded_permuted_rows.dim() == 2 and a.expanded_permuted_rows.dtype in FLOATS,
    ),
    Rule(
        "scales are [T, k] of the rows' dtype",
        lambda a: a.scales.dim() == 2 and a.scales.dtype == a.expanded_permuted_rows.dtype,
    ),
    Rule(
        "there is a row for every scale",
        lambda a: a.scales.numel() == a.expanded_permuted_rows.shape[0],
    ),
    Rule(
        "expanded_src_to_dst_row is int32 [T * k]",
        lambda a: (
            a.expanded_src_to_dst_row.dtype == torch.int32
            and a.expanded_src_to_dst_row.shape == (a.scales.numel(),)
        ),
    ),
    Rule(
        "drop_pad_mode is 2: nothing dropped, token-major indices", lambda a: a.drop_pad_mode == 2
    ),
    Rule(
        "skips and bias are not used here",
        lambda a: a.skip1 is None and a.skip2 is None and a.bias is None,
    ),
)

SWIGLU = (
    Rule(
        "input is a contiguous float", lambda a: a.input.dtype in FLOATS and a.input.is_contiguous()
    ),
    Rule("input is not empty", lambda a: a.input.numel() > 0),
    Rule(
        "input has 1 to 8 dimensions, the split one even",
        lambda a: 1 <= a.input.dim() <= 8 and a.input.shape[a.dim] % 2 == 0,
    ),
)

RMS_NORM = (
    Rule(
        "gamma is of input's dtype, or fp32 with a 16-bit input",
        lambda a: a.input.dtype in FLOATS and a.gamma.dtype in (a.input.dtype, torch.float32),
    ),
    Rule("gamma is the last dimension of input", lambda a: a.gamma.shape == a.input.shape[-1:]),
)

ADD_RMS_NORM = (
    Rule(
        "x1, x2 and gamma are of one float dtype",
        lambda a: a.x1.dtype in FLOATS and a.x1.dtype == a.x2.dtype == a.gamma.dtype,
    ),
    Rule(
        "x1 and x2 are of one shape, not empty",
        lambda a: a.x1.shape == a.x2.shape and a.x1.numel() > 0,
    ),
    Rule("gamma is the last dimension", lambda a: a.gamma.shape == a.x1.shape[-1:]),
)


FORMAT_CAST = (
    Rule("acl_format is 2 (ND) or 29 (FRACTAL_NZ)", lambda a: a.acl_format in (2, 29)),
    Rule(
        "input is contiguous: the manual does not say what becomes of another",
        lambda a: a.input.is_contiguous(),
    ),
)

PREFETCH = (
    Rule("max_size is positive", lambda a: a.max_size > 0),
    Rule(
        "offset lies within the tensor",
        lambda a: 0 <= a.offset < a.input.numel() * a.input.element_size(),
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
    "npu_interleave_rope": INTERLEAVE_ROPE,
    "npu_kv_rmsnorm_rope_cache": KV_RMSNORM_ROPE_CACHE,
    "npu_fused_infer_attention_score_v2": FUSED_INFER_ATTENTION_SCORE,
    "npu_transpose_batchmatmul": TRANSPOSE_BATCHMATMUL,
    "npu_mla_prolog_v3": MLA_PROLOG_V3,
    "npu_format_cast": FORMAT_CAST,
    "npu_prefetch": PREFETCH,
}
