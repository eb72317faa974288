"""Int4 linears over torch's packed CPU operator, and the choice among all."""

import torch
from torch import Tensor

from quantkit_kernels.blocks import blocked_matmul
from quantkit_kernels.cpu import int4
from quantkit_kernels.cpu.build import why_no_library
from quantkit_kernels.cpu.fp4 import Fp4Linear
from quantkit_kernels.cpu.int8 import Int8Linear, VnniInt8Linear, qlinear_is_exact
from quantkit_kernels.expanded.linear import has_unit
from quantkit_kernels.linear import Linear
from quantkit_kernels.weights import Fp4, Int4, Int8, Weight, group_size, kind, shape

# Others are multiplied number by number: float16 is 15 times as slow as bfloat16 on AVX2.
_INT4PACK_DTYPES = (torch.bfloat16, torch.float16) if torch.cpu._is_avx512_supported() else (torch.bfloat16,)


_EXPANDED_ROWS = 64
"""From which on torch's matmul over expanded blocks is faster (4864 x 896, AVX-512 with bfloat16, one core)."""


class Int4Linear(Linear):
    """`_weight_int4pack_mm_for_cpu`: w = (q - 8) * scale + offset, q in 0..15, scale and offset rounded to the compute dtype. With many
    rows torch's matmul over blocks of w, in the compute dtype where the processor multiplies that, else in float32."""

    def __init__(self, weight: Int4, dtype: torch.dtype) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, torch.device("cpu"), "cpu")
        self.group_size = group_size(weight)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.to(torch.int32) + 8, 1)
        offset = torch.zeros_like(weight.scale) if weight.zero_point is None else -weight.zero_point * weight.scale
        self.scale_and_offset = torch.stack([weight.scale.T, offset.T], dim=-1).to(dtype).contiguous()  # [K/g, N, 2]
        self._wide = torch.bfloat16 if dtype == torch.bfloat16 and has_unit(dtype) else torch.float32

    def held(self) -> list[Tensor]:
        return [self.packed, self.scale_and_offset]

    def rows(self, x: Tensor) -> Tensor:
        if x.shape[0] >= _EXPANDED_ROWS and int4.packed_as_known():
            scale, offset = (side.float().contiguous() for side in self.scale_and_offset.unbind(-1))

            def expanded(start: int, stop: int) -> Tensor:
                return int4.expand(self.packed, scale, offset, self.group_size, start, stop, self._wide)

            return blocked_matmul(x.to(self._wide), self.out_features, expanded, int4.BLOCK).to(self.dtype)
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), self.packed, self.group_size, self.scale_and_offset)
        return y


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
        return why_no_library("fp4")
    if weight_kind == "int4":
        if dtype is not None and dtype not in _INT4PACK_DTYPES:
            return f"torch's int4 operator is fast in {' and '.join(str(one)[6:] for one in _INT4PACK_DTYPES)} only here"
        if shape is not None and shape[0] % 16:
            return f"torch's int4 operator needs output features in multiples of 16, not {shape[0]}"
    return None
