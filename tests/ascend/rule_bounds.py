"""Calls just inside and just outside every condition of the rules of products, routing and norms.

A change names arguments of a good call and what they become, tensors by shape and dtype: rules look
at nothing else of most.
"""

from typing import Any

import torch

B, H, F, D = torch.bfloat16, torch.float16, torch.float32, torch.float64
I8, I16, I32, I64 = torch.int8, torch.int16, torch.int32, torch.int64
Change = dict[str, Any]


class T:
    """A tensor of a shape and dtype that takes no memory; `transposed` swaps its last two
    dimensions, which is not contiguous."""

    def __init__(self, *shape: int, dtype: torch.dtype = B, transposed: bool = False) -> None:
        self.shape, self.dtype, self.transposed = shape, dtype, transposed

    def made(self) -> torch.Tensor:
        one = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return one.transpose(-1, -2) if self.transposed else one

    def __repr__(self) -> str:
        return (
            f"{list(self.shape)} "
            f"{str(self.dtype).removeprefix('torch.')}{' transposed' if self.transposed else ''}"
        )


def made(value: Any) -> Any:
    if isinstance(value, list):
        return [made(one) for one in value]
    return value.made() if isinstance(value, T) else value


WQB, QM, DQ, GMM = (
    "npu_weight_quant_batchmatmul",
    "npu_quant_matmul",
    "npu_dynamic_quant",
    "npu_grouped_matmul",
)
GATE, INIT, FINAL = "npu_moe_gating_top_k", "npu_moe_init_routing_v2", "npu_moe_finalize_routing"
SWIGLU, NORM, ADD_NORM, CAST, FETCH = (
    "npu_swiglu",
    "npu_rms_norm",
    "npu_add_rms_norm",
    "npu_format_cast",
    "npu_prefetch",
)


def wqb(k: int, n: int, group: int, scale: tuple[int, ...], **more: Any) -> Change:
    """x [4, k], int8 weight [k, n]."""
    return {
        "x": T(4, k),
        "weight": T(k, n, dtype=I8),
        "antiquant_group_size": group,
        "antiquant_scale": T(*scale),
        "antiquant_offset": None,
        **more,
    }


def qm(k: int, n: int, **more: Any) -> Change:
    return {"x1": T(4, k, dtype=I8), "x2": T(k, n, dtype=I8), "scale": T(n, dtype=F), **more}


def dense_gmm(dtype: torch.dtype = B, k: int = 128, n: int = 8, **more: Any) -> Change:
    return {
        "x": [T(4, k, dtype=dtype)],
        "weight": [T(2, k, n, dtype=dtype)],
        "antiquant_scale": None,
        "antiquant_offset": None,
        **more,
    }


def int4_gmm(
    scale: tuple[int, ...],
    weight: tuple[int, ...] = (2, 128, 8),
    dtype: torch.dtype = I32,
    **more: Any,
) -> Change:
    return {
        "weight": [T(*weight, dtype=dtype)],
        "antiquant_scale": [T(*scale)],
        "antiquant_offset": [T(*scale)],
        **more,
    }


def int8_gmm(scale: T, output: torch.dtype, row: T | None = None, **more: Any) -> Change:
    quantized = {
        "x": [T(4, 128, dtype=I8)],
        "weight": [T(2, 128, 8, dtype=I8)],
        "antiquant_scale": None,
        "antiquant_offset": None,
    }
    return quantized | {
        "scale": [scale],
        "per_token_scale": [row or T(4, dtype=F)],
        "output_dtype": output,
        **more,
    }


def narrow_gmm(
    k: int = 128,
    scale: T | None = None,
    bias: T | None = None,
    output: torch.dtype = B,
    **more: Any,
) -> Change:
    """int8 rows by int4 weights."""
    quantized = {
        "x": [T(4, k, dtype=I8)],
        "weight": [T(2, k, 8, dtype=I32)],
        "antiquant_scale": None,
        "antiquant_offset": None,
    }
    both = {"scale": [scale or T(2, 1, 64, dtype=I64)], "bias": [bias or T(2, 64, dtype=F)]}
    return quantized | both | {"per_token_scale": [T(4, dtype=F)], "output_dtype": output, **more}


