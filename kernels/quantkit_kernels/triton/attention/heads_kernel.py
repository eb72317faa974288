# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Products of few tokens with a weight of each head, which come before and after attention to
latents."""

import triton
import triton.language as tl

from quantkit_kernels.triton.weights_kernel import dot, fetch_lines, rounded, wait_for_input


@triton.jit
def multiply_heads(
    x, weight, out, rows, x_row, x_head, w_head, heads,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ACROSS: tl.constexpr, STAGES: tl.constexpr,
    NVIDIA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [rows, heads, K], x_row and x_head numbers apart, times a matrix of each head, w_head apart
    -> out [rows, heads, N].

    A matrix is [K, N], or with ACROSS [N, K]. A program has BN columns of a head and BM rows.
    """
    head = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    K_APART: tl.constexpr = 1 if ACROSS else N
    N_APART: tl.constexpr = K if ACROSS else 1
    weight += head.to(tl.int64) * w_head
    if PDL and NVIDIA:  # the weight is there before the tokens are
        LINE: tl.constexpr = 64  # numbers of 128 bytes
        LINES: tl.constexpr = BN * BK // LINE
        line = tl.arange(0, LINES) * LINE
        for start in tl.static_range(0, K, BK):
            if ACROSS:
                at = (tl.program_id(1) * BN + line // BK) * K + start + line % BK
            else:
                at = (start + line // BN) * N + tl.program_id(1) * BN + line % BN
            fetch_lines(weight + tl.minimum(at, K * N - 1))
    wait_for_input(PDL)
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    from_row = x + row.to(tl.int64) * x_row + head * x_head
    acc = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        inside = start + k < K
        some = tl.load(
            from_row[:, None] + start + k[None, :],
            mask=(row < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        part = tl.load(
            weight + (start + k)[:, None] * K_APART + n[None, :] * N_APART,
            mask=inside[:, None] & (n < N)[None, :],
            other=0.0,
        )
        acc = dot(some, part, acc)
    to = out + (row.to(tl.int64) * heads + head)[:, None] * N + n[None, :]
    tl.store(to, rounded(acc, out.dtype.element_ty), mask=(row < rows)[:, None] & (n < N)[None, :])
