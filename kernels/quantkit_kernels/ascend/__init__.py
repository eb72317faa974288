"""Triton kernels for the Ascend 910B: int4, FP4 and int8 linears and experts, and the router of few
tokens; and experts by the Ascend C kernels, where these were built.

FP4 exists here alone on this chip: no operator of torch_npu reads E2M1. Lowered by triton-ascend
3.2.0 to its Ascend910B linalg IR, and that IR executed on a CPU (tests/ascend/lowered); never
compiled by bishengir nor run on an NPU.
"""

import functools
import importlib.util

import torch

from quantkit_kernels.ascend import streamed
from quantkit_kernels.ascend.chip import SPAN
from quantkit_kernels.ascend.experts import AscendLayout
from quantkit_kernels.ascend.gate import moe_gate, route
from quantkit_kernels.ascend.linear import AscendLinear
from quantkit_kernels.backends import Shape
from quantkit_kernels.experts import ExpertsLayout
from quantkit_kernels.weights import Weight, stack


def unusable(
    operator: str, device: torch.device, dtype: torch.dtype | None, shapes: tuple[Shape, ...]
) -> str | None:
    if device.type != "npu":
        return f"runs on Ascend NPUs, not on {device.type}"
    if not has_triton_ascend():
        return "triton-ascend is not installed"
    reasons = (refused(operator, dtype, shape) for shape in shapes or (None,))
    return next((reason for reason in reasons if reason is not None), None)


def refused(operator: str, dtype: torch.dtype | None, shape: Shape | None) -> str | None:
    """Why the kernels cannot run an operator, whatever the machine; dtype and shape are None when
    asked in general."""
    if operator in ("route", "moe_gate"):
        return None
    family, _, weight_kind = operator.partition("_")
    if family not in ("linear", "experts") or weight_kind == "dense":
        return "has quantized weights only"
    if weight_kind == "w8a16":
        return "int8 with activations of 8 bits only"
    if weight_kind == "fp4" and dtype not in (None, torch.bfloat16):
        return "the FP4 kernel's decoded weights fit bfloat16 only"
    if dtype not in (None, torch.bfloat16, torch.float16):
        return "computes in bfloat16 and float16 only"
    if shape is not None and shape[1] % SPAN:
        return f"needs input features in multiples of {SPAN}, not {shape[1]}"
    return None


def linear(weight: Weight, dtype: torch.dtype, device: torch.device) -> AscendLinear:
    return AscendLinear(weight, dtype, device)


def experts_layout(
    num_experts: int, gate: Weight, down: Weight, dtype: torch.dtype, device: torch.device
) -> ExpertsLayout:
    if streamed.fits(stack(gate, gate), dtype, device) and streamed.fits(down, dtype, device):
        return streamed.StreamedLayout(num_experts, dtype, device)
    return AscendLayout(num_experts, dtype, device)


@functools.cache
def has_triton_ascend() -> bool:
    return (
        importlib.util.find_spec("triton") is not None
        and importlib.util.find_spec("triton.backends.ascend") is not None
    )
