"""Linears of 16 bits: for a few tokens dense_tokens.cu, for more cuBLAS."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.launch import DTYPES, checked, stream_of
from quantkit_kernels.linear import Linear
from quantkit_kernels.weights import Dense

MOST_TOKENS = 16
LEAST_ROWS = 1 << 14
"""Of a weight: fewer have less to gain, for the kernel's warps have 16 rows each."""
_ROWS, _WARPS, _ENOUGH = 16, 16, 1500
"""Rows of a warp, warps of a block, and warps that fill an H200 well enough."""


class CudaDense(Linear):
    def __init__(self, weight: Dense, dtype: torch.dtype, device: torch.device) -> None:
        n, k = weight.weight.shape
        super().__init__(k, n, dtype, device, "cuda")
        self.weight = weight.weight.to(device=device, dtype=dtype).contiguous()
        self._split = split_of(n)
        library()

    def held(self) -> list[Tensor]:
        return [self.weight]

    def rows(self, x: Tensor) -> Tensor:
        if x.shape[0] > MOST_TOKENS:
            return F.linear(x, self.weight)
        x = x.contiguous()
        y = x.new_empty(x.shape[0], self.out_features)
        sizes = (x.shape[0], self.out_features, self.in_features, self._split)
        pointers = (self.weight.data_ptr(), x.data_ptr(), y.data_ptr())
        checked(library().qk_dense_tokens(*pointers, DTYPES[self.dtype], *sizes, stream_of(self.device)))
        return y


def split_of(rows: int) -> int:
    """Warps along K: as many as make enough of them. The same for any number of tokens, whose results thus are, too."""
    split = 1
    while split < _WARPS and -(-rows // _ROWS) * split < _ENOUGH:
        split *= 2
    return split