def experts(count: int) -> Change:
    """So many experts whose counts cannot be read."""
    return {"group_list": T(count, dtype=I64), "weight": [T(count, 128, 8, dtype=I32)]} | {
        name: [T(count, 4, 64)] for name in ("antiquant_scale", "antiquant_offset")
    }


def gate(experts: int, groups: int, k: int, k_group: int, **more: Any) -> Change:
    return {
        "x": T(3, experts),
        "bias": None,
        "k": k,
        "k_group": k_group,
        "group_count": groups,
        **more,
    }


INSIDE: list[tuple[str, Change]] = [
    (
        WQB,
        {
            "x": T(4, 128, dtype=H),
            "antiquant_scale": T(4, 64, dtype=H),
            "antiquant_offset": T(4, 64, dtype=H),
        },
    ),
    (WQB, {"x": T(1, 128)}),
    (FETCH, {"max_size": 1}),
    (WQB, {"antiquant_offset": None}),
    (WQB, {"weight": T(128, 64, dtype=I8)}),
    (WQB, {"weight": T(64, 128, dtype=I8, transposed=True)}),
    (WQB, wqb(128, 65535, 32, (4, 65535))),
    (WQB, wqb(65535, 64, 0, (64,))),
    *((WQB, wqb(128, 64, 0, shape)) for shape in ((1,), (1, 1), (64,), (1, 64))),
    (WQB, wqb(128, 64, 96, (2, 64))),
    (WQB, wqb(129, 64, 128, (2, 64))),
    (WQB, wqb(33, 64, 32, (2, 64))),
    (
        WQB,
        {
            "weight": T(128, 8191, dtype=I32),
            "antiquant_scale": T(4, 65528),
            "antiquant_offset": T(4, 65528),
        },
    ),
    (QM, {"x1": T(1, 1, 1, 1, 4, 128, dtype=I8)}),
    (QM, qm(65535, 4)),
    (QM, qm(128, 65535)),
    (QM, {"scale": T(1, dtype=F)}),
    (QM, {"scale": T(4)}),
    (QM, {"output_dtype": H}),
    (QM, {"pertoken_scale": None}),
    (DQ, {"input": T(4, 128, dtype=H)}),
    (DQ, {"input": T(2, 2, 128)}),
    (GMM, {"split_item": 3}),
    (GMM, {"group_list": torch.tensor([0, 4])}),
    (GMM, experts(2)),
    (GMM, experts(1024)),
    (GMM, dense_gmm()),
    (GMM, dense_gmm(F, output_dtype=F)),
    (GMM, dense_gmm(H, output_dtype=H)),
    (GMM, dense_gmm(k=65535)),
    (GMM, dense_gmm(n=65535)),
    (GMM, int4_gmm((2, 4, 65528), (2, 128, 8191))),
    (GMM, int4_gmm((2, 64))),
    (GMM, int4_gmm((2, 1, 64))),
    (GMM, int4_gmm((2, 64), (2, 128, 64), I8)),
    (
        GMM,
        {"x": [T(4, 128, dtype=H)]}
        | {name: [T(2, 4, 64, dtype=H)] for name in ("antiquant_scale", "antiquant_offset")},
    ),
    (GMM, int8_gmm(T(2, 8), B)),
    (GMM, int8_gmm(T(2, 8, dtype=F), H)),
    (GMM, narrow_gmm()),
    (GMM, narrow_gmm(18432, output=H)),
    (GATE, {"x": T(3, 64, dtype=F), "bias": T(64, dtype=F)}),
    (GATE, {"x": T(3, 64, dtype=H), "bias": None}),
    (GATE, gate(2048, 8, 8, 4)),
    (GATE, gate(192, 64, 8, 64)),
    (GATE, gate(192, 64, 192, 64)),
    (GATE, gate(64, 4, 1, 1)),
    (GATE, gate(64, 4, 16, 1)),
    (GATE, gate(64, 4, 32, 2, norm_type=0, group_select_mode=1)),
    (GATE, gate(64, 4, 64, 4, norm_type=1, group_select_mode=0)),
    *((INIT, {"x": T(4, 8, dtype=dtype)}) for dtype in (H, F, I8)),
    (INIT, {"quant_mode": 1}),
    (INIT, {"expert_tokens_num_type": 0}),
    (INIT, {"x": T(4, 8, dtype=F), "quant_mode": 1}),
    (FINAL, {"expanded_permuted_rows": T(8, 16, dtype=F), "scales": T(4, 2, dtype=F)}),
    (FINAL, {"expanded_permuted_rows": T(8, 16, dtype=H), "scales": T(4, 2, dtype=H)}),
    (SWIGLU, {"input": T(1, 2, dtype=F)}),
    (SWIGLU, {"input": T(4, dtype=H)}),
    (SWIGLU, {"input": T(1, 1, 1, 1, 1, 1, 1, 2)}),
    (SWIGLU, {"input": T(4, 5), "dim": 0}),
    (NORM, {"gamma": T(128, dtype=F)}),
    (NORM, {"input": T(4, 128, dtype=F), "gamma": T(128, dtype=F)}),
    (NORM, {"input": T(4, 128, dtype=H), "gamma": T(128, dtype=H)}),
    (ADD_NORM, {"x1": T(4, 128, dtype=F), "x2": T(4, 128, dtype=F), "gamma": T(128, dtype=F)}),
    (ADD_NORM, {"x1": T(1, 128), "x2": T(1, 128)}),
    (ADD_NORM, {"x1": T(2, 4, 128), "x2": T(2, 4, 128)}),
    (CAST, {"acl_format": 2}),
    (FETCH, {"max_size": 1}),
    (FETCH, {"offset": 511}),
    (FETCH, {"input": T(4, 128), "offset": 1023}),
]

