# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""The router's product of few tokens. The router is float32 and tokens are bfloat16: a weight is
the sum of three bfloat16 numbers to its last bit, so three products of matrix instructions are as
exact as one in float32."""

import triton
import triton.language as tl

from quantkit_kernels.triton.multiply_kernel import sum_of_parts
from quantkit_kernels.triton.weights_kernel import dot, fetch_lines, rounded, wait_for_input


@triton.jit(do_not_specialize=["tokens"])
def router_logits(
    x, router, logits, partial, arrived, tokens, experts, k,
    SPLIT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, NVIDIA: tl.constexpr,
    ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [tokens, k] times router [experts, k] -> logits float32 [tokens, experts]. ALONE: of one
    token."""
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    expert = tile * BN + tl.arange(0, BN)
    token = tl.arange(0, BM)
    column = tl.arange(0, BK)
    if PDL and NVIDIA:  # the router is there before the tokens are
        lines = tl.minimum(expert, experts - 1)[:, None] * k + tl.arange(0, BK // 32)[None, :] * 32
        for start in range(part * BK, k, SPLIT * BK):
            fetch_lines(router + tl.minimum(start + lines, experts * k - 1))
    wait_for_input(PDL)
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(part * BK, k, SPLIT * BK):
        inside = start + column < k
        weight = tl.load(
            router + expert[:, None] * k + start + column[None, :],
            mask=(expert < experts)[:, None] & inside[None, :],
            other=0.0,
        )
        some = tl.load(
            x + token[None, :] * k + start + column[:, None],
            mask=(token < tokens)[None, :] & inside[:, None],
            other=0.0,
        )
        for _ in tl.static_range(3):
            near = rounded(weight, tl.bfloat16)
            acc = dot(near, some, acc)
            weight -= near.to(tl.float32)
    acc, _, last = sum_of_parts(acc, acc, partial, arrived, tile, part, SPLIT, BN, BM, False, ALONE)
    if last:
        to = logits + token[None, :] * experts + expert[:, None]
        tl.store(to, acc, mask=(token < tokens)[None, :] & (expert < experts)[:, None])


@triton.jit(do_not_specialize=["count"])
def cut_in_three(values, parts, count, BLOCK: tl.constexpr):
    """values float32 [count] -> parts bfloat16 [3, count], which add up to them to the last bit."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(values + at, mask=at < count, other=0.0)
    for part in tl.static_range(3):
        near = rounded(rest, tl.bfloat16)
        tl.store(parts + part * count + at, near, mask=at < count)
        rest -= near.to(tl.float32)
