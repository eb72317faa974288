"""The value of one linear layer's weight W [N=out, K=in], whatever format it is stored in.

Formats unpack to one of these and pack from one of these, so that converting is unpack then pack,
and kernels and calibration know nothing of files. Integers are signed everywhere (an unsigned int4
code q with zero point z is q - 8 with z - 8), and global FP4 scales are multipliers everywhere.

G is the number of groups along K (K / group_size); a scale per channel is G = 1.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

FP8_BLOCK = 128
FP4_GROUP = 16
MX_GROUP = 32
E2M1_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)


@dataclass(frozen=True, eq=False)
class IntWeight:
    """w = (codes - zero_point) * scale, a scale per row and group of K / G input channels.

    codes int8 [N, K] in -8..7 or -127..127; scale float32 [N, G], already rounded to what the
    format stores; zero_point int8 [N, G], or None for a symmetric grid.
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
        assert columns % self.scale.shape[1] == 0, (
            f"{self.scale.shape[1]} groups do not divide {columns} columns"
        )
        if self.zero_point is not None:
            assert self.zero_point.dtype == torch.int8, f"zero_point is {self.zero_point.dtype}"
            assert self.zero_point.shape == self.scale.shape, (
                f"zero_point {tuple(self.zero_point.shape)}, scale {tuple(self.scale.shape)}"
            )

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]


@dataclass(frozen=True, eq=False)
class Fp4Weight:
    """w = e2m1[codes] * scale * global_scale, a scale per row and group of 16 input channels
    (NVFP4).

    codes uint8 [N, K] in 0..15, bit 3 the sign; scale float8_e4m3fn [N, K / 16]; global_scale
    float32 [], a multiplier.
    input_divisor: where inputs are rounded to NVFP4 too, what the scales of their groups are
    divided by, float32 []; None where they are not. It is a divisor because rounding begins with it
    (`quantkit_kernels.round_to_nvfp4`).
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor
    input_divisor: Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        assert self.codes.dtype == torch.uint8, f"codes are {self.codes.dtype}"
        assert self.scale.dtype == torch.float8_e4m3fn, f"scale is {self.scale.dtype}"
        assert self.scale.shape == (rows, columns // FP4_GROUP), (
            f"scale {tuple(self.scale.shape)} for codes {tuple(self.codes.shape)}"
        )
        assert columns % FP4_GROUP == 0, f"groups of {FP4_GROUP} do not divide {columns} columns"
        assert self.global_scale.shape == (), (
            f"global_scale has shape {tuple(self.global_scale.shape)}"
        )
        assert self.global_scale.dtype == torch.float32, (
            f"global_scale is {self.global_scale.dtype}"
        )
        if self.input_divisor is not None:
            assert self.input_divisor.shape == (), (
                f"input_divisor has shape {tuple(self.input_divisor.shape)}"
            )
            assert self.input_divisor.dtype == torch.float32, (
                f"input_divisor is {self.input_divisor.dtype}"
            )

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group_size(self) -> int:
        return FP4_GROUP


@dataclass(frozen=True, eq=False)
class Mxfp4Weight:
    """w = e2m1[codes] * 2 ** (exponent - 127), an exponent per row and group of 32 input channels
    (OCP MX).

    codes uint8 [N, K] in 0..15, bit 3 the sign; exponent uint8 [N, K / 32], the bits of
    float8_e8m0fnu, 255 standing for NaN.
    """

    codes: Tensor
    exponent: Tensor

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        assert self.codes.dtype == torch.uint8, f"codes are {self.codes.dtype}"
        assert self.exponent.dtype == torch.uint8, f"exponent is {self.exponent.dtype}"
        assert columns % MX_GROUP == 0, f"groups of {MX_GROUP} do not divide {columns} columns"
        assert self.exponent.shape == (rows, columns // MX_GROUP), (
            f"exponent {tuple(self.exponent.shape)} for {tuple(self.codes.shape)}"
        )

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group_size(self) -> int:
        return MX_GROUP


@dataclass(frozen=True, eq=False)
class Fp8BlockWeight:
    """w = codes * scale, a scale per block of rows x columns; blocks at the edges may be partial.

    DeepSeek-V3 has blocks of 128 x 128, MXFP8 of 1 x 32; a scale per channel is a block of 1 x K,
    one for the tensor N x K. codes float8_e4m3fn [N, K]; scale float32 [ceil(N / rows), ceil(K /
    columns)], a multiplier.
    """

    codes: Tensor
    scale: Tensor
    block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)

    def __post_init__(self) -> None:
        assert self.codes.dtype == torch.float8_e4m3fn, f"codes are {self.codes.dtype}"
        assert self.scale.dtype == torch.float32, f"scale is {self.scale.dtype}"
        blocks = tuple(-(-size // side) for size, side in zip(self.codes.shape, self.block))
        assert tuple(self.scale.shape) == blocks, (
            f"scale {tuple(self.scale.shape)} for codes {tuple(self.codes.shape)}"
        )

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


Weight: TypeAlias = Tensor | IntWeight | Fp4Weight | Mxfp4Weight | Fp8BlockWeight

RoundedWeight: TypeAlias = IntWeight | Fp4Weight | Mxfp4Weight
"""What quantkit rounds to."""


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dense value [N, K] in `dtype`, computed in float32 and rounded once. A plain tensor is
    only cast."""
    match weight:
        case IntWeight():
            return _dequantize_int(weight).to(dtype)
        case Fp4Weight():
            return _dequantize_fp4(weight).to(dtype)
        case Mxfp4Weight():
            return _dequantize_mxfp4(weight).to(dtype)
        case Fp8BlockWeight():
            return _dequantize_fp8_block(weight).to(dtype)
        case _:
            return weight.to(dtype)


