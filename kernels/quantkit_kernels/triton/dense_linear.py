"""Linears of 16-bit weights: few rows by a kernel that begins while the launch before it ends,
where one was measured to be faster than the vendor's library, or the weight is small; the library
else."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.linear import Linear
from quantkit_kernels.triton.cards import (
    architecture,
    dense_plan,
    is_small_dense,
    multiprocessors,
    overlapped,
)
from quantkit_kernels.triton.dense_plans import DenseRowsPlan
from quantkit_kernels.triton.rows import power_of_two
from quantkit_kernels.weights import Weight, dequantize, shape
from quantkit_kernels.workspace import workspace

_SMALL_TILE = 1 << 14
"""Numbers of a small weight that a program holds."""


class TritonDenseLinear(Linear):
    def __init__(self, weight: Weight, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, "triton")
        self.weight = dequantize(weight).to(device=device, dtype=dtype).contiguous()

    def held(self) -> list[Tensor]:
        return [self.weight]

    def rows(self, x: Tensor) -> Tensor:
        if self._is_small(x):
            return multiply_small(x.contiguous(), self.weight)
        plan = dense_plan(
            architecture(self.device), self.out_features, self.in_features, x.shape[0]
        )
        return (
            F.linear(x, self.weight)
            if plan is None
            else multiply_rows(x.contiguous(), self.weight, plan)
        )

    def of_gate_and_up(self, x: Tensor) -> Tensor | None:
        """Called with silu_and_mul(x), x [M, 2K], in one launch; None where that takes two."""
        return (
            multiply_small(x.contiguous(), self.weight, gated=True)
            if x.dim() == 2 and x.dtype == self.dtype and self._is_small(x)
            else None
        )

    def _is_small(self, x: Tensor) -> bool:
        small = is_small_dense(architecture(self.device), self.out_features, self.in_features)
        return small and x.shape[0] == 1


def multiply_small(x: Tensor, weight: Tensor, gated: bool = False) -> Tensor:
    """As `multiply_rows`, of a small weight [N, K] of any size and in its dtype; gated: of
    silu_and_mul(x)."""
    from quantkit_kernels.triton.dense_rows_kernel import multiply_small as kernel

    tokens, (n, k) = x.shape[0], weight.shape
    y = torch.empty(tokens, n, dtype=weight.dtype, device=x.device)
    # Two programs a multiprocessor, of as many rows as registers hold.
    width = power_of_two(k)
    rows = power_of_two(max(1, n // (4 * multiprocessors(x.device))))
    rows = min(rows, max(1, _SMALL_TILE // width))
    kernel[(-(-n // rows),)](
        x, weight, y, tokens, n, k, BN=rows, BK=width, GATED=gated, **overlapped(x.device)
    )
    return y


def multiply_rows(x: Tensor, weight: Tensor, plan: DenseRowsPlan) -> Tensor:
    """x[M, K] @ weight[N, K].T -> [M, N], all in one 16-bit type; N a multiple of plan.rows, K of
    plan.features, M at most `dense_plans.MOST_ROWS`."""
    from quantkit_kernels.triton.dense_rows_kernel import multiply_dense

    (tokens, k), n = x.shape, weight.shape[0]
    tiles, width = n // plan.rows, max(16, 1 << (tokens - 1).bit_length())
    y = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    partial, arrived = workspace(
        x.device, tiles * plan.split * plan.rows * width if plan.split > 1 else 0
    )
    multiply_dense[(tiles * plan.split,)](
        x, weight, y, partial, arrived, tokens, n, k,
        SPLIT=plan.split, BN=plan.rows, BK=plan.features, BM=width, STAGES=plan.stages,
        num_warps=plan.warps, **overlapped(x.device),
    )  # fmt: skip
    return y
