# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Kernels with a program per row: quantization of activations, norms, activation, and the sum over
a token's experts."""

import triton
import triton.language as tl

from quantkit_kernels.triton.multiply_kernel import gated
from quantkit_kernels.triton.weights_kernel import INTERPRETED, dot, rounded, wait_for_input


@triton.jit
def quantize_rows(
    x,
    codes,
    scale,
    k,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Symmetric int8: scale = max|x| / 127, 1 for a row of zeros; codes are rounded half to even. WHOLE: the row is BLOCK numbers and up to
    REST more, read once; a longer one is read twice, in blocks."""
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    x += row * k
    codes += row * k
    at = tl.arange(0, BLOCK)
    if WHOLE:
        some = tl.load(x + at).to(tl.float32)
        largest = tl.max(tl.abs(some), 0)
        if REST > 0:
            beyond = BLOCK + tl.arange(0, REST)
            more = tl.load(x + beyond, mask=beyond < k, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(more), 0))
        step = step_of(largest)
        tl.store(codes + at, codes_of(some, step))
        if REST > 0:
            tl.store(codes + beyond, codes_of(more, step), mask=beyond < k)
    else:
        magnitude = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, k, BLOCK):
            some = tl.load(x + start + at, mask=start + at < k, other=0.0).to(tl.float32)
            magnitude = tl.maximum(magnitude, tl.abs(some))
        step = step_of(tl.max(magnitude, 0))
        for start in range(0, k, BLOCK):
            some = tl.load(x + start + at, mask=start + at < k, other=0.0).to(tl.float32)
            tl.store(codes + start + at, codes_of(some, step), mask=start + at < k)
    tl.store(scale + row, step)


@triton.jit
def step_of(largest):
    """The value of code 1, in a row of numbers up to `largest`."""
    step = tl.div_rn(largest, 127.0)
    return tl.where(step == 0.0, 1.0, step)


@triton.jit
def codes_of(values, step):
    """float32 values, of 127 steps at most, over `step`, to the nearest whole number, ties to even:
    int8.

    The quotient is corrected by its remainder, which rounds it as a division does (Markstein, IBM
    J. Res. Dev. 34, 1990) in a third of the instructions. Where 1 / step is no normal number, and
    in the interpreter, which rounds between product and sum, it is a division.
    """
    if not INTERPRETED and step > 2.0**-100:
        inverse = tl.div_rn(1.0, step)
        quotient = values * inverse
        quotient = tl.fma(tl.fma(-quotient, step, values), inverse, quotient)
    else:
        quotient = tl.div_rn(values, step)
    # 1.5 * 2^23 leaves no room for a fraction, and the number in the lowest bits.
    return (quotient + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def add_rms_norm(
    x,
    residual,
    weight,
    normed,
    total,
    h,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """normed = weight * t / sqrt(mean(t^2) + eps) with t = x + residual rounded to x's type, which
    is stored in `total`; else t = x."""
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64) * h
    at = tl.arange(0, BLOCK)
    inside = at < h
    some = tl.load(x + row + at, mask=inside, other=0.0)
    if ADD:
        some = some.to(tl.float32) + tl.load(residual + row + at, mask=inside, other=0.0).to(
            tl.float32
        )
        some = rounded(some, x.dtype.element_ty)
        tl.store(total + row + at, some, mask=inside)
    wide = some.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / h + eps)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + at, rounded(wide * factor * gain, normed.dtype.element_ty), mask=inside)


@triton.jit
def gate_and_mul(
    x, y, width, BLOCK: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    SHIFT: tl.constexpr, BOUND: tl.constexpr, UP_BOUND: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """y [rows, width] = `gated` of x = [gate, up]."""
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        y + row * width + at,
        rounded(gated(gate, up, ALPHA, LIMIT, SHIFT, BOUND, UP_BOUND), y.dtype.element_ty),
        mask=inside,
    )


@triton.jit(do_not_specialize=["blocks"])
def gate_and_rotate(
    x, y, width, blocks, scale, BLOCK: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, BOUND: tl.constexpr,
    UP_BOUND: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """y [rows, width] = `gated` of x = [gate, up], each of its `blocks` of BLOCK values times the
    Hadamard matrix of that size, times `scale`. A value is the sum of PARTS bfloat16 numbers to what
    y's type holds, and the matrix's are 1 and -1: no other rounding before the sum in float32."""
    wait_for_input(PDL)
    some = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (some < blocks)[:, None]
    column = tl.arange(0, BLOCK)
    begin = some * BLOCK
    at = (begin // width * 2 * width + begin % width)[:, None] + column[None, :]
    gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + at + width, mask=inside, other=0.0).to(tl.float32)
    rest = gated(gate, up, ALPHA, LIMIT, SHIFT, BOUND, UP_BOUND)
    common = column[:, None] & column[None, :]  # Sylvester's: -1 where an odd number of bits are
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    signs = (1 - 2 * (common & 1)).to(tl.float32).to(tl.bfloat16)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for _ in tl.static_range(PARTS):
        near = rounded(rest, tl.bfloat16)
        acc = dot(near, signs, acc)
        rest -= near.to(tl.float32)
    to = y + begin[:, None] + column[None, :]
    tl.store(to, rounded(acc * scale, y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["groups"])
def mx_rounded(
    x, y, groups, MANTISSA: tl.constexpr, LEAST: tl.constexpr, ABOVE: tl.constexpr,
    SATURATES: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """y = x rounded to floats of MANTISSA bits and a least exponent LEAST under a power of two for
    each group of SIZE values, which gives the largest an exponent of ABOVE. The steps of a value are
    taken of it as it is: a power of two changes no bit of the quotient. SATURATES: at 1.5 times the
    largest power."""
    wait_for_input(PDL)
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (group < groups)[:, None]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    bits = tl.abs(wide).to(tl.int32, bitcast=True)
    largest = tl.max(bits, 1)
    # From 1.75 of its power on, a group's largest value is of the next.
    power = (largest >> 23) + ((largest & 0x7FFFFF) >= 0x600000).to(tl.int32) - ABOVE
    power = tl.minimum(tl.maximum(power, 1), 254)
    exponent = tl.maximum(bits >> 23, power[:, None] + LEAST) - MANTISSA
    step = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    whole = tl.div_rn(wide, step) + 12582912.0  # 1.5 * 2^23: no room for a fraction
    near = (whole - 12582912.0) * step
    if SATURATES:
        top = ((power + ABOVE) << 23).to(tl.float32, bitcast=True) * 1.5
        near = tl.minimum(tl.maximum(near, -top[:, None]), top[:, None])
    tl.store(y + at, rounded(near, y.dtype.element_ty), mask=inside)


@triton.jit
def sum_pairs(weighed, y, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y[t] = the sum in float32 of rows t * TOP_K .. t * TOP_K + TOP_K - 1 of weighed."""
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        total += tl.load(weighed + (row * TOP_K + i) * width + at, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(y + row * width + at, rounded(total, y.dtype.element_ty), mask=inside)
