"""Linears of packed weights. The plan (plans.py) says which kernel computes a product."""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.cuda.abi import GemmParams
from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.launch import DTYPES, FORMATS, STORE, checked, stream_of
from quantkit_kernels.cuda.layout import PackedStrips, group_of, pack, pointers
from quantkit_kernels.cuda.linears.few_tokens import (
    quantize_rows,
    tokens_in_registers,
    tokens_in_shared,
)
from quantkit_kernels.cuda.linears.tiles import multiply_tiles
from quantkit_kernels.cuda.plans import (
    ExpandPlan,
    PersistentTilesPlan,
    TileAndSharePlan,
    TilePerBlockPlan,
    TokensInRegistersPlan,
    TokensInSharedPlan,
    linear_plan,
)
from quantkit_kernels.linear import Linear
from quantkit_kernels.weights import Weight, kind, shape, to_device


class CudaLinear(Linear):
    def __init__(self, weight: Weight, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, "cuda")
        self.kind = kind(weight)
        self.group = group_of(weight)
        self.packed: PackedStrips = pack(to_device(weight, device))
        self.padded = self.packed.row_scale.shape[0]
        library()

    def held(self) -> list[Tensor]:
        return [tensor for tensor in self.packed if tensor is not None]

    def rows(self, x: Tensor) -> Tensor:
        plan = linear_plan(self.kind, self.padded, self.in_features, x.shape[0])
        if isinstance(plan, ExpandPlan):
            return self.expand(x)
        return (
            self.few_tokens(x, plan)
            if isinstance(plan, TokensInRegistersPlan | TokensInSharedPlan)
            else self.tiles(x, plan)
        )

    def few_tokens(self, x: Tensor, plan: TokensInRegistersPlan | TokensInSharedPlan) -> Tensor:
        """x[M, K] -> [M, N] by a kernel that reads every weight once."""
        x = x.contiguous()
        y = torch.empty(x.shape[0], self.out_features, dtype=self.dtype, device=self.device)
        params = self.params(x.shape[0], y)
        params.x = x.data_ptr()
        if self.kind == "int8":
            codes, scale = quantize_rows(x)
            params.x, params.x_scale = codes.data_ptr(), scale.data_ptr()
        if isinstance(plan, TokensInSharedPlan):
            tokens_in_shared(params, self.kind, self.dtype, self.group, plan, self.device)
            return y
        grid_y = -(-x.shape[0] // (8 * plan.token_tiles))
        tokens_in_registers(params, self.kind, self.dtype, self.group, plan, grid_y, self.device)
        return y

    def tiles(
        self, x: Tensor, plan: TilePerBlockPlan | TileAndSharePlan | PersistentTilesPlan
    ) -> Tensor:
        """x[M, K] -> [M, N] by a kernel that computes tiles of rows and tokens."""
        y = torch.empty(x.shape[0], self.out_features, dtype=self.dtype, device=x.device)
        multiply_tiles(self.packed, self.kind, self.group, x.contiguous(), y, plan)
        return y

    def expand(self, x: Tensor) -> Tensor:
        """x[M, K] -> [M, N] by cuBLAS over W[N, K] in the compute dtype, which exists during this
        call only."""
        full = torch.empty(
            self.out_features, self.in_features, dtype=self.dtype, device=self.device
        )
        params = self._params()
        layout = (FORMATS[self.kind], DTYPES[self.dtype], self.group)
        checked(
            library().qk_expand(
                ctypes.byref(params), *layout, full.data_ptr(), stream_of(self.device)
            )
        )
        return F.linear(x, full)

    def params(self, rows: int, y: Tensor) -> GemmParams:
        """Arguments, of a product, of kernels that read every weight once into y [rows, N], but for
        x and the plan."""
        params = self._params()
        params.m, params.epilogue, params.out = rows, STORE, y.data_ptr()
        return params

    def _params(self) -> GemmParams:
        return GemmParams(
            **pointers(self.packed),
            n=self.padded,
            k=self.in_features,
            out_n=self.out_features,
            top_k=1,
        )


def linear(weight: Weight, dtype: torch.dtype, device: torch.device) -> Linear:
    return CudaLinear(weight, dtype, device)
