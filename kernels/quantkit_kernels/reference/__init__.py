"""The plain torch backend: every operator, any device, no packing. What the others are measured
against.

Codes stay one per byte and are expanded at every call in blocks of rows; the arithmetic is float32.
Nothing here is meant to be fast.
"""

import torch

from quantkit_kernels.backends import SINKS, Shape
from quantkit_kernels.reference.compressed import (
    compressed_attend,
    pool_entries,
    rotate_heads,
    rotate_queries,
    store_recent,
)
from quantkit_kernels.reference.delta import delta_prefill, delta_step
from quantkit_kernels.reference.experts import LoopLayout
from quantkit_kernels.reference.functional import (
    add_rms_norm,
    cache_layout,
    float32_linear,
    gate_and_mul,
    gate_and_rotate,
    likeliest,
    mla_decode,
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
from quantkit_kernels.reference.grouped import gqa_decode, gqa_prepare
from quantkit_kernels.reference.indexer import index_prepare, index_topk
from quantkit_kernels.reference.linear import linear
from quantkit_kernels.reference.prolog import mla_prolog, prolog_refused
from quantkit_kernels.reference.prompts import gqa_prefill, mla_prefill
from quantkit_kernels.reference.streams import merge_streams, mix_streams, weigh_streams
from quantkit_kernels.weights import Weight


def unusable(
    operator: str, device: torch.device, dtype: torch.dtype | None, shapes: tuple[Shape, ...]
) -> str | None:
    return None


def experts_layout(
    num_experts: int, gate: Weight, down: Weight, dtype: torch.dtype, device: torch.device
) -> LoopLayout:
    return LoopLayout(num_experts, linear, dtype, device, "reference")
