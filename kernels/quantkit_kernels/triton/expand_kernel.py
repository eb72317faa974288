# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""A packed weight in 16 bits, for products of many tokens with 16-bit activations."""

import triton
import triton.language as tl

from quantkit_kernels.triton.weights_kernel import INT4, SPAN, load_scales, plane, rounded


@triton.jit
def expand(
    codes, scales, row_scale, out, n, out_n, k,
    KIND: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, BN: tl.constexpr,
    NVIDIA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """out [out_n, k]: a program per BN rows and step."""
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    step = tl.program_id(0)
    n = n.to(tl.int64)
    PARTS: tl.constexpr = 32 // COLUMNS
    column = tl.arange(0, COLUMNS)
    factor = tl.load(row_scale + rows)
    first = load_scales(scales, step, 0, n, rows, KIND, GROUP)
    second = first
    if KIND == INT4 and GROUP == 32:
        second = load_scales(scales, step, 1, n, rows, KIND, GROUP)
    for part in tl.static_range(PARTS):
        words = tl.load(
            codes + (step * PARTS + part) * n * COLUMNS + rows[:, None] * COLUMNS + column[None, :]
        )
        for i in tl.static_range(4):
            feature = step * SPAN + 32 * i + COLUMNS * part + column
            values = (
                plane(words, first, second, i, part, KIND, GROUP, DTYPE, NVIDIA).to(tl.float32)
                * factor[:, None]
            )
            inside = (rows[:, None] < out_n) & (feature[None, :] < k)
            tl.store(
                out + rows.to(tl.int64)[:, None] * k + feature[None, :],
                rounded(values, DTYPE),
                mask=inside,
            )


@triton.jit
def expand_w8a16(
    codes, scales, out, n, out_n, k, GROUP: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """The same for weight-only int8."""
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    step = tl.program_id(0)
    n = n.to(tl.int64)
    GROUPS: tl.constexpr = SPAN // GROUP
    for part in tl.static_range(GROUPS):
        inner = part * GROUP + tl.arange(0, GROUP)
        scale = tl.load(scales + (step * GROUPS + part) * n + rows)
        words = tl.load(codes + step * n * SPAN + rows[:, None] * SPAN + inner[None, :])
        feature = step * SPAN + inner
        tl.store(
            out + rows.to(tl.int64)[:, None] * k + feature[None, :],
            rounded(words.to(tl.float32) * scale[:, None], DTYPE),
            mask=(rows[:, None] < out_n) & (feature[None, :] < k),
        )