def dividing_powers(weight: RoundedWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The least and the largest power of two [N] that each row can be divided by with its scales
    normal numbers of `dtype`, which stores them (e4m3 for FP4), or exponents of MXFP4 from 1 to
    254; 1 always can."""
    if isinstance(weight, Mxfp4Weight):
        exponent = weight.exponent.float()
        return (exponent.amax(1) - 254).clamp(max=0).exp2(), (exponent.amin(1) - 1).clamp(
            0, 126
        ).exp2()
    scale, stored = (
        weight.scale.float(),
        torch.finfo(weight.scale.dtype if isinstance(weight, Fp4Weight) else dtype),
    )
    least = (scale.amax(1) / stored.max).log2().ceil().clamp(max=0).exp2()
    largest = (scale.amin(1) / stored.smallest_normal).log2().floor().clamp(min=0).exp2()
    return least, largest


def divide_rows(weight: RoundedWeight, divisor: Tensor, dtype: torch.dtype) -> RoundedWeight:
    """The weight with row n divided by divisor[n]: the same codes with other scales, rounded to
    `dtype`, which stores them (e4m3 for FP4, a power of two for MXFP4). Exact for a power of two
    within `dividing_powers`."""
    if isinstance(weight, Mxfp4Weight):
        exponent = weight.exponent.float() - divisor.log2().round()[:, None]
        return replace(weight, exponent=exponent.clamp(1, 254).to(torch.uint8))
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


def decode_e8m0(exponent: Tensor) -> Tensor:
    """Powers of two float32 of the bits of float8_e8m0fnu, uint8 or of that dtype: 2 ** (bits -
    127), NaN for 255."""
    return exponent.view(torch.float8_e8m0fnu).float()


def _dequantize_mxfp4(weight: Mxfp4Weight) -> Tensor:
    values = decode_e2m1(weight.codes).unflatten(1, (-1, MX_GROUP))
    return values.mul_(decode_e8m0(weight.exponent).unsqueeze(-1)).flatten(1)


def _dequantize_fp8_block(weight: Fp8BlockWeight) -> Tensor:
    values = weight.codes.float()
    (rows, columns), (tall, wide) = values.shape, weight.block
    row_scale = weight.scale.repeat_interleave(tall, dim=0)[:rows]  # [N, column blocks]
    whole = columns // wide
    values[:, : whole * wide].unflatten(1, (whole, wide)).mul_(row_scale[:, :whole, None])
    if columns % wide:
        values[:, whole * wide :].mul_(row_scale[:, whole:])
    return values
