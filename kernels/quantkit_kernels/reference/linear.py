"""Linear over codes that are expanded at every call."""

import torch
from torch import Tensor

from quantkit_kernels.blocks import blocked_matmul
from quantkit_kernels.linear import Linear, quantize_rows
from quantkit_kernels.weights import Int8, Weight, dequantize, rows, shape, to_device


class ReferenceLinear(Linear):
    """Float32 products of the expanded weight; for int8, float64 products of the codes, which are
    exact as an integer unit's are, times their scales in float32."""

    def __init__(self, weight: Weight, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, "reference")
        self.weight = to_device(weight, device)

    def held(self) -> list[Tensor]:
        return [tensor for tensor in self.weight if tensor is not None]

    def rows(self, x: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, Int8):
            codes, row_scale = quantize_rows(x)
            products = blocked_matmul(
                codes.double(),
                self.out_features,
                lambda start, stop: weight.codes[start:stop].double(),
            )
            return (products.float() * weight.scale.T * row_scale).to(self.dtype)
        return blocked_matmul(
            x.float(), self.out_features, lambda start, stop: dequantize(rows(weight, start, stop))
        ).to(self.dtype)


def linear(weight: Weight, dtype: torch.dtype, device: torch.device) -> Linear:
    return ReferenceLinear(weight, dtype, device)
