"""Triton kernels for every GPU that Triton compiles for: NVIDIA's from compute capability 8.0 on,
and AMD's. One set of sources.

Run on an H200; compiled ahead for the architectures in the kernels' README. cards.py has what
differs from card to card.
"""

import functools
import importlib.util
import re

import torch

from quantkit_kernels.backends import Shape
from quantkit_kernels.experts import ExpertsLayout
from quantkit_kernels.gating import SILU, Gating
from quantkit_kernels.reference.experts import LoopLayout
from quantkit_kernels.reference.functional import cache_layout
from quantkit_kernels.triton.attention.decode import gqa_decode, mla_decode
from quantkit_kernels.triton.attention.prefill import gqa_prefill, mla_prefill, takes_selected
from quantkit_kernels.triton.cards import architecture, interpreted, why_no_dense
from quantkit_kernels.triton.compressed import (
    compressed_attend,
    pool_entries,
    rotate_heads,
    rotate_queries,
    store_recent,
)
from quantkit_kernels.triton.delta import delta_prefill, delta_step
from quantkit_kernels.triton.dense_experts import DenseExpertsLayout
from quantkit_kernels.triton.experts import TritonExpertsLayout
from quantkit_kernels.triton.first_use import announce, why_not_kept, why_not_started
from quantkit_kernels.triton.indexer import index_prepare, index_topk
from quantkit_kernels.triton.linear import linear
from quantkit_kernels.triton.operators import (
    add_rms_norm,
    float32_linear,
    gate_and_mul,
    gate_and_rotate,
    gqa_prepare,
    likeliest,
    mla_prepare,
    moe_gate,
    mx_rounded,
    rms_norm,
    rope,
    rotary_angles,
    route,
    route_chosen,
    silu_and_mul,
)
from quantkit_kernels.triton.streams import merge_streams, mix_streams, weigh_streams
from quantkit_kernels.weights import Weight, kind

SINKS = ("gqa_decode", "gqa_prefill")


def unusable(
    operator: str, device: torch.device, dtype: torch.dtype | None, shapes: tuple[Shape, ...]
) -> str | None:
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"runs on GPUs, not on {device.type}"
    why_not = _why_no_triton()
    if why_not is not None:
        return why_not
    if device.type == "cuda" and not torch.cuda.is_available():
        return "no GPU here"
    if (
        device.type == "cuda"
        and not torch.version.hip
        and torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return "needs compute capability 8.0 or more"
    if device.type == "cuda" and (reason := why_not_kept() or why_not_started()) is not None:
        return reason
    if operator == "linear_dense" and dtype != torch.float32:
        return why_no_dense(architecture(device), shapes)
    if operator == "mla_prolog":
        return "mla_prepare, mla_decode and linears compute it"
    family, _, grid = operator.partition("_")
    if family not in ("linear", "experts"):
        return None
    if dtype == torch.float32:
        return "computes in bfloat16 and float16 only"
    if grid == "fp4" and dtype == torch.float16:
        return "FP4 computes in bfloat16 only"
    return None


_OLDEST = (3, 6)
"""Of Triton: what kernels were run with. Older ones lack what they are written in."""


@functools.cache
def _why_no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    try:
        import triton
    except (
        ImportError,
        OSError,
    ) as fault:  # OSError: a library of it that this machine cannot load
        return f"triton is installed and cannot be imported: {str(fault).partition(chr(10))[0]}"
    version = str(getattr(triton, "__version__", "0"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST:
        return (
            f"triton {version} is too old, {'.'.join(map(str, _OLDEST))} or newer is needed: "
            "pip install --upgrade triton"
        )
    return None


def computes_gates(kind: str, silu: bool) -> bool:
    """As `backends.computes_gates`."""
    return kind != "dense"


def experts_layout(
    num_experts: int,
    gate: Weight,
    down: Weight,
    dtype: torch.dtype,
    device: torch.device,
    gating: Gating = SILU,
) -> ExpertsLayout:
    announce(device)
    if kind(gate) == "dense":
        return DenseExpertsLayout(num_experts, gate, dtype, device)
    if not gating.is_formula:
        return LoopLayout(num_experts, linear, dtype, device, "triton", gating)
    return TritonExpertsLayout(num_experts, gate, dtype, device, gating)
