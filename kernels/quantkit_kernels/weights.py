"""The weights that the operators take: plain tensors, one value per code, independent of any file
format.

A weight is W[N, K]: N output features, K input features. `prepare` turns one into the layout of a
backend, once, at load.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.arguments import FLOAT_DTYPES, check_tensor, require

INT4_GROUP_SIZES = (32, 64, 128)
W8A16_GROUP_SIZES = (32, 64, 128)
"""And multiples of the largest."""
FP4_GROUP_SIZE = 16
MX_GROUP_SIZE = 32


class Int4(NamedTuple):
    """w = (codes - zero_point) * scale, one scale and zero point per group of K/scale.shape[1]
    input features.

    codes int8 [N, K] in -8..7; scale float32 [N, K/g], g of 32, 64 or 128; zero_point int8 [N, K/g]
    in -8..7, or None.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None


class Int4Int8(Int4):
    """W4A8 in groups: operators round their inputs to int8, a step a token (`quantize_rows`),
    before the product. Symmetric."""


class Int8(NamedTuple):
    """w = codes * scale, one scale per output feature; activations are quantized to int8 per token
    inside the operator.

    codes int8 [N, K] in -127..127; scale float32 [N, 1].
    """

    codes: Tensor
    scale: Tensor


class W8A16(NamedTuple):
    """Weight-only int8: w = codes * scale, one scale per group of K/scale.shape[1] input features;
    activations keep their dtype.

    codes int8 [N, K] in -127..127; scale float32 [N, G]: groups of 32, 64 or multiples of 128, or
    one group.
    """

    codes: Tensor
    scale: Tensor


class NarrowInt8(Int8):
    """Codes are of four bits, -8..7, as W4A8 has them: a backend may hold them so, and every one
    may hold a byte a code."""


class Fp4(NamedTuple):
    """w = e2m1[codes] * scale * global_scale (NVFP4), one scale per 16 input features.

    codes uint8 [N, K] in 0..15, bit 3 the sign; scale float8_e4m3fn [N, K/16]; global_scale
    float32, a multiplier: a scalar, or [N] where tensors with different global scales were stacked.
    input_divisor float32 []: operators round their inputs to NVFP4 under it before the product
    (W4A4, `round_to_nvfp4`); None: they do not.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor
    input_divisor: Tensor | None = None


class Dense(NamedTuple):
    """A weight that is not quantized: float [N, K]."""

    weight: Tensor


class MxInputs:
    """Weights whose operators round their inputs to MXFP4 or MXFP8 (`round_to_mx`) before the
    product. input_bits: of such an input, 4 or 8."""

    input_bits: int


class Fp4Mx4(MxInputs, Fp4):
    """MXFP4 W4A4, of a weight that is NVFP4's to the value."""

    input_bits = 4


class DenseMx4(MxInputs, Dense):
    """MXFP4 W4A4, decoded."""

    input_bits = 4


class DenseMx8(MxInputs, Dense):
    """MXFP8 W8A8, decoded."""

    input_bits = 8


Weight = Int4 | Int8 | W8A16 | Fp4 | Dense


def kind(weight: Weight) -> str:
    """The name of a weight's grid in operator names: int4, int8, w8a16, fp4 or dense."""
    return (
        "int8"
        if isinstance(weight, Int8)
        else "int4"
        if isinstance(weight, Int4)
        else "fp4"
        if isinstance(weight, Fp4)
        else "dense"
        if isinstance(weight, Dense)
        else "w8a16"
    )


def shape(weight: Weight) -> tuple[int, int]:
    """(N, K), the output and input features."""
    return weight[0].shape[0], weight[0].shape[1]


def group_size(weight: Int4 | W8A16) -> int:
    return weight.codes.shape[1] // weight.scale.shape[1]


