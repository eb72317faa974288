"""Linear over torch_npu's quantized products, and over torch's own for weights that are not
quantized."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.linear import Linear
from quantkit_kernels.torch_npu.calls import (
    dynamic_quant,
    format_cast_nz,
    quant_matmul,
    weight_quant_matmul,
)
from quantkit_kernels.torch_npu.layout import antiquant_group, int4_tensors
from quantkit_kernels.weights import (
    FP4_GROUP_SIZE,
    Dense,
    Fp4,
    Int4,
    Int8,
    Weight,
    kind,
    shape,
    to_device,
)

BACKEND = "torch_npu"
_RESCALE = 2.0**22


class Int4Linear(Linear):
    """npu_weight_quant_batchmatmul, ND weight: the layout its eager mode takes."""

    def __init__(self, weight: Int4, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, BACKEND)
        self.weight, self.scale, self.offset = int4_tensors(weight, dtype)
        self.group = antiquant_group(weight)

    def held(self) -> list[Tensor]:
        return [self.weight, self.scale, self.offset]

    def rows(self, x: Tensor) -> Tensor:
        return weight_quant_matmul(x, self.weight, self.scale, self.offset, self.group)


class Int8Linear(Linear):
    """npu_dynamic_quant, then npu_quant_matmul on a weight in the cube's layout."""

    def __init__(self, weight: Int8, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, BACKEND)
        self.weight = format_cast_nz(weight.codes.T.contiguous())
        self.scale = weight.scale.flatten().contiguous()

    def held(self) -> list[Tensor]:
        return [self.weight, self.scale]

    def rows(self, x: Tensor) -> Tensor:
        codes, row_scale = dynamic_quant(x)
        return quant_matmul(codes, row_scale, self.weight, self.scale, self.dtype)


class Fp4Linear(Linear):
    """E2M1 decoded at every call, for no operator reads it: correct and compact, and slow. Backend
    ascend decodes inside its product.

    Two codes to a byte, features k and k + K/2, so that both halves come out as runs. Decoding is
    multiplication, masks and one reinterpretation, as in ascend/kernels.py: a code's bits are put
    where fp16 has sign, exponent and mantissa, which makes 2^-14 of it, and 2^-8 of an e4m3 scale.
    """

    def __init__(self, weight: Fp4, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, BACKEND)
        low, high = weight.codes.to(torch.int8).chunk(2, dim=1)
        self.codes = low | (high << 4)
        self.scale_bits = weight.scale.view(torch.int8)
        self.global_scale = (weight.global_scale * _RESCALE).reshape(-1, 1)

    def held(self) -> list[Tensor]:
        return [self.codes, self.scale_bits, self.global_scale]

    def rows(self, x: Tensor) -> Tensor:
        return x @ self.decode().T

    def decode(self) -> Tensor:
        """W[N, K] of the compute dtype."""
        bytes_ = self.codes.to(torch.int16)
        shifted = torch.cat(
            [((bytes_ & 8) * 4096) | ((bytes_ & 7) * 512), (bytes_ * 32) & -29184], dim=1
        )
        values = shifted.view(torch.float16).float().unflatten(1, (-1, FP4_GROUP_SIZE))
        scale = (self.scale_bits.to(torch.int16) * 128).view(
            torch.float16
        ).float() * self.global_scale
        return (values * scale.unsqueeze(-1)).flatten(1).to(self.dtype)


class DenseLinear(Linear):
    """torch's own product. The weight stays ND: the manual calls FRACTAL_NZ internal, and
    vllm-ascend leaves 16-bit weights so too."""

    def __init__(self, weight: Dense, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, BACKEND)
        self.weight = weight.weight.to(dtype)

    def held(self) -> list[Tensor]:
        return [self.weight]

    def rows(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class NzLinear(Linear):
    """torch's own product by an unquantized weight [K, N] in the cube's layout, where an operator
    next to it wants that layout."""

    def __init__(self, weight: Dense, dtype: torch.dtype, device: torch.device) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, BACKEND)
        self.weight = format_cast_nz(weight.weight.T.to(dtype).contiguous())

    def held(self) -> list[Tensor]:
        return [self.weight]

    def rows(self, x: Tensor) -> Tensor:
        return x @ self.weight


def nz_linear(weight: Weight, dtype: torch.dtype, device: torch.device) -> Int8Linear | NzLinear:
    """A linear whose `weight` is [K, N] in the cube's layout, int8 or unquantized."""
    placed = to_device(weight, device)
    if isinstance(placed, Int8):
        return Int8Linear(placed, dtype, device)
    assert isinstance(placed, Dense), kind(placed)
    return NzLinear(placed, dtype, device)


def linear(weight: Weight, dtype: torch.dtype, device: torch.device) -> Linear:
    placed = to_device(weight, device)
    if isinstance(placed, Int4):
        return Int4Linear(placed, dtype, device)
    if isinstance(placed, Int8):
        return Int8Linear(placed, dtype, device)
    if isinstance(placed, Fp4):
        return Fp4Linear(placed, dtype, device)
    assert isinstance(placed, Dense), kind(placed)
    return DenseLinear(placed, dtype, device)
