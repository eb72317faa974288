# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Codes of a cache in 8 bits, int8 or FP8 (E4M3), in whole-number arithmetic: not every card
converts FP8. A kernel sees both as bytes."""

import triton
import triton.language as tl

INT8_CODES, FP8_CODES = tl.constexpr(1), tl.constexpr(2)
"""CODES of a kernel; 0: the cache has 16 bits."""
LEAST_SCALE = tl.constexpr(1e-10)


@triton.jit
def scale_of(largest, CODES: tl.constexpr):
    """The value of code 1, for numbers up to `largest`."""
    LARGEST: tl.constexpr = 127.0 if CODES == INT8_CODES else 448.0
    return tl.maximum(tl.div_rn(largest, LARGEST), LEAST_SCALE)


@triton.jit
def encoded(values, scale, CODES: tl.constexpr):
    """float32 values over `scale`, to the nearest code, ties to even: int8."""
    return nearest_code(tl.div_rn(values, scale), CODES)


@triton.jit
def nearest_code(some, CODES: tl.constexpr):
    """As `encoded`, of what is divided already."""
    if CODES == INT8_CODES:
        return tl.minimum(tl.maximum(nearest(some), -127.0), 127.0).to(tl.int8)
    else:
        some = tl.minimum(tl.maximum(some, -448.0), 448.0)
        bits = some.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # 3 of 23 bits of mantissa stay, and the exponent counts from 7 instead of 127.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        small = nearest(tl.abs(some) * 512.0).to(tl.int32)  # below 2^-6 a step is 2^-9
        code = tl.where(magnitude < 0x3C800000, small, normal)
        return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def nearest(values):
    """Of numbers below 2^22 the nearest whole one, ties to even: adding 1.5 * 2^23 leaves no room
    for a fraction."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def decoded(codes, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """Values of int8 bytes, before their scale: exact in 16 bits."""
    if CODES == INT8_CODES:
        return codes.to(tl.float32).to(DTYPE)
    else:
        wide = codes.to(tl.int16)
        # The bits where float16 has them, which is 2^-8 of the number.
        bits = ((wide & 0x7F) << 7) | (wide & -32768)
        return (bits.to(tl.float16, bitcast=True) * 256.0).to(DTYPE)