def check_weight(weight: Weight) -> None:
    """Refuse a weight whose tensors do not fit each other. Values are not read: a device is not
    made to wait."""
    require(
        weight[0].dim() == 2,
        f"{kind(weight)} weight: shape {list(weight[0].shape)}, expected [N, K]",
    )
    n, k = shape(weight)
    require(
        not isinstance(weight, MxInputs) or k % MX_GROUP_SIZE == 0,
        f"{kind(weight)} weight: {k} input features are not a multiple of {MX_GROUP_SIZE}",
    )
    if isinstance(weight, Dense):
        check_tensor("weight", weight.weight, (n, k), FLOAT_DTYPES)
    elif isinstance(weight, Int8):
        check_tensor("codes", weight.codes, (n, k), (torch.int8,))
        check_tensor("scale", weight.scale, (n, 1), (torch.float32,))
    elif isinstance(weight, W8A16):
        check_tensor("codes", weight.codes, (n, k), (torch.int8,))
        check_tensor("scale", weight.scale, (n, None), (torch.float32,))
        groups = weight.scale.shape[1]
        require(
            groups > 0 and k % groups == 0 and w8a16_groups(k, k // groups),
            f"scale: {groups} groups for {k} input features, expected one group, or groups of "
            f"{', '.join(map(str, W8A16_GROUP_SIZES))} or a multiple",
        )
    elif isinstance(weight, Int4):
        check_tensor("codes", weight.codes, (n, k), (torch.int8,))
        check_tensor("scale", weight.scale, (n, None), (torch.float32,))
        groups = weight.scale.shape[1]
        fits = groups > 0 and k % groups == 0 and k // groups in INT4_GROUP_SIZES
        require(
            fits,
            f"scale: {groups} groups for {k} input features, expected groups of "
            f"{', '.join(map(str, INT4_GROUP_SIZES))}",
        )
        if weight.zero_point is not None:
            check_tensor("zero_point", weight.zero_point, (n, groups), (torch.int8,))
    else:
        check_tensor("codes", weight.codes, (n, k), (torch.uint8,))
        require(
            k % FP4_GROUP_SIZE == 0,
            f"codes: {k} input features are not a multiple of {FP4_GROUP_SIZE}",
        )
        check_tensor("scale", weight.scale, (n, k // FP4_GROUP_SIZE), (torch.float8_e4m3fn,))
        require(
            weight.global_scale.dtype == torch.float32,
            f"global_scale: dtype {weight.global_scale.dtype}, expected torch.float32",
        )
        fits = tuple(weight.global_scale.shape) in ((), (n,))
        require(
            fits, f"global_scale: shape {list(weight.global_scale.shape)}, expected [] or [{n}]"
        )
        if weight.input_divisor is not None:
            check_tensor("input_divisor", weight.input_divisor, (), (torch.float32,))


def w8a16_groups(k: int, size: int) -> bool:
    """Whether weight-only int8 of k input features may have groups of this size."""
    return size in (k, *W8A16_GROUP_SIZES) or size % W8A16_GROUP_SIZES[-1] == 0


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """W[N, K] as numbers. The arithmetic is in `dtype`, so float64 gives the exact values the codes
    represent."""
    if isinstance(weight, Dense):
        return weight.weight.to(dtype)
    if isinstance(weight, Int8):
        return weight.codes.to(dtype) * weight.scale.to(dtype)
    n, k = shape(weight)
    if isinstance(weight, Int4 | W8A16):
        codes = weight.codes.to(dtype).view(n, weight.scale.shape[1], -1)
        if isinstance(weight, Int4) and weight.zero_point is not None:
            codes = codes - weight.zero_point.to(dtype).unsqueeze(-1)
        return (codes * weight.scale.to(dtype).unsqueeze(-1)).view(n, k)
    values = decode_e2m1(weight.codes).to(dtype)
    scale = weight.scale.to(dtype) * weight.global_scale.to(dtype).reshape(-1, 1)
    return (values.view(n, -1, FP4_GROUP_SIZE) * scale.unsqueeze(-1)).view(n, k)


def decode_e2m1(codes: Tensor) -> Tensor:
    """E2M1 codes (uint8, 0..15: sign, two exponent bits, one mantissa bit) as float16: 0, 0.5, 1,
    1.5, 2, 3, 4, 6 and their negatives.

    The bits are put where float16 has its sign, low exponent bits and first mantissa bit, which
    gives the value times 2^-14, subnormal included, and one multiplication corrects the exponent.
    Several times faster than looking each code up.
    """
    wide = codes.to(torch.int16)
    bits = ((wide & 7) << 9) | ((wide & 8) << 12)
    return bits.view(torch.float16) * 16384.0


def rows(weight: Weight, start: int, stop: int) -> Weight:
    """The output features start..stop of a weight, without copying."""
    if isinstance(weight, Dense):
        return type(weight)(weight.weight[start:stop])
    if isinstance(weight, Int8 | W8A16):
        return type(weight)(weight.codes[start:stop], weight.scale[start:stop])
    if isinstance(weight, Int4):
        zero_point = None if weight.zero_point is None else weight.zero_point[start:stop]
        return type(weight)(weight.codes[start:stop], weight.scale[start:stop], zero_point)
    global_scale = (
        weight.global_scale if weight.global_scale.dim() == 0 else weight.global_scale[start:stop]
    )
    return type(weight)(
        weight.codes[start:stop], weight.scale[start:stop], global_scale, weight.input_divisor
    )


def can_stack(first: Weight, second: Weight) -> bool:
    """Whether both can be rows of one weight: the same grid, group size and zero points."""
    if type(first) is not type(second) or first[0].shape[1] != second[0].shape[1]:
        return False
    if isinstance(first, W8A16) and isinstance(second, W8A16):
        return first.scale.shape[1] == second.scale.shape[1]
    if isinstance(first, Int4) and isinstance(second, Int4):
        return first.scale.shape[1] == second.scale.shape[1] and (first.zero_point is None) == (
            second.zero_point is None
        )
    if isinstance(first, Fp4) and isinstance(second, Fp4):
        return same_inputs(first, second)
    return True


def stack(first: Weight, second: Weight) -> Weight:
    """[first; second] along the output features, as gate and up are run by one operator. Both must
    be on one grid."""
    alike = kind(first) == kind(second) and shape(first)[1] == shape(second)[1]
    require(alike, f"cannot stack {kind(second)} {shape(second)} on {kind(first)} {shape(first)}")
    require(
        isinstance(first, Int8) or type(first) is type(second),
        f"cannot stack {kind(first)} weights whose inputs are rounded differently",
    )
    if isinstance(first, Int4) and isinstance(second, Int4):
        same = group_size(first) == group_size(second) and (first.zero_point is None) == (
            second.zero_point is None
        )
        require(same, "cannot stack int4 weights that differ in group size or symmetry")
        zero_point = None
        if first.zero_point is not None and second.zero_point is not None:
            zero_point = torch.cat([first.zero_point, second.zero_point])
        return type(first)(
            torch.cat([first.codes, second.codes]),
            torch.cat([first.scale, second.scale]),
            zero_point,
        )
    if isinstance(first, Int8) and isinstance(second, Int8):
        joined = type(first) if type(first) is type(second) else Int8
        return joined(
            torch.cat([first.codes, second.codes]), torch.cat([first.scale, second.scale])
        )
    if isinstance(first, W8A16) and isinstance(second, W8A16):
        require(
            group_size(first) == group_size(second),
            "cannot stack weight-only int8 weights that differ in group size",
        )
        return W8A16(torch.cat([first.codes, second.codes]), torch.cat([first.scale, second.scale]))
    if isinstance(first, Fp4) and isinstance(second, Fp4):
        scale = torch.cat([first.scale.view(torch.uint8), second.scale.view(torch.uint8)]).view(
            torch.float8_e4m3fn
        )
        parts = [part.global_scale.expand(shape(part)[0]) for part in (first, second)]
        require(
            same_inputs(first, second),
            "cannot stack fp4 weights whose inputs are rounded differently",
        )
        return type(first)(
            torch.cat([first.codes, second.codes]), scale, torch.cat(parts), first.input_divisor
        )
    assert isinstance(first, Dense), kind(first)
    return type(first)(torch.cat([first.weight, second[0]]))


def same_inputs(first: Fp4, second: Fp4) -> bool:
    """Whether both read one input alike: as it is, or rounded under the same divisor."""
    if first.input_divisor is None or second.input_divisor is None:
        return first.input_divisor is second.input_divisor
    return torch.equal(first.input_divisor, second.input_divisor)


def to_device(weight: Weight, device: torch.device) -> Weight:
    return type(weight)._make(None if tensor is None else tensor.to(device) for tensor in weight)
