"""The CPU backend: torch's and oneDNN's packed operators where they are right on this processor,
and C++ where torch has none or is slow.

int4   int4_rows.cpp for few rows, 4.25 bits per weight in bf16: bfloat16 products where the processor
       has them, else float32, by AVX-512, AVX2, NEON or the compiler's own vectors. Many rows: torch's
       matmul over blocks expanded by int4.cpp. Without a compiler `_weight_int4pack_mm_for_cpu`, in
       bf16 or fp16.
routers  dense.cpp, any number of rows: what a token is routed to does not depend on the others.
dense  Of backend expanded: dense.cpp for few rows in float32, and in bf16 but where AMX multiplies it.
int8   int8.cpp: any number of rows on a processor with VNNI and no AMX, whose experts of a layer are one call (int8_experts.cpp); few with
       AMX, by AVX2, NEON (dot product or i8mm) or the compiler's own vectors. For more, or without a compiler:
       `onednn.qlinear_pointwise` with u8 activations where the processor has VNNI (it saturates in
       16 bits without, which a test product finds out), over the same packed weight; else
       `_weight_int8pack_mm` and float32 products of expanded blocks.
w8a16  w8a16.cpp for few rows; many by torch's matmul over expanded blocks.
fp4    fp4.cpp, AVX-512 or AVX2; 4.5 bits per weight.
gqa    gqa.cpp, decoding over pages, of latents in 16 and 32 bits too. Prompts: prompts.cpp, keys and values expanded from latents too.
norms  norm.cpp in bf16 and float32, which is all of gqa before attention, too; in fp16 torch.
silu   silu.cpp in bf16 and float32, with Hadamard matrices too; in fp16, or without a compiler, torch's, by rows that stay in a cache.

The C++ is compiled by the user's compiler at first use.
"""

import torch

from quantkit_kernels.backends import SINKS, Shape
from quantkit_kernels.cpu.build import why_no_library
from quantkit_kernels.cpu.functional import (
    add_rms_norm,
    float32_linear,
    gate_and_rotate,
    moe_gate,
    rms_norm,
    silu_and_mul,
)
from quantkit_kernels.cpu.grouped import (
    gqa_decode,
    gqa_prefill,
    gqa_prepare,
    mla_decode,
    mla_prefill,
)
from quantkit_kernels.cpu.int8_experts import Int8ExpertsLayout
from quantkit_kernels.cpu.linear import linear, refused
from quantkit_kernels.reference.experts import LoopLayout
from quantkit_kernels.reference.functional import cache_layout
from quantkit_kernels.weights import Int8, Weight


def unusable(
    operator: str, device: torch.device, dtype: torch.dtype | None, shapes: tuple[Shape, ...]
) -> str | None:
    if device.type != "cpu":
        return f"runs on the CPU, not on {device.type}"
    if operator.endswith("_dense"):
        return "backend expanded is torch's own matmul already"
    if operator in ("gqa_decode", "mla_decode"):
        return why_no_library("gqa")
    if operator in ("float32_linear", "moe_gate"):
        return why_no_library("dense")
    if operator in ("add_rms_norm", "gqa_prepare", "rms_norm"):
        return why_no_library("norm")
    if operator in ("gate_and_rotate", "gqa_prefill", "mla_prefill", "silu_and_mul"):
        return None
    if not operator.startswith(("linear_", "experts_")):
        return "the reference is torch's own operators already"
    reasons = (refused(operator.split("_")[1], dtype, shape) for shape in shapes or (None,))
    return next((reason for reason in reasons if reason is not None), None)


def experts_layout(
    num_experts: int, gate: Weight, down: Weight, dtype: torch.dtype, device: torch.device
) -> LoopLayout:
    kind = Int8ExpertsLayout if isinstance(gate, Int8) else LoopLayout
    return kind(num_experts, linear, dtype, device, "cpu", silu=silu_and_mul)
