"""CUDA C++ kernels for Hopper, compiled by the user's nvcc at first use (about 20 s on 16 cores)
and kept in the user's cache.

They are in C++ because Triton cannot express weights that lie in the order of the matrix
instructions' operands, copies of 16 bytes that a warp waits for alone, routing inside a product,
and clusters of blocks that read each other's memory. Attention of prompts needs none of these and
is the Triton backend's.

csrc/ and the Python next to it have the same rooms: linears, experts, attention, operators (norms,
activation, routing, rotary embedding, selection of index scores), collectives. plans.py says which
kernel a product takes, abi.py what the library's functions are given.
"""

from functools import partial
from itertools import starmap

import torch

from quantkit_kernels.backends import Shape
from quantkit_kernels.cuda.attention.gqa import gqa_decode, gqa_prepare
from quantkit_kernels.cuda.attention.mla import mla_decode, mla_prepare, mla_queries
from quantkit_kernels.cuda.build import why_no_library
from quantkit_kernels.cuda.experts.experts import CudaExpertsLayout
from quantkit_kernels.cuda.indexer import index_topk
from quantkit_kernels.cuda.linears.linear import linear
from quantkit_kernels.cuda.operators import (
    add_rms_norm,
    float32_linear,
    moe_gate,
    rms_norm,
    rope,
    route,
    silu_and_mul,
)
from quantkit_kernels.gating import SILU, Gating
from quantkit_kernels.reference.functional import cache_layout
from quantkit_kernels.triton.attention import prefill
from quantkit_kernels.triton.attention.prefill import gqa_prefill, takes_selected
from quantkit_kernels.triton.small import fits
from quantkit_kernels.weights import Weight

LIMITS = {
    f"experts_{kind}": "gates other than SiLU, clamped or not, biases: another backend"
    for kind in ("int4", "int8", "fp4")
}

mla_prefill = partial(prefill.mla_prefill, rope=rope)
"""The Triton backend's, with this one's rotary embedding."""


def unusable(
    operator: str, device: torch.device, dtype: torch.dtype | None, shapes: tuple[Shape, ...]
) -> str | None:
    if device.type != "cuda":
        return f"runs on CUDA, not on {device.type}"
    if not torch.cuda.is_available():
        return "no CUDA device here"
    if operator.endswith("_dense"):
        return "quantized weights only"
    if operator == "mla_prolog":
        return "mla_prepare, mla_decode and linears compute it"
    if operator in ("gate_and_mul", "gate_and_rotate"):
        return "silu_and_mul only"
    families = (
        "delta_",
        "index_prepare",
        "mx_",
        "compressed_",
        "pool_",
        "rotary_",
        "rotate_",
        "route_",
        "store_",
    )
    if operator.startswith(families) or operator.endswith("_streams"):
        return "the Triton backend's are few launches already"
    if operator == "likeliest":
        return "the Triton backend's is two short launches already"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"written for compute capability 9.0 (Hopper), this device has {major}.{minor}"
    missing = why_no_library(f"{major}{minor}")
    if missing is not None:
        return missing
    family, _, kind = operator.partition("_")
    if kind == "w8a16":
        return "the Triton backend's kernels read weight-only int8"
    return _refused(kind, dtype, shapes) if family in ("linear", "experts") else None


def leaves(operator: str, shapes: tuple[Shape, ...]) -> bool:
    """Whether "auto" takes the Triton backend where it can: of small weights its kernel computes
    what is around a product in the same launch."""
    return operator.startswith("linear_") and shapes != () and all(starmap(fits, shapes))


def _refused(kind: str, dtype: torch.dtype | None, shapes: tuple[Shape, ...]) -> str | None:
    if dtype == torch.float32:
        return "computes in bfloat16 and float16 only"
    if kind == "fp4" and dtype == torch.float16:
        return "FP4 computes in bfloat16 only"
    for _, k in shapes:
        if k % 128:
            return f"needs input features in multiples of 128, not {k}"
    return None


def computes_gates(kind: str, silu: bool) -> bool:
    """As `backends.computes_gates`."""
    return silu and kind != "dense"


def experts_layout(
    num_experts: int,
    gate: Weight,
    down: Weight,
    dtype: torch.dtype,
    device: torch.device,
    gating: Gating = SILU,
) -> CudaExpertsLayout:
    return CudaExpertsLayout(num_experts, gate, dtype, device, gating)
