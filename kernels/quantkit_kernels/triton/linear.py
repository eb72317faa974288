"""Linears of packed weights, and which class lays a weight out."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.linear import Linear
from quantkit_kernels.triton import rows, small, wgmma
from quantkit_kernels.triton.cards import AnyPlan, architecture, linear_plan, multiprocessors
from quantkit_kernels.triton.dense_linear import TritonDenseLinear
from quantkit_kernels.triton.first_use import announce
from quantkit_kernels.triton.launch import Packed, multiply
from quantkit_kernels.triton.layout import group_of, pack
from quantkit_kernels.triton.wgmma_plans import WgmmaPlan, has_wgmma
from quantkit_kernels.weights import Weight, kind, shape, to_device


class TritonLinear(Linear):
    def __init__(self, weight: Weight, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, "triton")
        self.packed = Packed(pack(to_device(weight, device)), kind(weight), group_of(weight), n, k)
        if self.packed.kind == "int8" and has_wgmma(architecture(device), k):
            wgmma.zeros(device)

    def held(self) -> list[Tensor]:
        return list(self.packed.steps)

    def fuses(self, rows: int) -> bool:
        return rows == 1 and small.is_small(self.packed, self.device)

    def in_one_launch(
        self, x: Tensor, gain: Tensor | None, eps: float, residual: Tensor | None
    ) -> Tensor:
        return small.multiply_small(x.contiguous(), self.packed, gain, eps, residual)

    def rows(self, x: Tensor) -> Tensor:
        if self.fuses(len(x)):
            return small.multiply_small(x.contiguous(), self.packed)
        plan = linear_plan(
            architecture(self.device),
            multiprocessors(self.device),
            self.packed.kind,
            self.out_features,
            self.in_features,
            x.shape[0],
        )
        return self.expand(x) if plan is None else self.tiles(x.contiguous(), plan)

    def tiles(self, x: Tensor, plan: AnyPlan) -> Tensor:
        """x[M, K] -> [M, N] by a given plan."""
        y = torch.empty(x.shape[0], self.out_features, dtype=self.dtype, device=x.device)
        codes, scale = rows.quantize_rows(x) if self.packed.kind == "int8" else (x, None)
        if isinstance(plan, WgmmaPlan):
            assert scale is not None, self.packed.kind
            wgmma.multiply(self.packed.steps, codes, scale, y, plan)
        else:
            multiply(self.packed, codes, scale, y, plan)
        return y

    def expand(self, x: Tensor) -> Tensor:
        """x[M, K] -> [M, N] by the vendor's library over W[N, K] in the compute dtype, which exists
        during this call only."""
        return F.linear(x, rows.expanded(self.packed, self.dtype))


def linear(weight: Weight, dtype: torch.dtype, device: torch.device) -> Linear:
    announce(device)
    if kind(weight) == "dense":
        return TritonDenseLinear(weight, dtype, device)
    return TritonLinear(weight, dtype, device)
