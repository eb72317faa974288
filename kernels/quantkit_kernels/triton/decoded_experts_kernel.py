# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""What is before, between and after two products of pairs sorted by expert that a library computes.
Rows are those of `sorted_pairs.Places`."""

import triton
import triton.language as tl

from quantkit_kernels.triton.multiply_kernel import gated
from quantkit_kernels.triton.weights_kernel import rounded, wait_for_input


@triton.jit
def copy_to_rows(
    x, rows, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out[rows[t * TOP_K + i]] = x[t] for each i: a program per token and BLOCK of width."""
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + token * width + at, mask=inside, other=0.0)
    for i in tl.static_range(TOP_K):
        row = tl.load(rows + token * TOP_K + i).to(tl.int64)
        tl.store(out + row * width + at, values, mask=inside)


@triton.jit
def gate_rows(
    products, bias, ids, rows, out, width, first, count, bias_rows, up,
    BIASED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    BOUND: tl.constexpr, UP_BOUND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, width] at first .. first + count of a row = `gated` of products [pairs, 2 count],
    gate's before up's: a program per pair and BLOCK of count. BIASED: bias float32 [E, bias_rows],
    up's `up` after gate's. ALPHA to UP_BOUND: of `gated`."""
    wait_for_input(PDL)
    pair = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + pair).to(tl.int64)
    own = products + row * 2 * count + at
    gate = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(own + count, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        added = bias + tl.load(ids + pair).to(tl.int64) * bias_rows + first + at
        gate += tl.load(added, mask=inside, other=0.0)
        other += tl.load(added + up, mask=inside, other=0.0)
    result = gated(gate, other, ALPHA, LIMIT, SHIFT, BOUND, UP_BOUND)
    tl.store(out + row * width + first + at, rounded(result, out.dtype.element_ty), mask=inside)


@triton.jit
def sum_rows(
    products, bias, ids, rows, weights, y, width, first, count, bias_rows,
    BIASED: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, width] at first .. first + count of token t = the sum in float32 over its TOP_K pairs of
    weights[pair] * products[row], products [pairs, count], with BIASED the expert's bias, float32
    [E, bias_rows], added: a program per token and BLOCK of count."""
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        row = tl.load(rows + pair).to(tl.int64)
        one = tl.load(products + row * count + at, mask=inside, other=0.0).to(tl.float32)
        if BIASED:
            expert = tl.load(ids + pair).to(tl.int64)
            one += tl.load(bias + expert * bias_rows + first + at, mask=inside, other=0.0)
        total += one * tl.load(weights + pair)
    tl.store(y + token * width + first + at, rounded(total, y.dtype.element_ty), mask=inside)
