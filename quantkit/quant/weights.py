"""The value of one linear layer's weight W [N=out, K=in], whatever format it is stored in.

Formats unpack to one of these and pack from one of these, so that converting is unpack then pack, and kernels and
calibration know nothing of files. Integers are signed everywhere (an unsigned int4 code q with zero point z is
q - 8 with z - 8), and global FP4 scales are multipliers everywhere.

G is the number of groups along K (K / group_size); a scale per channel is G = 1.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

FP8_BLOCK = 128
FP4_GROUP = 16
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, eq=False)
class IntWeight:
    """w = (codes - zero_point) * scale, a scale per row and group of K / G input channels.

    codes int8 [N, K] in -8..7 or -127..127; scale float32 [N, G], already rounded to what the format stores;
    zero_point int8 [N, G], or None for a symmetric grid.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bits: int

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        assert self.bits in (4, 8), f"{self.bits} bits"
        assert self.codes.dtype == torch.int8, f"codes are {self.codes.dtype}"
        assert self.scale.dtype == torch.float32, f"scale is {self.scale.dtype}"
        assert self.scale.shape[0] == rows, f"scale {tuple(self.scale.shape)} for {rows} rows"
        assert columns % self.scale.shape[1] == 0, f"{self.scale.shape[1]} groups do not divide {columns} columns"
        if self.zero_point is not None:
            assert self.zero_point.dtype == torch.int8, f"zero_point is {self.zero_point.dtype}"
            assert self.zero_point.shape == self.scale.shape, f"zero_point {tuple(self.zero_point.shape)}, scale {tuple(self.scale.shape)}"

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]


@dataclass(frozen=True, eq=False)
class Fp4Weight:
    """w = e2m1[codes] * scale * global_scale, a scale per row and group of 16 input channels (NVFP4).

    codes uint8 [N, K] in 0..15, bit 3 the sign; scale float8_e4m3fn [N, K / 16]; global_scale float32 [], a multiplier.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        assert self.codes.dtype == torch.uint8, f"codes are {self.codes.dtype}"
        assert self.scale.dtype == torch.float8_e4m3fn, f"scale is {self.scale.dtype}"
        assert self.scale.shape == (rows, columns // FP4_GROUP), f"scale {tuple(self.scale.shape)} for codes {tuple(self.codes.shape)}"
        assert columns % FP4_GROUP == 0, f"groups of {FP4_GROUP} do not divide {columns} columns"
        assert self.global_scale.shape == (), f"global_scale has shape {tuple(self.global_scale.shape)}"
        assert self.global_scale.dtype == torch.float32, f"global_scale is {self.global_scale.dtype}"

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group_size(self) -> int:
        return FP4_GROUP


@dataclass(frozen=True, eq=False)
class Fp8BlockWeight:
    """w = codes * scale, a scale per block of 128 x 128; blocks at the edges may be partial (DeepSeek-V3).

    codes float8_e4m3fn [N, K]; scale float32 [ceil(N / 128), ceil(K / 128)], a multiplier.
    """

    codes: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        assert self.codes.dtype == torch.float8_e4m3fn, f"codes are {self.codes.dtype}"
        assert self.scale.dtype == torch.float32, f"scale is {self.scale.dtype}"
        blocks = tuple(-(-size // FP8_BLOCK) for size in self.codes.shape)
        assert tuple(self.scale.shape) == blocks, f"scale {tuple(self.scale.shape)} for codes {tuple(self.codes.shape)}"

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


Weight: TypeAlias = Tensor | IntWeight | Fp4Weight | Fp8BlockWeight


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dense value [N, K] in `dtype`, computed in float32 and rounded once. A plain tensor is only cast."""
    match weight:
        case IntWeight():
            return _dequantize_int(weight).to(dtype)
        case Fp4Weight():
            return _dequantize_fp4(weight).to(dtype)
        case Fp8BlockWeight():
            return _dequantize_fp8_block(weight).to(dtype)
        case _:
            return weight.to(dtype)


def dividing_powers(weight: IntWeight | Fp4Weight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The least and the largest power of two [N] that each row can be divided by with its scales normal numbers of `dtype`, which stores
    them (e4m3 for FP4); 1 always can."""
    scale, stored = weight.scale.float(), torch.finfo(weight.scale.dtype if isinstance(weight, Fp4Weight) else dtype)
    least = (scale.amax(1) / stored.max).log2().ceil().clamp(max=0).exp2()
    largest = (scale.amin(1) / stored.smallest_normal).log2().floor().clamp(min=0).exp2()
    return least, largest


def divide_rows(weight: IntWeight | Fp4Weight, divisor: Tensor, dtype: torch.dtype) -> IntWeight | Fp4Weight:
    """The weight with row n divided by divisor[n]: the same codes with other scales, rounded to `dtype`, which stores them (e4m3 for FP4).
    Exact for a power of two within `dividing_powers`."""
    scale = weight.scale.float() / divisor[:, None]
    if isinstance(weight, Fp4Weight):
        return replace(weight, scale=scale.to(weight.scale.dtype))
    return replace(weight, scale=scale.to(dtype).float())


def decode_e2m1(codes: Tensor) -> Tensor:
    """Values float32 of E2M1 codes uint8 0..15."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _dequantize_int(weight: IntWeight) -> Tensor:
    values = weight.codes.float().unflatten(1, (-1, weight.group_size))
    if weight.zero_point is not None:
        values -= weight.zero_point.unsqueeze(-1)
    return values.mul_(weight.scale.unsqueeze(-1)).flatten(1)


def _dequantize_fp4(weight: Fp4Weight) -> Tensor:
    values = decode_e2m1(weight.codes).unflatten(1, (-1, FP4_GROUP))
    return values.mul_((weight.scale.float() * weight.global_scale).unsqueeze(-1)).flatten(1)


def _dequantize_fp8_block(weight: Fp8BlockWeight) -> Tensor:
    values = weight.codes.float()
    rows, columns = values.shape
    row_scale = weight.scale.repeat_interleave(FP8_BLOCK, dim=0)[:rows]  # [N, column blocks]
    whole = columns // FP8_BLOCK
    values[:, : whole * FP8_BLOCK].unflatten(1, (whole, FP8_BLOCK)).mul_(row_scale[:, :whole, None])
    if columns % FP8_BLOCK:
        values[:, whole * FP8_BLOCK :].mul_(row_scale[:, whole:])
    return values
