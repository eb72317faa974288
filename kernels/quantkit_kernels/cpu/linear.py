"""Int4 linears, and the choice among all."""

import torch
from torch import Tensor

from quantkit_kernels.blocks import blocked_matmul
from quantkit_kernels.cpu import int4, int8
from quantkit_kernels.cpu.build import why_no_library
from quantkit_kernels.cpu.fp4 import Fp4Linear
from quantkit_kernels.cpu.units import has_unit
from quantkit_kernels.cpu.w8a16 import W8A16Linear
from quantkit_kernels.linear import Linear
from quantkit_kernels.weights import W8A16, Fp4, Int4, Int8, Weight, group_size, kind, shape

# Of torch's operator, where the C++ cannot be had. Others are multiplied number by number: float16
# is 15 times as slow as bfloat16 on AVX2.
_INT4PACK_DTYPES = (
    (torch.bfloat16, torch.float16) if torch.cpu._is_avx512_supported() else (torch.bfloat16,)
)

_EXPANDED_ROWS = 32 if torch.cpu._is_amx_tile_supported() else 64
"""From which on torch's matmul over expanded blocks is faster (9728 x 896, a Xeon with AMX, one
core, C++ / expanded, ms: M=16 6.0/9.5, M=32 12.7/9.8; AVX-512 without bfloat16: 4864 x 896, M=64
about as fast). It is the end of what does not depend on threads and other rows: C++ takes 2.0 times
as long at 63 rows and 6.9 times at 1,024."""


class Int4Linear(Linear):
    """w = (q - 8) * scale + offset, q in 0..15, scale and offset rounded to bfloat16 where that is
    the compute dtype, else to float32. Few rows by int4_rows.cpp; many by torch's matmul over
    blocks of w, in the compute dtype where the processor multiplies that, else in float32."""

    def __init__(self, weight: Int4, dtype: torch.dtype) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, torch.device("cpu"), "cpu")
        self.group_size = group_size(weight)
        self.packed = int4.pack(weight.codes)
        self.sides = _sides(weight, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        self._wide = (
            torch.bfloat16 if dtype == torch.bfloat16 and has_unit(dtype) else torch.float32
        )

    def held(self) -> list[Tensor]:
        return [self.packed, self.sides]

    def rows(self, x: Tensor) -> Tensor:
        if x.shape[0] < _EXPANDED_ROWS:
            return int4.multiply(
                x.to(self.sides.dtype), self.packed, self.sides, self.group_size
            ).to(self.dtype)
        scale, offset = (side.float().contiguous() for side in self.sides.unbind(-1))

        def expanded(start: int, stop: int) -> Tensor:
            return int4.expand(self.packed, scale, offset, self.group_size, start, stop, self._wide)

        return blocked_matmul(x.to(self._wide), self.out_features, expanded, int4.BLOCK).to(
            self.dtype
        )


class TorchInt4Linear(Linear):
    """Without a compiler: `_weight_int4pack_mm_for_cpu`, the same w with scale and offset rounded
    to the compute dtype."""

    def __init__(self, weight: Int4, dtype: torch.dtype) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, torch.device("cpu"), "cpu")
        self.group_size = group_size(weight)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int() + 8, 1)
        self.sides = _sides(weight, dtype)

    def held(self) -> list[Tensor]:
        return [self.packed, self.sides]

    def rows(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self.packed, self.group_size, self.sides
        )
        return y


def _sides(weight: Int4, dtype: torch.dtype) -> Tensor:
    """Scale and offset [K/g, N, 2] of `dtype`."""
    offset = (
        torch.zeros_like(weight.scale)
        if weight.zero_point is None
        else -weight.zero_point * weight.scale
    )
    return torch.stack([weight.scale.T, offset.T], dim=-1).to(dtype).contiguous()


def linear(weight: Weight, dtype: torch.dtype, device: torch.device) -> Linear:
    if isinstance(weight, Int8):
        return int8.linear(weight, dtype)
    if isinstance(weight, W8A16):
        return W8A16Linear(weight, dtype)
    if isinstance(weight, Fp4):
        return Fp4Linear(weight, dtype)
    assert isinstance(weight, Int4), kind(weight)
    return Int4Linear(weight, dtype) if int4.can_be_had() else TorchInt4Linear(weight, dtype)


def refused(
    weight_kind: str, dtype: torch.dtype | None, shape: tuple[int, int] | None
) -> str | None:
    """Why a weight cannot be laid out, None where it can; dtype and shape are None when asked in
    general."""
    if weight_kind == "fp4":
        return why_no_library("fp4")
    if weight_kind == "int4":
        if dtype is not None and dtype not in _INT4PACK_DTYPES and not int4.can_be_had():
            return (
                "torch's int4 operator is fast in "
                f"{' and '.join(str(one)[6:] for one in _INT4PACK_DTYPES)} only here"
            )
        if shape is not None and shape[0] % 16:
            return f"torch's int4 operator needs output features in multiples of 16, not {shape[0]}"
    return None
