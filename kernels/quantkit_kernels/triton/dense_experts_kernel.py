# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""A product of sorted token-expert pairs with 16-bit weights of their experts, and what comes after
it."""

import triton
import triton.language as tl

from quantkit_kernels.triton.multiply_kernel import gated
from quantkit_kernels.triton.weights_kernel import dot, rounded, wait_for_input


@triton.jit(do_not_specialize=["top_k"])
def multiply_pairs(
    x, weight, out, order, tile_expert, tile_count, pair_weights, n, k, top_k,
    GATED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program per BN of n features and tile of BM pairs of one expert.

    GATED: weight [E, 2n, k], gate's rows first; out[pair] = silu(gate) * up of x[pair // top_k], in
    x's type. Else weight [E, n, k]; out[pair] = pair_weights[pair] times the product of x[pair], in
    float32 or rounded to out's type. The tables are those of `Slots`; BM is their tokens.
    """
    tile = tl.program_id(1)
    wait_for_input(PDL)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    count = tl.load(tile_count + tile)
    slot = tl.arange(0, BM)
    pair = tl.load(order + tile * BM + slot, mask=slot < count, other=0)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    kept = tl.minimum(rows, n - 1).to(tl.int64)
    features = tl.arange(0, BK)
    own = weight + expert.to(tl.int64) * (2 * n if GATED else n) * k
    at = own + kept[:, None] * k + features[None, :]
    token = (pair // top_k if GATED else pair).to(tl.int64)
    from_x = x + token[None, :] * k + features[:, None]
    sums = tl.zeros((BN, BM), tl.float32)
    others = tl.zeros((BN, BM), tl.float32)
    second = n.to(tl.int64) * k
    for step in tl.range(0, k, BK, num_stages=STAGES):
        if EVEN_K:
            here = tl.load(from_x)
            sums = dot(tl.load(at), here, sums)
            if GATED:
                others = dot(tl.load(at + second), here, others)
        else:
            inside = features < k - step
            here = tl.load(from_x, mask=inside[:, None], other=0.0)
            sums = dot(tl.load(at, mask=inside[None, :], other=0.0), here, sums)
            if GATED:
                others = dot(tl.load(at + second, mask=inside[None, :], other=0.0), here, others)
        at += BK
        from_x += BK
    if GATED:
        result = rounded(gated(sums, others, 1.0, 0.0, 0.0, 0.0, 0.0), x.dtype.element_ty)
    else:
        result = sums * tl.load(pair_weights + pair, mask=slot < count, other=0.0)[None, :]
        if out.dtype.element_ty != tl.float32:
            result = rounded(result, out.dtype.element_ty)
    to = out + pair.to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(to, result, mask=(slot < count)[None, :] & (rows < n)[:, None])
