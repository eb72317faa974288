# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""x @ W.T for weights in 16 bits and few tokens, which is bound by reading the weights.

Weights are the left operand, tokens the columns of the matrix instruction. A program has BN rows,
all tokens, and the SPLIT-th part of K.
"""

import triton
import triton.language as tl

from quantkit_kernels.triton.multiply_kernel import sum_of_parts
from quantkit_kernels.triton.weights_kernel import dot, rounded, wait_for_input


@triton.jit(do_not_specialize=["m"])
def multiply_dense(
    x, weight, out, partial, arrived, m, n, k,
    SPLIT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x[m, k] -> out[m, n], weight [n, k], all in one 16-bit type; k a multiple of BK, n of BN, m
    at most BM."""
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    rows = tile * BN + tl.arange(0, BN)
    column = tl.arange(0, BK)
    steps = k // BK
    begin = steps * part // SPLIT
    end = steps * (part + 1) // SPLIT
    own = weight + rows.to(tl.int64)[:, None] * k
    wait_for_input(PDL)
    token = tl.arange(0, BM)
    there = token < m
    tokens = x + token.to(tl.int64)[None, :] * k
    acc = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        at = step * BK + column
        some = tl.load(tokens + at[:, None], mask=there[None, :], other=0.0)
        acc = dot(tl.load(own + at[None, :]), some, acc)
    last = True
    if SPLIT > 1:
        acc, _, last = sum_of_parts(
            acc, acc, partial, arrived, tile, part, SPLIT, BN, BM, False, False
        )
    if last:
        to = out + token.to(tl.int64)[None, :] * n + rows[:, None]
        tl.store(to, rounded(acc, out.dtype.element_ty), mask=there[None, :])
