# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Rows of packed weights in 16 bits, for products of many tokens with 16-bit activations."""

import triton
import triton.language as tl

from quantkit_kernels.triton.weights_kernel import INT4, SPAN, load_scales, plane, rounded


@triton.jit
def expand(
    codes, scales, row_scale, out, n, k, first_row, out_n, out_stride,
    KIND: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, BN: tl.constexpr,
    NVIDIA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """out [experts, out_n, k], out_stride from one to the next: rows first_row, a multiple of BN,
    and on of each expert's n. A program per step, BN rows and expert; it writes whole rows of a
    step, which took four fifths of the time of writing each plane where it belongs (H200)."""
    to_row = tl.program_id(1) * BN + tl.arange(0, BN)
    rows = first_row + to_row
    step = tl.program_id(0)
    expert = tl.program_id(2).to(tl.int64)
    n = n.to(tl.int64)
    own = expert * n * tl.num_programs(0)
    codes += own * (SPAN // 4)
    scales += own * (2 if KIND == INT4 and GROUP == 32 else 1)
    row_scale += expert * n
    out += expert * out_stride
    column = tl.arange(0, COLUMNS)
    factor = tl.load(row_scale + rows)
    first = load_scales(scales, step, 0, n, rows, KIND, GROUP)
    second = first
    if KIND == INT4 and GROUP == 32:
        second = load_scales(scales, step, 1, n, rows, KIND, GROUP)
    PARTS: tl.constexpr = 32 // COLUMNS
    at = codes + step * PARTS * n * COLUMNS + rows[:, None] * COLUMNS + column[None, :]
    words = tl.load(at)
    more = words
    if PARTS == 2:
        more = tl.load(at + n * COLUMNS)
    a = features_of(words, more, first, second, factor, 0, PARTS, KIND, GROUP, DTYPE, NVIDIA)
    b = features_of(words, more, first, second, factor, 1, PARTS, KIND, GROUP, DTYPE, NVIDIA)
    c = features_of(words, more, first, second, factor, 2, PARTS, KIND, GROUP, DTYPE, NVIDIA)
    d = features_of(words, more, first, second, factor, 3, PARTS, KIND, GROUP, DTYPE, NVIDIA)
    values = tl.join(tl.join(a, b), tl.join(c, d)).permute(0, 3, 2, 1).reshape(BN, SPAN)
    feature = step * SPAN + tl.arange(0, SPAN)
    tl.store(
        out + to_row.to(tl.int64)[:, None] * k + feature[None, :],
        values,
        mask=(to_row[:, None] < out_n) & (feature[None, :] < k),
    )


@triton.jit
def features_of(
    words, more, first, second, factor, PLANE: tl.constexpr, PARTS: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """32 features of a step, side by side: those of a plane of its one or two parts."""
    values = plane(words, first, second, PLANE, 0, KIND, GROUP, DTYPE, NVIDIA)
    if PARTS == 2:
        others = plane(more, first, second, PLANE, 1, KIND, GROUP, DTYPE, NVIDIA)
        values = tl.join(values, others).permute(0, 2, 1).reshape(values.shape[0], 32)
    return rounded(values.to(tl.float32) * factor[:, None], DTYPE)


@triton.jit
def expand_w8a16(
    codes, scales, out, n, k, first_row, out_n, out_stride, GROUP: tl.constexpr, BN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The same for weight-only int8."""
    to_row = tl.program_id(1) * BN + tl.arange(0, BN)
    rows = first_row + to_row
    step = tl.program_id(0)
    expert = tl.program_id(2).to(tl.int64)
    n = n.to(tl.int64)
    GROUPS: tl.constexpr = SPAN // GROUP
    own = expert * n * tl.num_programs(0)
    codes += own * SPAN
    scales += own * GROUPS
    out += expert * out_stride
    for part in tl.static_range(GROUPS):
        inner = part * GROUP + tl.arange(0, GROUP)
        scale = tl.load(scales + (step * GROUPS + part) * n + rows)
        words = tl.load(codes + step * n * SPAN + rows[:, None] * SPAN + inner[None, :])
        feature = step * SPAN + inner
        tl.store(
            out + to_row.to(tl.int64)[:, None] * k + feature[None, :],
            rounded(words.to(tl.float32) * scale[:, None], DTYPE),
            mask=(to_row[:, None] < out_n) & (feature[None, :] < k),
        )
