"""FP4 linears by the project's own C++ (fp4.cpp), torch having no operator: a weight is read as it
is packed, 4.5 bits each."""

import torch
from torch import Tensor

from quantkit_kernels.blocks import blocked_matmul
from quantkit_kernels.cpu.build import library
from quantkit_kernels.cpu.units import has_unit
from quantkit_kernels.linear import Linear
from quantkit_kernels.weights import Fp4, shape

_BLOCK = 16  # rows
_SCALE_BIAS = 16
_EXPANDED_ROWS = 64  # from which on torch's matmul over expanded blocks is faster


class Fp4Linear(Linear):
    """float32 arithmetic on the exact values, whatever the compute dtype; with many rows that of
    torch's matmul in the compute dtype."""

    def __init__(self, weight: Fp4, dtype: torch.dtype) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, torch.device("cpu"), "cpu")
        self.words, self.scales, self.row_scale = _pack(weight)
        self._upcast = not has_unit(dtype)
        self._library = library("fp4")

    def held(self) -> list[Tensor]:
        return [self.words, self.scales, self.row_scale]

    def rows(self, x: Tensor) -> Tensor:
        if x.shape[0] >= _EXPANDED_ROWS:
            if self._upcast:
                return blocked_matmul(x.float(), self.out_features, self._expand).to(self.dtype)
            return blocked_matmul(
                x, self.out_features, lambda start, stop: self._expand(start, stop).to(self.dtype)
            )
        x = x.float().contiguous()
        padded = self.row_scale.numel()
        y = torch.empty(x.shape[0], padded)
        sizes = (x.shape[0], padded, self.in_features, torch.get_num_threads())
        self._library.qk_fp4_linear(
            *(one.data_ptr() for one in self.held()), x.data_ptr(), y.data_ptr(), *sizes
        )
        return y[:, : self.out_features].to(self.dtype)

    def _expand(self, start: int, stop: int) -> Tensor:
        block = torch.empty(stop - start, self.in_features)
        sizes = (start, stop, self.in_features, torch.get_num_threads())
        self._library.qk_fp4_expand(
            *(one.data_ptr() for one in self.held()), block.data_ptr(), *sizes
        )
        return block


def _pack(weight: Fp4) -> tuple[Tensor, Tensor, Tensor]:
    """Words int32, scales uint8 and row factors float32 as the top of fp4.cpp says; rows are padded
    to whole blocks with zeros."""
    n, k = shape(weight)
    padding = -n % _BLOCK
    scale = weight.scale.float()
    # A scale of zero has no normal number to represent it: its codes become zeros instead.
    codes = weight.codes * (scale > 0).repeat_interleave(16, dim=1)
    nibbles = (
        _pad(codes, padding).view(-1, _BLOCK, k // 16, 2, 8).permute(0, 2, 3, 1, 4).to(torch.int32)
    )  # block, group, word, row, nibble
    words = torch.zeros(nibbles.shape[:-1], dtype=torch.int32)
    for i in range(8):
        words |= nibbles[..., i] << (4 * i)
    mantissa, exponent = torch.frexp(torch.where(scale > 0, scale, torch.ones_like(scale)))
    bits = ((exponent - 1 + _SCALE_BIAS) << 3) | ((mantissa * 2 - 1) * 8).to(torch.int32)
    scales = (
        _pad(bits.to(torch.uint8), padding).view(-1, _BLOCK, k // 16).transpose(1, 2).contiguous()
    )
    return words, scales, _pad(weight.global_scale.expand(n).contiguous(), padding)


def _pad(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])]) if rows else tensor
