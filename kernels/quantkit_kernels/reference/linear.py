"""Linear over codes that are expanded at every call."""

import torch
from torch import Tensor

from quantkit_kernels.linear import Linear, quantize_rows
from quantkit_kernels.weights import Int8, Weight, dequantize, rows, shape, to_device

_BLOCK_BYTES = 64 << 20  # of one expanded block of rows


class ReferenceLinear(Linear):
    """Expands a block of output features at a time, so that memory stays bounded for any weight."""

    def __init__(self, weight: Weight, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, "reference")
        self.weight = to_device(weight, device)

    def held(self) -> list[Tensor]:
        return [tensor for tensor in self.weight if tensor is not None]

    def rows(self, x: Tensor) -> Tensor:
        wide = x.float()
        row_scale: Tensor | None = None
        if isinstance(self.weight, Int8):
            codes, row_scale = quantize_rows(x)
            # In float64 the sum of int8 products is exact, as an integer unit's is.
            wide = codes.double()
        y = torch.empty(x.shape[0], self.out_features, dtype=x.dtype, device=x.device)
        step = max(1, _BLOCK_BYTES // (self.in_features * wide.element_size()))
        for start in range(0, self.out_features, step):
            stop = min(start + step, self.out_features)
            block = rows(self.weight, start, stop)
            if isinstance(block, Int8) and row_scale is not None:
                y[:, start:stop] = (wide @ block.codes.double().T) * row_scale * block.scale.T
            else:
                y[:, start:stop] = wide @ dequantize(block).T
        return y


def linear(weight: Weight, dtype: torch.dtype, device: torch.device) -> Linear:
    return ReferenceLinear(weight, dtype, device)