OUTSIDE: list[tuple[str, Change, str]] = [
    (WQB, {"x": T(4, 128, dtype=F)}, "fp16 or bf16"),
    (WQB, {"x": T(1, 4, 128)}, "fp16 or bf16"),
    (WQB, {"x": T(128)}, "fp16 or bf16"),
    (WQB, {"x": T(0, 128)}, "empty"),
    (WQB, {"weight": T(128, 0, dtype=I32)}, "empty"),
    (WQB, {"weight": T(1, 128, 8, dtype=I32)}, "int8 or int32"),
    (WQB, {"weight": T(128, 64, dtype=I16)}, "int8 or int32"),
    (WQB, {"weight": T(127, 8, dtype=I32)}, "x's K"),
    (WQB, {"weight": T(8, 128, dtype=I32, transposed=True)}, "contiguous"),
    (WQB, wqb(128, 65536, 32, (4, 65536)), "65535"),
    (WQB, wqb(65536, 64, 0, (64,)), "65535"),
    (
        WQB,
        {
            "weight": T(128, 8192, dtype=I32),
            "antiquant_scale": T(4, 65536),
            "antiquant_offset": T(4, 65536),
        },
        "65535",
    ),
    *(
        (WQB, wqb(128, 64, group, (128 // 32, 64)), "multiple of 32")
        for group in (31, 33, 16, 48, -32, 128, 160)
    ),
    (WQB, wqb(32, 64, 32, (1, 64)), "multiple of 32"),
    (WQB, {"antiquant_scale": T(4, 64, dtype=F)}, "x's dtype"),
    (WQB, {"antiquant_scale": T(4, 64, dtype=H)}, "x's dtype"),
    *(
        (WQB, {"antiquant_scale": T(*shape)}, "K/group, N")
        for shape in ((4, 63), (3, 64), (5, 64), (64,))
    ),
    *(
        (WQB, wqb(128, 64, 0, shape), "K/group, N")
        for shape in ((4, 64), (63,), (2,), (1, 63), (64, 1))
    ),
    (WQB, wqb(129, 64, 128, (1, 64)), "K/group, N"),
    (WQB, {"antiquant_offset": T(4, 32)}, "antiquant_scale's shape"),
    (WQB, {"antiquant_offset": T(4, 64, dtype=F)}, "antiquant_scale's shape"),
    *((WQB, {name: T(64)}, "not used") for name in ("quant_scale", "quant_offset", "bias")),
    (WQB, {"inner_precise": 1}, "inner_precise"),
    (WQB, {"weight_dtype": 0}, "weight_dtype"),
    (QM, {"x1": T(4, 128)}, "int8"),
    (QM, {"x2": T(128, 4)}, "int8"),
    (QM, {"x1": T(128, dtype=I8)}, "2 to 6"),
    (QM, {"x1": T(1, 1, 1, 1, 1, 4, 128, dtype=I8)}, "2 to 6"),
    (QM, {"x2": T(1, 128, 4, dtype=I8)}, "2 to 6"),
    (QM, {"x2": T(127, 4, dtype=I8)}, "x1's K"),
    (QM, qm(65536, 4), "65535"),
    (QM, qm(128, 65536), "65535"),
    *((QM, {"scale": T(*shape, dtype=F)}, "(N,)") for shape in ((2,), (3,), (5,), (1, 4))),
    *((QM, {"output_dtype": dtype}, "output_dtype") for dtype in (None, F, I8)),
    (QM, {"scale": T(4), "output_dtype": H}, "bf16 for bf16"),
    (QM, {"scale": T(4, dtype=H), "output_dtype": H}, "bf16 for bf16"),
    (QM, {"scale": T(4, dtype=H)}, "bf16 for bf16"),
    (QM, {"pertoken_scale": T(4)}, "pertoken_scale"),
    (QM, {"pertoken_scale": T(3, dtype=F)}, "pertoken_scale"),
    (QM, {"pertoken_scale": T(4, 1, dtype=F)}, "pertoken_scale"),
    (QM, {"output_dtype": H, "pertoken_scale": None}, "take a pertoken_scale"),
    (QM, {"offset": T(1, dtype=F)}, "offset"),
    (QM, {"bias": T(4)}, "bias"),
    (DQ, {"input": T(4, 128, dtype=F)}, "fp16 or bf16"),
    (DQ, {"input": T(128)}, "dimension"),
    (DQ, {"dst_type": 0}, "dst_type"),
    (DQ, {"quant_mode": "pertensor"}, "quant_mode"),
    (DQ, {"dst_type_max": 1.0}, "quant_mode"),
    (DQ, {"smooth_scales": T(128)}, "smooth"),
    (DQ, {"group_index": T(4, dtype=I32)}, "smooth"),
    (GMM, {"x": [T(4, 128), T(4, 128)]}, "one output"),
    (GMM, {"weight": [T(2, 128, 8, dtype=I32)] * 2}, "one output"),
    (GMM, {"x": [T(4, 128)] * 2, "weight": [T(2, 128, 8, dtype=I32)] * 2}, "one output"),
    *((GMM, {"split_item": item}, "one output") for item in (0, 1, 4)),
    *((GMM, {"group_type": kind}, "along M") for kind in (-1, 1, 2)),
    *((GMM, {"group_list_type": kind}, "counts of 2") for kind in (0, 2)),
    (GMM, {"group_list": T(2, dtype=I32)}, "counts of 2"),
    (GMM, experts(1), "per expert"),
    (GMM, experts(1025), "per expert"),
    (GMM, {"group_list": T(3, dtype=I64)}, "per expert"),
    (GMM, {"group_list": torch.tensor([1, 2])}, "add up"),
    (GMM, {"group_list": torch.tensor([2, 3])}, "add up"),
    (GMM, {"x": [T(1, 4, 128)], "group_list": T(2, dtype=I64)}, "x's K"),
    (GMM, {"x": [T(4, 128, 1)]}, "x's K"),
    (GMM, {"x": [T(4, 129)]}, "x's K"),
    (GMM, {"x": [T(128, 4, transposed=True)]}, "transposed"),
    (GMM, dense_gmm(k=65536), "65536"),
    (GMM, dense_gmm(n=65536), "65536"),
    (GMM, int4_gmm((2, 4, 65536), (2, 128, 8192)), "65536"),
    (GMM, int8_gmm(T(2, 8), B, weight=[T(2, 128, 8)]), "int8 x with int8"),
    (GMM, dense_gmm(output_dtype=H), "both of one float dtype"),
    (GMM, dense_gmm(D, output_dtype=D), "both of one float dtype"),
    (GMM, dense_gmm() | {"weight": [T(2, 128, 8, dtype=H)]}, "both of one float dtype"),
    (GMM, int4_gmm((2, 64), (2, 128, 64), I16), "int8 x with int8"),
    (GMM, {"x": [T(4, 128, dtype=F)]} | int4_gmm((2, 4, 64)), "int8 x with int8"),
    *(
        (GMM, int4_gmm(shape), "G dividing K")
        for shape in ((2, 5, 64), (3, 4, 64), (2, 4, 63), (3, 64), (2, 63), (2,))
    ),
    (GMM, int4_gmm((2, 4, 64), (2, 128, 64), I8), "G dividing K"),
    (
        GMM,
        {name: [T(2, 4, 64, dtype=H)] for name in ("antiquant_scale", "antiquant_offset")},
        "x's dtype",
    ),
    (GMM, {"antiquant_offset": None}, "antiquant_offset"),
    (GMM, dense_gmm(antiquant_offset=[T(2, 8)]), "antiquant_offset"),
    (GMM, {"antiquant_offset": [T(2, 64)]}, "antiquant_offset"),
    (GMM, {"antiquant_offset": [T(2, 4, 64, dtype=F)]}, "antiquant_offset"),
    (GMM, int8_gmm(T(2, 8, dtype=F), B), "scale [E, N]"),
    (GMM, int8_gmm(T(2, 8), H), "scale [E, N]"),
    (GMM, int8_gmm(T(2, 8), F), "scale [E, N]"),
    *((GMM, int8_gmm(T(*shape), B), "scale [E, N]") for shape in ((2, 128), (3, 8), (2, 7), (8,))),
    (GMM, int8_gmm(T(2, 8), B, T(4)), "per_token_scale"),
    (GMM, int8_gmm(T(2, 8), B, T(5, dtype=F)), "per_token_scale"),
    (GMM, {"offset": [T(1)]}, "not to be given"),
    (GMM, narrow_gmm(18433), "at most 18432"),
    (
        GMM,
        narrow_gmm(weight=[T(2, 8, 128, dtype=I32, transposed=True)], scale=T(2, 1, 64, dtype=I64)),
        "weight is contiguous",
    ),
    *(
        (GMM, narrow_gmm(scale=one), "int64 [E, 1, N]")
        for one in (T(2, 64, dtype=I64), T(2, 1, 8, dtype=I64), T(2, 1, 64, dtype=F))
    ),
    *(
        (GMM, narrow_gmm(bias=one), "int64 [E, 1, N]")
        for one in (T(2, 1, 64, dtype=F), T(2, 64), T(2, 8, dtype=F))
    ),
    *(
        (GMM, narrow_gmm() | one, "int64 [E, 1, N]")
        for one in ({"bias": None}, {"output_dtype": F}, {"output_dtype": None})
    ),
    (GMM, narrow_gmm(per_token_scale=[T(4)]), "per_token_scale"),
    (GMM, {"activation_input": [T(1)]}, "not to be given"),
    (GMM, {"bias": [T(64)]}, "act_type"),
    (GMM, {"act_type": 1}, "act_type"),
    (GATE, {"x": T(3, 64, dtype=D), "bias": None}, "float [T, E]"),
    (GATE, {"x": T(64), "bias": None}, "float [T, E]"),
    (GATE, gate(2049, 3, 8, 3), "2048 experts"),
    (GATE, {"bias": T(64, dtype=F)}, "x's dtype"),
    (GATE, {"bias": T(63)}, "x's dtype"),
    (GATE, gate(64, 5, 1, 1), "split"),
    (GATE, gate(64, 32, 1, 1), "more than two"),
    (GATE, gate(260, 65, 1, 1), "padded to 32"),
    (GATE, gate(64, 4, 1, 0), "k_group"),
    (GATE, gate(64, 4, 1, 5), "k_group"),
    (GATE, gate(64, 4, 0, 1), "kept groups"),
    (GATE, gate(64, 4, 17, 1), "kept groups"),
    (GATE, gate(64, 4, 33, 2), "kept groups"),
    *((GATE, {name: 2}, "modes") for name in ("norm_type", "group_select_mode", "renorm")),
    (GATE, {"renorm": 1}, "modes"),
    *((GATE, {name: -1}, "modes") for name in ("norm_type", "group_select_mode")),
    (INIT, {"x": T(4, 8, dtype=I32)}, "float or int8"),
    (INIT, {"x": T(1, 4, 8)}, "float or int8"),
    (INIT, {"expert_idx": T(4, 2, dtype=I64)}, "int32"),
    (INIT, {"expert_idx": T(3, 2, dtype=I32)}, "int32"),
    *((INIT, {"quant_mode": mode}, "quant_mode") for mode in (-2, 0, 2)),
    (INIT, {"x": T(4, 8, dtype=I8), "quant_mode": 1}, "quantized x"),
    (INIT, {"drop_pad_mode": 1}, "dropped"),
    *((INIT, {"active_num": number}, "dropped") for number in (-1, 7, 9)),
    *((INIT, {"active_expert_range": span}, "active") for span in ([0, 3], [1, 4], [])),
    *((INIT, {"expert_tokens_num_type": kind}, "counts") for kind in (-1, 2)),
    (INIT, {"expert_tokens_num_flag": False}, "counts"),
    (INIT, {"row_idx_type": 1}, "gather"),
    (INIT, {"scale": T(1, dtype=F)}, "not used"),
    (INIT, {"offset": T(1, dtype=F)}, "not used"),
    (
        FINAL,
        {"expanded_permuted_rows": T(8, 16, dtype=D), "scales": T(4, 2, dtype=D)},
        "[T * k, H]",
    ),
    (FINAL, {"expanded_permuted_rows": T(2, 4, 16)}, "[T * k, H]"),
    (FINAL, {"scales": T(8)}, "rows' dtype"),
    (FINAL, {"scales": T(4, 2, dtype=F)}, "rows' dtype"),
    (FINAL, {"scales": T(4, 1)}, "every scale"),
    (FINAL, {"expanded_permuted_rows": T(9, 16)}, "every scale"),
    (FINAL, {"expanded_src_to_dst_row": T(8, dtype=I64)}, "int32"),
    (FINAL, {"expanded_src_to_dst_row": T(4, 2, dtype=I32)}, "int32"),
    *((FINAL, {"drop_pad_mode": mode}, "token-major") for mode in (0, 1, 3)),
    *((FINAL, {name: T(4, 16)}, "not used") for name in ("skip1", "skip2", "bias")),
    (SWIGLU, {"input": T(4, 128, dtype=D)}, "float"),
    (SWIGLU, {"input": T(128, 4, transposed=True)}, "contiguous"),
    (SWIGLU, {"input": T(0, 4)}, "empty"),
    (SWIGLU, {"input": T(4, 5)}, "even"),
    (SWIGLU, {"input": T(5, 4), "dim": 0}, "even"),
    (SWIGLU, {"input": T(1, 1, 1, 1, 1, 1, 1, 1, 2)}, "1 to 8"),
    (NORM, {"input": T(4, 128, dtype=D), "gamma": T(128, dtype=D)}, "gamma is of input's dtype"),
    (NORM, {"gamma": T(128, dtype=H)}, "gamma is of input's dtype"),
    (NORM, {"input": T(4, 128, dtype=F)}, "gamma is of input's dtype"),
    (NORM, {"gamma": T(127)}, "last dimension"),
    (NORM, {"gamma": T(4, 128)}, "last dimension"),
    (
        ADD_NORM,
        {"x1": T(4, 128, dtype=D), "x2": T(4, 128, dtype=D), "gamma": T(128, dtype=D)},
        "one float dtype",
    ),
    *((ADD_NORM, {name: T(4, 128, dtype=F)}, "one float dtype") for name in ("x1", "x2")),
    (ADD_NORM, {"gamma": T(128, dtype=F)}, "one float dtype"),
    (ADD_NORM, {"x2": T(1, 128)}, "one shape"),
    (ADD_NORM, {"x1": T(0, 128), "x2": T(0, 128)}, "not empty"),
    (ADD_NORM, {"gamma": T(127)}, "last dimension"),
    *((CAST, {"acl_format": number}, "acl_format") for number in (1, 3, 28, 30)),
    (CAST, {"input": T(128, 4, dtype=I8, transposed=True)}, "contiguous"),
    *((FETCH, {"max_size": size}, "max_size") for size in (0, -1)),
    *((FETCH, {"offset": offset}, "offset") for offset in (-1, 512)),
    (FETCH, {"input": T(4, 128), "offset": 1024}, "offset"),
]
