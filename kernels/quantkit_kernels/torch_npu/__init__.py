"""The built-in operators of torch_npu, for Ascend NPUs.

Every call is checked against the manual's rules (rules.py); tests/ascend checks the calls against
the real schemas of torch_npu 2.13.0 and runs them on a double that computes the documented results.
Never run on an NPU.
"""

import torch

from quantkit_kernels.backends import Shape
from quantkit_kernels.experts import ExpertsLayout
from quantkit_kernels.reference.experts import LoopLayout
from quantkit_kernels.torch_npu import machine
from quantkit_kernels.torch_npu.calls import has_kernel, prefetch
from quantkit_kernels.torch_npu.experts import GroupedLayout
from quantkit_kernels.torch_npu.functional import (
    add_rms_norm,
    cache_layout,
    mla_decode,
    mla_prepare,
    moe_gate,
    rms_norm,
    rope,
    route,
    silu_and_mul,
)
from quantkit_kernels.torch_npu.grouped import gqa_decode, gqa_prefill, gqa_prepare, mla_prefill
from quantkit_kernels.torch_npu.layout import CARRIED
from quantkit_kernels.torch_npu.linear import linear
from quantkit_kernels.torch_npu.prolog import LIMITS as PROLOG_LIMITS
from quantkit_kernels.torch_npu.prolog import mla_prolog, prolog_refused
from quantkit_kernels.torch_npu.rule import HALVES
from quantkit_kernels.weights import Fp4, Weight

_PRESENT = ("npu_swiglu",)
"""What shows that torch_npu is there, where its operators are registered as torch's own."""
_GROUPED = (
    "npu_moe_init_routing_v2",
    "npu_grouped_matmul",
    "npu_swiglu",
    "npu_moe_finalize_routing",
)
NEEDS = {
    "linear_int4": ("npu_weight_quant_batchmatmul",),
    "linear_int8": ("npu_dynamic_quant", "npu_quant_matmul", "npu_format_cast"),
    "linear_fp4": _PRESENT,
    "linear_dense": _PRESENT,
    "experts_int4": _GROUPED,
    "experts_int8": (*_GROUPED, "npu_dynamic_quant"),
    "experts_fp4": _PRESENT,
    "experts_dense": _GROUPED,
    "rms_norm": ("npu_rms_norm",),
    "add_rms_norm": ("npu_add_rms_norm",),
    "silu_and_mul": ("npu_swiglu",),
    "route": ("npu_moe_gating_top_k",),
    "moe_gate": ("npu_moe_gating_top_k",),
    "rope": ("npu_rotary_mul",),
    "mla_prepare": ("npu_rms_norm", "npu_rotary_mul", "npu_kv_rmsnorm_rope_cache"),
    "mla_prolog": (
        "npu_mla_prolog_v3",
        "npu_fused_infer_attention_score_v2",
        "npu_transpose_batchmatmul",
        "npu_dynamic_quant",
        "npu_format_cast",
    ),
    "mla_decode": (
        "npu_fused_infer_attention_score_v2",
        "npu_transpose_batchmatmul",
        "npu_rotary_mul",
        "npu_interleave_rope",
    ),
    "mla_prefill": ("npu_rotary_mul",),
    "gqa_prepare": ("npu_rms_norm", "npu_rotary_mul"),
    "gqa_decode": ("npu_fused_infer_attention_score_v2",),
    "gqa_prefill": _PRESENT,
}
"""The operators of torch_npu that implement each of ours. FP4 is decoded, and unquantized weights
are multiplied, by torch's own."""

NARROW_EXPERTS = True
"""Experts of int8 whose codes have four bits are held in four."""
NO_CODES = (
    "operators of torch_npu want scales that were fixed before, and a cache in 8 bits has "
    "each token's own"
)
LIMITS = {"mla_prolog": PROLOG_LIMITS}
"""What a usable operator was made for, where that is not everything."""


def unusable(
    operator: str, device: torch.device, dtype: torch.dtype | None, shapes: tuple[Shape, ...]
) -> str | None:
    if operator in ("gate_and_mul", "gate_and_rotate"):
        return "silu_and_mul only"
    if operator.startswith(
        ("delta_", "compressed_", "mx_", "pool_", "rotary_", "rotate_", "route_", "store_")
    ) or operator.endswith("_streams"):
        return "no operator of torch_npu's"
    if operator.startswith("index_"):
        return "torch's own: CANN's lightning indexer is not called"
    if operator == "likeliest":
        return "torch's own argmax"
    if operator == "float32_linear":
        return "torch's own product"
    if operator.endswith("_w8a16"):
        return "int8 with activations of 8 bits only"
    missing = [name for name in NEEDS[operator] if not has_kernel(name, device)]
    if missing and not torch._C._dispatch_has_kernel(f"npu::{missing[0]}"):
        return "torch_npu is not installed"
    if missing:
        return f"{missing[0]} does not run on {device.type}"
    if device.type == "npu" and (reason := machine.too_old(NEEDS[operator])):
        return reason
    if (
        operator.startswith(("linear_", "experts_"))
        and not operator.endswith("_dense")
        and dtype not in (None, *HALVES)
    ):
        return "computes in bfloat16 and float16 only"
    if operator == "mla_prolog" and dtype not in (None, torch.bfloat16):
        return "computes in bfloat16 only"
    if operator.endswith("_int4"):
        odd = [n for n, _ in shapes if n % CARRIED]
        return f"needs output features in multiples of {CARRIED}, not {odd[0]}" if odd else None
    return None


def experts_layout(
    num_experts: int, gate: Weight, down: Weight, dtype: torch.dtype, device: torch.device
) -> ExpertsLayout:
    if isinstance(gate, Fp4):
        return LoopLayout(num_experts, linear, dtype, device, "torch_npu")
    return GroupedLayout(num_experts, dtype, device)
