"""A launch of multiply_kernel.py, for linears and experts."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.gating import SILU, Gating
from quantkit_kernels.pairs import Slots
from quantkit_kernels.triton.cards import LinearPlan, interpreted, overlapped
from quantkit_kernels.triton.layout import PackedSteps
from quantkit_kernels.workspace import workspace

KINDS = {"int4": 0, "fp4": 1, "int8": 2, "w8a16": 3}
COLUMNS = {"int4": 32, "fp4": 16, "int8": 32, "w8a16": 32}
STORE, SILU_MUL, WEIGH = range(3)


class ChosenExperts(NamedTuple):
    """The pairs of one token, in the order of its experts: ids [pairs]."""

    ids: Tensor


class Packed(NamedTuple):
    """Weights [N, K] of one linear or of all experts, and their grid. bias: float32, of as many
    rows as the packed weight has."""

    steps: PackedSteps
    kind: str
    group: int
    n: int
    k: int
    bias: Tensor | None = None

    def held(self) -> list[Tensor]:
        return [*self.steps, *([] if self.bias is None else [self.bias])]


def multiply(
    packed: Packed,
    x: Tensor,
    x_scale: Tensor | None,
    out: Tensor,
    plan: LinearPlan,
    *,
    epilogue: int = STORE,
    slots: Slots | ChosenExperts | None = None,
    top_k: int = 1,
    pair_weights: Tensor | None = None,
    gating: Gating = SILU,
) -> None:
    """Write the product of x and the weight into `out`. Experts: the row of a pair is that of token
    pair // top_k; gating: of SILU_MUL."""
    from quantkit_kernels.triton.multiply_kernel import multiply as kernel

    codes, scales, row_scale = packed.steps
    features = packed.n // 2 if epilogue == SILU_MUL else packed.n
    rows = row_scale.shape[-1]
    tiles = -(-features // plan.rows)
    token_tiles = -(-x.shape[0] // plan.tokens) if slots is None else len(slots[0])
    split, sums = plan.split, 2 if epilogue == SILU_MUL else 1
    partial, arrived = workspace(
        x.device, tiles * token_tiles * split * sums * plan.rows * plan.tokens if split > 1 else 0
    )
    assert split == 1 or tiles * token_tiles <= len(arrived), (tiles, token_tiles)
    nothing, own_rows = row_scale, rows // 2 if epilogue == SILU_MUL else rows
    tables = [arrived, slots[0] if slots else arrived, arrived]
    if isinstance(slots, Slots):
        tables = [slots.order, slots.tile_expert, slots.tile_count]
    kernel[(tiles * split, token_tiles)](
        x, nothing if x_scale is None else x_scale, codes, scales, row_scale,
        nothing if packed.bias is None else packed.bias, out, partial, arrived,
        *tables,
        nothing if pair_weights is None else pair_weights,
        x.shape[0], rows, packed.k, out.shape[1], -(-packed.k // 128), top_k, rows // 2,
        KIND=KINDS[packed.kind], GROUP=packed.group, COLUMNS=COLUMNS[packed.kind],
        EPILOGUE=epilogue,
        EXPERTS=0 if slots is None else 1 if isinstance(slots, Slots) else 2,
        SPLIT=split, BN=plan.rows, BM=plan.tokens, EVEN_N=own_rows % plan.rows == 0,
        EVEN_K=packed.k % 128 == 0,
        NVIDIA=by_assembly(x.device), STAGES=plan.stages,
        DTYPE=decoded_type(out.dtype if epilogue != WEIGH else x.dtype),
        ALONE=x.shape[0] == 1 if slots is None else isinstance(slots, ChosenExperts),
        SCALED_SUMS=scaled_sums(packed.kind, plan), BIASED=packed.bias is not None,
        num_warps=plan.warps, **constants(gating), **overlapped(x.device),
    )  # fmt: skip


def scaled_sums(kind: str, plan: LinearPlan) -> bool:
    """Whether codes are multiplied as they are and sums scaled, of which a tile of 8 tokens has a
    quarter of the weights' number."""
    return kind == "int4" and plan.tokens <= 8


def constants(gating: Gating) -> dict[str, float]:
    """What `gated` is compiled with."""
    bounds = {"BOUND": gating.bound or 0.0, "UP_BOUND": gating.up_bound or 0.0}
    return {"ALPHA": gating.alpha, "LIMIT": gating.limit or 0.0, "SHIFT": gating.shift} | bounds


def by_assembly(device: torch.device) -> bool:
    """Whether kernels may use NVIDIA's instructions."""
    return device.type == "cuda" and not torch.version.hip and not interpreted()


def decoded_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return tl.float16 if dtype == torch.float16 else tl.bfloat16
