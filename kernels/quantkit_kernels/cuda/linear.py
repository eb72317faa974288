"""Linears: by the streaming kernel for few tokens, the tile kernel for more, and for many over an expanded weight where that is faster."""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.cuda.build import Params, library
from quantkit_kernels.cuda.launch import DTYPES, FORMATS, STORE, checked, quantize_rows, stream_gemm, stream_of, wide_gemm
from quantkit_kernels.cuda.layout import Packed, group_of, pack
from quantkit_kernels.cuda.plans import Expand, PersistentPlan, Plan, SharePlan, TilePlan, WidePlan, linear_plan
from quantkit_kernels.cuda.tiles import tile_gemm
from quantkit_kernels.linear import Linear
from quantkit_kernels.weights import Weight, kind, shape, to_device


class CudaLinear(Linear):
    def __init__(self, weight: Weight, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, "cuda")
        self.kind = kind(weight)
        self.group = group_of(weight)
        self.packed: Packed = pack(to_device(weight, device))
        self.padded = self.packed.row_scale.shape[0]
        library()

    def held(self) -> list[Tensor]:
        return [tensor for tensor in self.packed if tensor is not None]

    def rows(self, x: Tensor) -> Tensor:
        plan = linear_plan(self.kind, self.padded, self.in_features, x.shape[0])
        if isinstance(plan, Expand):
            return self.expanded(x)
        return self.stream(x, plan) if isinstance(plan, Plan | WidePlan) else self.tiles(x, plan)

    def tiles(self, x: Tensor, plan: TilePlan | SharePlan | PersistentPlan) -> Tensor:
        """x[M, K] -> [M, N] by the tile kernel with a given grid, or by the one that stays."""
        y = torch.empty(x.shape[0], self.out_features, dtype=self.dtype, device=x.device)
        tile_gemm(self.packed, self.kind, self.group, x.contiguous(), y, plan)
        return y

    def stream(self, x: Tensor, plan: Plan | WidePlan) -> Tensor:
        """x[M, K] -> [M, N] by the streaming kernel with a given grid, or by its wide blocks."""
        x = x.contiguous()
        y = torch.empty(x.shape[0], self.out_features, dtype=self.dtype, device=x.device)
        params = self._params()
        params.m, params.epilogue, params.out = x.shape[0], STORE, y.data_ptr()
        params.x = x.data_ptr()
        if self.kind == "int8":
            codes, scale = quantize_rows(x)
            params.x, params.x_scale = codes.data_ptr(), scale.data_ptr()
        if isinstance(plan, WidePlan):
            wide_gemm(params, self.kind, self.dtype, self.group, plan, self.device)
            return y
        grid_y = -(-x.shape[0] // (8 * plan.token_tiles))
        stream_gemm(params, self.kind, self.dtype, self.group, plan, grid_y, self.device)
        return y

    def expanded(self, x: Tensor) -> Tensor:
        """x[M, K] -> [M, N] by cuBLAS over W[N, K] in the compute dtype, which is there for this call only."""
        full = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=self.device)
        params = self._params()
        layout = (FORMATS[self.kind], DTYPES[self.dtype], self.group)
        checked(library().qk_expand(ctypes.byref(params), *layout, full.data_ptr(), stream_of(self.device)))
        return F.linear(x, full)

    def _params(self) -> Params:
        pointers = {name: tensor.data_ptr() for name, tensor in self.packed._asdict().items() if tensor is not None}
        return Params(**pointers, n=self.padded, k=self.in_features, out_n=self.out_features, top_k=1)


def linear(weight: Weight, dtype: torch.dtype, device: torch.device) -> Linear:
    return CudaLinear(weight, dtype, device)
