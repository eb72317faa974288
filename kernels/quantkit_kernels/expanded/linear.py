"""Linear over a weight that was expanded once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.blocks import blocked_matmul
from quantkit_kernels.cpu import dense
from quantkit_kernels.cpu.units import has_unit
from quantkit_kernels.linear import BIASED_ROWS, Linear, quantize_rows
from quantkit_kernels.weights import Int8, Weight, dequantize, shape

# From this many rows on, a CPU without bf16/fp16 units is faster in float32, expanding the weight
# block by block (4096 x 4096 on AVX2, one core, ms for bf16 against float32 blocks: M=1 1.7/3.7,
# M=4 8.1/7.8, M=16 29/13, M=64 111/33).
_UPCAST_ROWS = 4


class ExpandedLinear(Linear):
    """The weight in the compute dtype. On a CPU few rows are multiplied by dense.cpp where torch is
    slower."""

    def __init__(self, weight: Weight, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, "expanded")
        self.weight = dequantize(weight).to(device=device, dtype=dtype)
        self._upcast = device.type == "cpu" and not has_unit(dtype)
        self._few_rows = dense.most_rows(dtype) if dense.multiplies(self.weight) else 0

    def held(self) -> list[Tensor]:
        return [self.weight]

    def rows(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self._few_rows:
            return dense.multiply(x, self.weight)
        if self._upcast and x.shape[0] >= _UPCAST_ROWS:
            return blocked_matmul(
                x.float(), self.out_features, lambda start, stop: self.weight[start:stop].float()
            ).to(self.dtype)
        return F.linear(x, self.weight)

    def biased(self, x: Tensor, bias: Tensor) -> Tensor:
        """On a GPU the library adds the bias to the sums."""
        if x.is_cuda and x.shape[0] >= BIASED_ROWS:
            return F.linear(x, self.weight, bias)
        return super().biased(x, bias)


class ExpandedInt8Linear(Linear):
    """The int8 codes as float32: sums of their products are exact up to 2^24 and rounded to float32
    beyond."""

    def __init__(self, weight: Int8, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, "expanded")
        self.codes = weight.codes.to(device=device, dtype=torch.float32)
        self.scale = weight.scale.to(device).T.contiguous()

    def held(self) -> list[Tensor]:
        return [self.codes, self.scale]

    def rows(self, x: Tensor) -> Tensor:
        codes, row_scale = quantize_rows(x)
        return F.linear(codes.float(), self.codes).mul_(row_scale).mul_(self.scale).to(self.dtype)


def linear(weight: Weight, dtype: torch.dtype, device: torch.device) -> Linear:
    if isinstance(weight, Int8):
        return ExpandedInt8Linear(weight, dtype, device)
    return ExpandedLinear(weight, dtype, device)
