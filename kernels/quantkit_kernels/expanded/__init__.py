"""Weights expanded to the compute dtype once, then torch's own matmul: the fastest for small
models, and the largest in memory.

Taken for unquantized weights; for quantized ones only when asked for by name. `nbytes` counts the
expanded weight. Int8 keeps its meaning: activations are still rounded to int8 per token, and the
codes are multiplied as float32.
"""

import torch

from quantkit_kernels.backends import Shape
from quantkit_kernels.expanded.experts import ExpandedLayout, why_not_grouped
from quantkit_kernels.expanded.linear import linear
from quantkit_kernels.experts import ExpertsLayout
from quantkit_kernels.gating import SILU, Gating
from quantkit_kernels.reference.experts import LoopLayout
from quantkit_kernels.weights import Weight


def unusable(
    operator: str, device: torch.device, dtype: torch.dtype | None, shapes: tuple[Shape, ...]
) -> str | None:
    return None if operator.startswith(("linear_", "experts_")) else "holds weights only"


def computes_gates(kind: str, silu: bool) -> bool:
    """As `backends.computes_gates`."""
    return True


def experts_layout(
    num_experts: int,
    gate: Weight,
    down: Weight,
    dtype: torch.dtype,
    device: torch.device,
    gating: Gating = SILU,
) -> ExpertsLayout:
    if why_not_grouped(gate, down, dtype, device) is None:
        return ExpandedLayout(num_experts, gate, dtype, device, gating)
    return LoopLayout(num_experts, linear, dtype, device, "expanded", gating)
