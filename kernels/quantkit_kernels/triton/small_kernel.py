# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""x @ W.T of one token and a small weight, with what comes before and after it: the time is that of
a launch, so one launch does it all.

A program has BN rows of the weight, whole and decoded before the token is there. Every program
norms, gates or quantizes the token for itself.
"""

import triton
import triton.language as tl

from quantkit_kernels.triton.rows_kernel import codes_of, step_of
from quantkit_kernels.triton.weights_kernel import (
    FP4,
    INT4,
    INT8,
    W8A16,
    fp4_plane,
    in_pairs_fp16,
    int4_factors,
    int4_plane,
    rounded,
    wait_for_input,
)

PLAIN, GATED, NORMED = (tl.constexpr(before) for before in range(3))


def _halves(plane):
    """Two E2M1 codes as float16 times 2^-14, from a register of two words."""
    if plane == 3:
        return (
            "{.reg .b32 a, b; shl.b32 a, $1, 1; and.b32 a, a, 0x80008000; shr.u32 b, $1, 2; "
            "lop3.b32 a, b, 0x08000800, a, 0xEA; shr.u32 b, $1, 1; "
            "lop3.b32 $0, b, 0x06000600, a, 0xEA;}"
        )
    return (
        f"{{.reg .b32 a, b; shl.b32 a, $1, {3 * plane}; shl.b32 b, a, 3; "
        "and.b32 b, b, 0x0E000E00; lop3.b32 $0, a, 0x80008000, b, 0xEA;}"
    )


FP4_HALVES = tl.constexpr([_halves(plane) for plane in range(4)])


@triton.jit
def decoded(words, first, second, PLANE: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
            DTYPE: tl.constexpr, NVIDIA: tl.constexpr):  # fmt: skip
    """A plane of 4-bit words [BN, S, C], float32, row_scale left out. first, second: scale words
    [BN, S], of FP4 shifted so that the group's scale is byte 2 PLANE."""
    if KIND == FP4:
        if NVIDIA:
            SOURCE: tl.constexpr = FP4_HALVES[PLANE]
            values = in_pairs_fp16(words, SOURCE).to(tl.float32)
        else:
            values = fp4_plane(words, PLANE, False).to(tl.float32)
        bits = (first >> (16 * PLANE)).to(tl.int32) & 255
        scale = ((bits << 20) + 0x28000000).to(tl.float32, bitcast=True)  # times 2^-31
    else:
        if GROUP == 32 and PLANE >= 2:
            less, scale = int4_factors(second, PLANE - 2, DTYPE)
        else:
            less, scale = int4_factors(first, PLANE * 32 // GROUP, DTYPE)
        values = int4_plane(words, PLANE, DTYPE, NVIDIA).to(tl.float32)
        values -= less.to(tl.float32)[:, :, None]
    return values * scale[:, :, None]


@triton.jit
def multiply_small(
    x, gain, codes, scales, row_scale, residual, out, n, rows, k, eps,
    KIND: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, BEFORE: tl.constexpr,
    ADD: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, NVIDIA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[n] = f(x)[k] @ W[n, k].T, and with ADD plus residual[n].

    BEFORE: f is silu(gate) * up of x = [gate, up], or RMSNorm with `gain`. codes: a packed weight
    of `rows` rows (layout.py), or W in 16 or 32 bits, of another KIND. COLUMNS: of a row's
    codes that lie side by side. BLOCK: a power of two, at least k.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    PLANES: tl.constexpr = 4 if KIND <= FP4 else 1
    SPANS: tl.constexpr = BLOCK // (PLANES * COLUMNS)
    PARTS: tl.constexpr = 128 // (PLANES * COLUMNS)
    PACKED: tl.constexpr = KIND <= W8A16
    own, at = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BLOCK)
    if PACKED:
        span, column = tl.arange(0, SPANS), tl.arange(0, COLUMNS)
        step, part = span // PARTS, span % PARTS
        there = (own < rows)[:, None] & (step * 128 < k)[None, :]
        if PLANES == 4:
            places = (span[None, :] * rows + own[:, None]) * COLUMNS
        else:
            places = (step[None, :] * rows + own[:, None]) * 128 + part[None, :] * COLUMNS
        words = tl.load(
            codes + places[:, :, None] + column[None, None, :], mask=there[:, :, None], other=0
        )
        factors = tl.load(row_scale + own, mask=own < rows, other=0.0)
    else:
        inside = (own < n)[:, None] & (at < k)[None, :]
        values = tl.load(codes + own[:, None] * k + at[None, :], mask=inside, other=0.0)
        values, factors = values.to(tl.float32), 1.0
    if PLANES == 4:
        HALVES: tl.constexpr = 2 if KIND == INT4 and GROUP == 32 else 1
        halves = scales + step[None, :] * HALVES * rows + own[:, None]
        first = tl.load(halves, mask=there, other=0)
        second = tl.load(halves + rows, mask=there, other=0) if HALVES == 2 else first
        if KIND == FP4:
            first = first >> (8 * part)[None, :].to(tl.int64)
        even = tl.join(
            decoded(words, first, second, 0, KIND, GROUP, DTYPE, NVIDIA),
            decoded(words, first, second, 2, KIND, GROUP, DTYPE, NVIDIA),
        )
        odd = tl.join(
            decoded(words, first, second, 1, KIND, GROUP, DTYPE, NVIDIA),
            decoded(words, first, second, 3, KIND, GROUP, DTYPE, NVIDIA),
        )
        values = tl.join(even, odd)
    elif KIND == W8A16:
        scale = tl.load(scales + span[None, :] * rows + own[:, None], mask=there, other=0.0)
        values = words.to(tl.float32)
    elif KIND == INT8:
        values = tl.reshape(words.to(tl.int32), (BN, BLOCK))
    if BEFORE == NORMED:
        gains = tl.load(gain + at, mask=at < k, other=0.0).to(tl.float32)
    wait_for_input(PDL)
    some = tl.load(x + at, mask=at < k, other=0.0).to(tl.float32)
    if ADD:
        before = tl.load(residual + own, mask=own < n, other=0.0).to(tl.float32)
    if BEFORE == GATED:
        up = tl.load(x + k + at, mask=at < k, other=0.0).to(tl.float32)
        some = rounded(some * tl.sigmoid(some) * up, DTYPE).to(tl.float32)
    elif BEFORE == NORMED:
        some *= tl.rsqrt(tl.sum(some * some, 0) / k + eps)
        some = rounded(some * gains, DTYPE).to(tl.float32)
    if KIND == INT8:
        size = step_of(tl.max(tl.abs(some), 0))
        whole = codes_of(some, size).to(tl.int32)
        y = tl.sum(values * whole[None, :], 1).to(tl.float32) * (factors * size)
    else:
        if PLANES == 4:  # feature 128 s + 32 i + c is column c of plane i
            planes = tl.permute(tl.reshape(some, (BLOCK // 128, 2, 2, 32)), (0, 3, 1, 2))
            some = tl.reshape(planes, (SPANS, COLUMNS, 2, 2))
            y = tl.sum(tl.sum(values * some[None, :, :, :, :], 4), 3)
            y = tl.sum(tl.sum(y, 2), 1) * factors
        elif KIND == W8A16:
            some = tl.reshape(some, (SPANS, COLUMNS))
            y = tl.sum(tl.sum(values * some[None, :, :], 2) * scale, 1) * factors
        else:
            y = tl.sum(values * some[None, :], 1) * factors
    if ADD:
        y += before
    tl.store(out + own, rounded(y, out.dtype.element_ty), mask=own < n)
