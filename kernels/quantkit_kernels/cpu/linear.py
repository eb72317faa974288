"""Int4 and int8 linears over torch's packed CPU operators, and the choice among all."""

import functools
import math

import torch
from torch import Tensor

from quantkit_kernels.blocks import blocked_matmul
from quantkit_kernels.cpu.build import why_no_library
from quantkit_kernels.cpu.fp4 import Fp4Linear
from quantkit_kernels.linear import Linear, quantize_rows
from quantkit_kernels.weights import Fp4, Int4, Int8, Weight, group_size, kind, shape

# Rows from which expanded float32 blocks beat `_weight_int8pack_mm` (4096 x 4096, AVX2, one core, ms: M=16 12/14, M=64 59/34).
_INT8PACK_ROWS = 16
_ZERO_POINT = 128  # of the activations' unsigned codes
# Others are multiplied number by number: float16 is 15 times as slow as bfloat16 on AVX2.
_INT4PACK_DTYPES = (torch.bfloat16, torch.float16) if torch.cpu._is_avx512_supported() else (torch.bfloat16,)


class Int4Linear(Linear):
    """`_weight_int4pack_mm_for_cpu`: w = (q - 8) * scale + offset, q in 0..15, scale and offset rounded to the compute dtype."""

    def __init__(self, weight: Int4, dtype: torch.dtype) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, torch.device("cpu"), "cpu")
        self.group_size = group_size(weight)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.to(torch.int32) + 8, 1)
        offset = torch.zeros_like(weight.scale) if weight.zero_point is None else -weight.zero_point * weight.scale
        self.scale_and_offset = torch.stack([weight.scale.T, offset.T], dim=-1).to(dtype).contiguous()  # [K/g, N, 2]

    def held(self) -> list[Tensor]:
        return [self.packed, self.scale_and_offset]

    def rows(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), self.packed, self.group_size, self.scale_and_offset)
        return y


class VnniInt8Linear(Linear):
    """`onednn.qlinear_pointwise`: u8 activations around a zero point, integer sums."""

    def __init__(self, weight: Int8, dtype: torch.dtype) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, torch.device("cpu"), "cpu")
        self.packed = torch.ops.onednn.qlinear_prepack(weight.codes, None)
        self.scale = weight.scale.reshape(-1).clone()
        self.zero_point = torch.zeros(n, dtype=torch.int64)

    def held(self) -> list[Tensor]:
        return [self.packed, self.scale, self.zero_point]

    @property
    def nbytes(self) -> int:
        # The packed weight is opaque to torch: one byte per code.
        return self.in_features * self.out_features + self.scale.numel() * 4 + self.zero_point.numel() * 8

    def rows(self, x: Tensor) -> Tensor:
        # `quantize_rows` in few operations: with one row each costs as much as some 100 KB of the weight.
        row_scale = torch.linalg.vector_norm(x, ord=math.inf, dim=-1, keepdim=True, dtype=torch.float32).div_(127)
        row_scale.masked_fill_(row_scale == 0, 1)
        codes = torch.div(x, row_scale).round_().add_(_ZERO_POINT).to(torch.uint8)
        return _qlinear(codes, self.packed, self.scale, self.zero_point).mul_(row_scale).to(self.dtype)


class Int8Linear(Linear):
    """Without VNNI: int8 codes as they are, multiplied in bf16 for a few rows and in float32 blocks for more."""

    def __init__(self, weight: Int8, dtype: torch.dtype) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, torch.device("cpu"), "cpu")
        self.codes = weight.codes.clone()
        self.scale = weight.scale.T.contiguous()
        self._ones = torch.ones(n, dtype=torch.bfloat16)
        # _weight_int8pack_mm reads past the rows of a K that is no multiple of 16, and rounds the sums to bf16.
        self._packed_rows = _INT8PACK_ROWS if dtype == torch.bfloat16 and k % 16 == 0 else 0

    def held(self) -> list[Tensor]:
        return [self.codes, self.scale, self._ones]

    def rows(self, x: Tensor) -> Tensor:
        codes, row_scale = quantize_rows(x)
        if x.shape[0] < self._packed_rows:
            y = torch.ops.aten._weight_int8pack_mm(codes.to(torch.bfloat16), self.codes, self._ones).float()
        else:
            y = blocked_matmul(codes.float(), self.out_features, lambda start, stop: self.codes[start:stop].float())
        return y.mul_(row_scale).mul_(self.scale).to(self.dtype)


def linear(weight: Weight, dtype: torch.dtype, device: torch.device) -> Linear:
    if isinstance(weight, Int8):
        return VnniInt8Linear(weight, dtype) if qlinear_is_exact() else Int8Linear(weight, dtype)
    if isinstance(weight, Fp4):
        return Fp4Linear(weight, dtype)
    assert isinstance(weight, Int4), kind(weight)
    return Int4Linear(weight, dtype)


def refused(weight_kind: str, dtype: torch.dtype | None, shape: tuple[int, int] | None) -> str | None:
    """Why a weight cannot be laid out, None where it can; dtype and shape are None when asked in general."""
    if weight_kind == "fp4":
        return why_no_library()
    if weight_kind == "int4":
        if dtype is not None and dtype not in _INT4PACK_DTYPES:
            return f"torch's int4 operator is fast in {' and '.join(str(one)[6:] for one in _INT4PACK_DTYPES)} only here"
        if shape is not None and shape[0] % 16:
            return f"torch's int4 operator needs output features in multiples of 16, not {shape[0]}"
    return None


@functools.cache
def qlinear_is_exact() -> bool:
    """Whether oneDNN sums u8 x s8 products without saturating: it adds pairs in 16 bits on processors without VNNI."""
    codes = torch.full((16, 64), 127, dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(codes, None)
    y = _qlinear(torch.full((1, 64), 255, dtype=torch.uint8), packed, torch.ones(16), torch.zeros(16, dtype=torch.int64))
    return bool((y == 127 * 127 * 64).all())


def _qlinear(x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, _ZERO_POINT, packed, scale, zero_point, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y
