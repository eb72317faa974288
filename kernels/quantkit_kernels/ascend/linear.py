"""Linear on the Ascend kernels."""

import functools

import torch
from torch import Tensor

from quantkit_kernels.ascend import launch
from quantkit_kernels.ascend.chip import VECTOR_TOKENS, block_rows
from quantkit_kernels.ascend.layout import PackedTiles, pack
from quantkit_kernels.linear import Linear
from quantkit_kernels.torch_npu.calls import dynamic_quant
from quantkit_kernels.weights import Weight, shape, to_device


class AscendLinear(Linear):
    def __init__(self, weight: Weight, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, "ascend")
        self.packed = pack(to_device(weight, device))

    def held(self) -> list[Tensor]:
        return list(self.packed.tensors)

    def rows(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], self.out_features, dtype=self.dtype, device=x.device)
        launch.run(dense_launch(self.packed, x.contiguous(), out))
        return out


def dense_launch(packed: PackedTiles, x: Tensor, out: Tensor) -> launch.KernelLaunch:
    """The launch of x[M, k] @ W.T -> out[M, n] for one weight."""
    m = x.shape[0]
    if m <= VECTOR_TOKENS and packed.kind != "int8":
        return launch.rows(packed, x, _zeros(m, x.device), out)
    bm = block_rows(m)
    codes, row_scale = dynamic_quant(x) if packed.kind == "int8" else (x, None)
    return launch.blocks(packed, codes, row_scale, _in_order(m, bm, x.device), out)


@functools.lru_cache(maxsize=256)
def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=256)
def _in_order(m: int, bm: int, device: torch.device) -> launch.Blocks:
    """Of m rows of one weight."""
    first = torch.arange(0, m, bm, dtype=torch.int32)
    last = (first + bm).clamp(max=m)
    return launch.Blocks(bm, _zeros(len(first), device), first.to(device), last.to(device))
