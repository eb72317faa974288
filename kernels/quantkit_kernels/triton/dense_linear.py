"""Linears of 16-bit weights: few rows by a kernel that begins while the launch before it ends,
where one was measured to be faster than the vendor's library, or the weight is small; the library
else."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.linear import BIASED_ROWS, Linear
from quantkit_kernels.triton.cards import (
    architecture,
    dense_plan,
    is_small_dense,
    overlapped,
)
from quantkit_kernels.triton.dense_plans import DenseRowsPlan
from quantkit_kernels.triton.small import multiply_small
from quantkit_kernels.weights import Weight, dequantize, shape
from quantkit_kernels.workspace import workspace


class TritonDenseLinear(Linear):
    def __init__(self, weight: Weight, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, "triton")
        self.weight = dequantize(weight).to(device=device, dtype=dtype).contiguous()

    def held(self) -> list[Tensor]:
        return [self.weight]

    def rows(self, x: Tensor) -> Tensor:
        if self.fuses(len(x)):
            return multiply_small(x.contiguous(), self.weight)
        plan = self._plan(len(x))
        return (
            F.linear(x, self.weight)
            if plan is None
            else multiply_rows(x.contiguous(), self.weight, plan)
        )

    def _plan(self, rows: int) -> DenseRowsPlan | None:
        """None: the library multiplies."""
        return dense_plan(architecture(self.device), self.out_features, self.in_features, rows)

    def biased(self, x: Tensor, bias: Tensor) -> Tensor:
        """Where the library multiplies, it adds the bias to the sums."""
        if len(x) < BIASED_ROWS or self._plan(len(x)) is not None:
            return super().biased(x, bias)
        return F.linear(x, self.weight, bias)

    def fuses(self, rows: int) -> bool:
        small = is_small_dense(architecture(self.device), self.out_features, self.in_features)
        return small and rows == 1

    def in_one_launch(
        self, x: Tensor, gain: Tensor | None, eps: float, residual: Tensor | None
    ) -> Tensor:
        return multiply_small(x.contiguous(), self.weight, gain, eps, residual)


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
