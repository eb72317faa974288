"""Weight-only int8 linears: a weight is read as it is stored, a byte a code and a float32 scale per
group. Few tokens by the project's own C++ (w8a16.cpp); many, or without a compiler, by torch's
matmul over blocks of rows that are expanded and stay in the cache."""

import torch
from torch import Tensor

from quantkit_kernels.blocks import blocked_matmul
from quantkit_kernels.cpu.build import once
from quantkit_kernels.cpu.units import has_unit
from quantkit_kernels.linear import Linear
from quantkit_kernels.weights import W8A16, dequantize, group_size, rows, shape

_EXPANDED_ROWS = 64
"""Tokens from which on torch's matmul is taken (49152 x 576 in groups of 64, one core with AVX-512
and bfloat16, ms, C++ / torch: M=12 10/30, M=40 31/37, M=63 51/55)."""


class W8A16Linear(Linear):
    def __init__(self, weight: W8A16, dtype: torch.dtype) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, torch.device("cpu"), "cpu")
        self.weight = W8A16(weight.codes.contiguous(), weight.scale.contiguous())
        self._wide = dtype if has_unit(dtype) else torch.float32

    def held(self) -> list[Tensor]:
        return list(self.weight)

    def rows(self, x: Tensor) -> Tensor:
        library = once("w8a16")
        if library is None or x.shape[0] >= _EXPANDED_ROWS:
            return blocked_matmul(x.to(self._wide), self.out_features, self._expand).to(self.dtype)
        x = x.float().contiguous()
        y = torch.empty(x.shape[0], self.out_features)
        sizes = (x.shape[0], *shape(self.weight), group_size(self.weight))
        library.qk_w8a16_linear(
            *(one.data_ptr() for one in (*self.weight, x, y)), *sizes, torch.get_num_threads()
        )
        return y.to(self.dtype)

    def _expand(self, start: int, stop: int) -> Tensor:
        return dequantize(rows(self.weight, start, stop)).to(self._wide)
