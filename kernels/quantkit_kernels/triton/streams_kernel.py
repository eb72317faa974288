# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Hyper-connections (quantkit_kernels/streams.py): the product with all streams, in parts; from it
a token's weights and the sublayer's input; and the mixing of the streams after the sublayer."""

import triton
import triton.language as tl

from quantkit_kernels.triton.weights_kernel import dot, fetch_lines, rounded, wait_for_input


@triton.jit(do_not_specialize=["tokens"])
def project(
    streams, fn, partial, tokens, width, rows,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    NVIDIA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per BM tokens and part of their `width` numbers: partial float32 [SPLIT, tokens,
    rows + 1], the products with fn float32 [rows, width], and the sum of squares. ROWS: a power of
    two, more than rows. A float32 number is the sum of three bfloat16 ones to its last bit."""
    part, tile = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.arange(0, BK)
    token = tile * BM + tl.arange(0, BM)
    per = tl.cdiv(tl.cdiv(width, BK), SPLIT) * BK
    begin = part * per
    end = tl.minimum(begin + per, width)
    if PDL and NVIDIA:  # fn is there before the streams are
        lines = tl.minimum(row, rows - 1)[:, None] * width + tl.arange(0, BK // 32)[None, :] * 32
        for start in range(begin, end, BK):
            fetch_lines(fn + tl.minimum(start + lines, rows * width - 1))
    wait_for_input(PDL)
    acc = tl.zeros((BM, ROWS), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for start in range(begin, end, BK):
        inside = start + column < width
        some = tl.load(
            streams + token.to(tl.int64)[:, None] * width + start + column[None, :],
            mask=(token < tokens)[:, None] & inside[None, :],
            other=0.0,
        )
        weight = tl.load(
            fn + row[None, :] * width + start + column[:, None],
            mask=(row < rows)[None, :] & inside[:, None],
            other=0.0,
        )
        wide = some.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        for _ in tl.static_range(3):
            near = rounded(weight, tl.bfloat16)
            acc = dot(some, near, acc)
            weight -= near.to(tl.float32)
    found = tl.where(row[None, :] == rows, squares[:, None], acc)
    to = partial + (part * tokens + token).to(tl.int64)[:, None] * (rows + 1) + row[None, :]
    tl.store(to, found, mask=(token < tokens)[:, None] & (row <= rows)[None, :])


@triton.jit
def sums_of(partial, part, column, there, apart, SPLIT: tl.constexpr):
    """Sums over the parts of the numbers at `column`, which has one dimension."""
    at = part[:, None] * apart + column[None, :]
    return tl.sum(
        tl.load(partial + at, mask=(part < SPLIT)[:, None] & there[None, :], other=0.0), 0
    )


@triton.jit(do_not_specialize=["tokens"])
def weigh(
    streams, partial, base, scale, gain, normed, merged, post, mixing, tokens, h, norm_eps, eps,
    gain_eps, magnitude,
    N: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, MERGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per token for its input, normed, and one for its weights. WIDTH, PARTS, BLOCK:
    powers of two, at least N, SPLIT and h. MERGE: no weights; the input also before its norm. STEPS:
    0 of independent streams, which have no matrix."""
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    ROWS: tl.constexpr = N if MERGE else ((2 + N) * N if STEPS else 2 * N)
    apart = tokens.to(tl.int64) * (ROWS + 1)
    partial += token * (ROWS + 1)
    part, stream = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    own = stream < N
    squares = tl.load(partial + part * apart + ROWS, mask=part < SPLIT, other=0.0)
    factor = tl.rsqrt(tl.sum(squares, 0) / (N * h) + norm_eps)
    if tl.program_id(1) == 0:
        pre = sums_of(partial, part, stream, own, apart, SPLIT) * factor * tl.load(scale)
        pre = tl.sigmoid(pre + tl.load(base + stream, mask=own, other=0.0)) + eps
        at = tl.arange(0, BLOCK)
        inside = at < h
        total = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(N):
            one = tl.load(streams + (token * N + i) * h + at, mask=inside, other=0.0)
            total += tl.sum(tl.where(stream == i, pre, 0.0), 0) * one.to(tl.float32)
        TYPE: tl.constexpr = normed.dtype.element_ty
        one = rounded(total, TYPE)
        if MERGE:
            tl.store(merged + token * h + at, one, mask=inside)
        total = one.to(tl.float32)
        total *= tl.rsqrt(tl.sum(total * total, 0) / h + gain_eps)
        total *= tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + token * h + at, rounded(total, TYPE), mask=inside)
    else:
        weight = sums_of(partial, part, N + stream, own, apart, SPLIT) * factor
        weight *= tl.load(scale + 1)
        weight += tl.load(base + N + stream, mask=own, other=0.0)
        weight = magnitude * tl.sigmoid(weight)
        if STEPS == 0:
            weight += eps
        tl.store(post + token * N + stream, weight, mask=own)
        if STEPS > 0:
            pair = tl.arange(0, WIDTH * WIDTH)
            line, column = pair // WIDTH, pair % WIDTH
            both = (line < N) & (column < N)
            place = 2 * N + line * N + column
            weight = sums_of(partial, part, place, both, apart, SPLIT) * factor * tl.load(scale + 2)
            weight += tl.load(base + place, mask=both, other=0.0)
            weight = tl.where(column < N, weight, float("-inf"))
            matrix = tl.reshape(weight, (WIDTH, WIDTH))
            matrix = tl.exp(matrix - tl.max(matrix, 1)[:, None])
            matrix = matrix / tl.sum(matrix, 1)[:, None] + eps
            matrix = tl.where(own[:, None] & own[None, :], matrix, 0.0)
            matrix /= (tl.sum(matrix, 0) + eps)[None, :]
            for _ in range(STEPS - 1):
                matrix /= (tl.sum(matrix, 1) + eps)[:, None]
                matrix /= (tl.sum(matrix, 0) + eps)[None, :]
            to = mixing + token * N * N + stream[:, None] * N + stream[None, :]
            tl.store(to, matrix, mask=own[:, None] & own[None, :])


@triton.jit
def mix(
    streams, output, post, mixing, mixed, h, N: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per token and BLOCK channels. APART: each stream keeps its own, and mixing is not
    read."""
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, WIDTH)
    inside = at < h
    weights = tl.load(post + token * N + stream, mask=stream < N, other=0.0)
    one = tl.load(output + token * h + at, mask=inside, other=0.0).to(tl.float32)
    totals = weights[:, None] * one[None, :]
    for i in tl.static_range(N):
        if APART:
            weights = tl.where(stream == i, 1.0, 0.0)
        else:
            weights = tl.load(mixing + (token * N + i) * N + stream, mask=stream < N, other=0.0)
        one = tl.load(streams + (token * N + i) * h + at, mask=inside, other=0.0).to(tl.float32)
        totals += weights[:, None] * one[None, :]
    to = mixed + (token * N + stream)[:, None] * h + at[None, :]
    whole = (stream < N)[:, None] & inside[None, :]
    tl.store(to, rounded(totals, mixed.dtype.element_ty), mask=whole)
