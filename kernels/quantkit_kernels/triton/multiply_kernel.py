# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""x @ W.T for packed weights, of one linear or of the experts of sorted pairs, from one token to
many.

Weights are the left operand: they go from memory to registers in the order of the matrix
instruction's operand, are decoded there, and tokens are its columns, of which 8 are the fewest on
NVIDIA's cards and 16 on others. A program has BN rows and BM tokens, and the SPLIT-th part of K; of
the programs of one tile the last to arrive adds their sums up, in the order of K.
"""

import triton
import triton.language as tl

from quantkit_kernels.triton.weights_kernel import (
    INT4,
    INT8,
    SPAN,
    W8A16,
    dot,
    fetch,
    from_int8,
    int4_factors,
    int4_plane,
    load_scales,
    plane,
    rounded,
    wait_for_input,
)

STORE, SILU_MUL, WEIGH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ONE_TOKEN = tl.constexpr(2)
"""EXPERTS of one token: every pair is a tile of its own, and tile_expert are the chosen experts."""


@triton.jit
def add_step(acc, step, x, places, k, there, codes, scales, n, rows, COLUMNS: tl.constexpr,
KIND: tl.constexpr, GROUP: tl.constexpr,
             DTYPE: tl.constexpr, EVEN_K: tl.constexpr, NVIDIA: tl.constexpr):  # fmt: skip
    """acc [BN, BM] plus the product over 128 input features in 4 bits. places: where each token's
    row of x begins."""
    PARTS: tl.constexpr = 32 // COLUMNS
    column = tl.arange(0, COLUMNS)
    first = load_scales(scales, step, 0, n, rows, KIND, GROUP)
    second = first
    if KIND == INT4 and GROUP == 32:
        second = load_scales(scales, step, 1, n, rows, KIND, GROUP)
    for part in tl.static_range(PARTS):
        at = (step * PARTS + part) * n * COLUMNS
        words = tl.load(codes + at + rows[:, None] * COLUMNS + column[None, :])
        for i in tl.static_range(4):
            feature = step * SPAN + 32 * i + COLUMNS * part + column
            if EVEN_K:
                some = tl.load(
                    x + places[None, :] + feature[:, None], mask=there[None, :], other=0.0
                )
            else:
                some = tl.load(
                    x + places[None, :] + feature[:, None],
                    mask=there[None, :] & (feature[:, None] < k),
                    other=0.0,
                )
            acc = dot(plane(words, first, second, i, part, KIND, GROUP, DTYPE, NVIDIA), some, acc)
    return acc


@triton.jit
def add_codes_step(acc, step, x, places, k, there, codes, scales, n, rows, GROUP: tl.constexpr,
DTYPE: tl.constexpr, EVEN_K: tl.constexpr,
                   NVIDIA: tl.constexpr):  # fmt: skip
    """add_step of int4 for few tokens: the codes themselves are multiplied, and the sums of each
    group scaled, of which there are fewer.

    A code comes with the power of two that decoding by bits leaves in it. That and the zero point
    are taken away with the sum of the tokens' features, a product with ones; in float16, where that
    power is 1024, they are taken from the codes.
    """
    BN: tl.constexpr = acc.shape[0]
    BM: tl.constexpr = acc.shape[1]
    PLANES: tl.constexpr = GROUP // 32
    column = tl.arange(0, 32)
    words = tl.load(codes + step * n * 32 + rows[:, None] * 32 + column[None, :])
    ones = tl.full((BN, 32), 1.0, tl.float32).to(DTYPE)
    first = load_scales(scales, step, 0, n, rows, INT4, GROUP)
    second = first
    if GROUP == 32:
        second = load_scales(scales, step, 1, n, rows, INT4, GROUP)
    for group in tl.static_range(4 // PLANES):
        less, scale = int4_factors(first if GROUP > 32 or group < 2 else second, group % 2, DTYPE)
        sums = tl.zeros((BN, BM), tl.float32)
        total = sums
        for i in tl.static_range(group * PLANES, group * PLANES + PLANES):
            feature = step * SPAN + 32 * i + column
            if EVEN_K:
                some = tl.load(
                    x + places[None, :] + feature[:, None], mask=there[None, :], other=0.0
                )
            else:
                some = tl.load(
                    x + places[None, :] + feature[:, None],
                    mask=there[None, :] & (feature[:, None] < k),
                    other=0.0,
                )
            if DTYPE == tl.bfloat16:
                sums = dot(int4_plane(words, i, DTYPE, NVIDIA), some, sums)
                total = dot(ones, some, total)
            else:
                sums = dot(int4_plane(words, i, DTYPE, NVIDIA) - less[:, None], some, sums)
        if DTYPE == tl.bfloat16:
            sums -= total * less.to(tl.float32)[:, None]
        acc += sums * scale[:, None]
    return acc


@triton.jit
def add_int8_step(acc, step, x, places, k, there, codes, n, rows, EVEN_K: tl.constexpr):
    """acc int32 [BN, BM] plus the product over 128 input features."""
    column = tl.arange(0, SPAN)
    feature = step * SPAN + column
    weights = tl.load(codes + step * n * SPAN + rows[:, None] * SPAN + column[None, :])
    if EVEN_K:
        some = tl.load(x + places[None, :] + feature[:, None], mask=there[None, :], other=0)
    else:
        some = tl.load(
            x + places[None, :] + feature[:, None],
            mask=there[None, :] & (feature[:, None] < k),
            other=0,
        )
    return tl.dot(weights, some, acc, out_dtype=tl.int32)


@triton.jit
def add_w8a16_step(acc, step, x, places, k, there, codes, scales, n, rows, GROUP: tl.constexpr,
DTYPE: tl.constexpr, EVEN_K: tl.constexpr):  # fmt: skip
    """acc float32 [BN, BM] plus the product over 128 input features of weight-only int8: codes are
    multiplied, and the sums of each group scaled."""
    BN: tl.constexpr = acc.shape[0]
    BM: tl.constexpr = acc.shape[1]
    PARTS: tl.constexpr = SPAN // GROUP
    column = tl.arange(0, GROUP)
    for part in tl.static_range(PARTS):
        at = step * SPAN + part * GROUP
        weights = tl.load(
            codes + step * n * SPAN + rows[:, None] * SPAN + part * GROUP + column[None, :]
        )
        feature = at + column
        if EVEN_K:
            some = tl.load(x + places[None, :] + feature[:, None], mask=there[None, :], other=0.0)
        else:
            some = tl.load(
                x + places[None, :] + feature[:, None],
                mask=there[None, :] & (feature[:, None] < k),
                other=0.0,
            )
        scale = tl.load(scales + (step * PARTS + part) * n + rows)
        sums = dot(from_int8(weights, DTYPE), some, tl.zeros((BN, BM), tl.float32))
        acc += sums * scale[:, None]
    return acc


@triton.jit
def sum_of_parts(
    acc, more, partial, arrived, tile, part,
    SPLIT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PAIR: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    """The sums of acc and, with PAIR, of more over the programs of a tile, and whether this one has
    them: the last to arrive. Counters are
    zero before and after. ALONE: only the first of the BM tokens is one; its sums lie side by side,
    and the others are undefined."""
    at = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    there = None
    if ALONE:
        at = tl.arange(0, BM)[None, :] * BN + tl.arange(0, BN)[:, None]
        there = (tl.arange(0, BM) < 1)[None, :]
    SIZE: tl.constexpr = BN * BM
    EACH: tl.constexpr = 2 * SIZE if PAIR else SIZE
    mine = partial + tile.to(tl.int64) * SPLIT * EACH
    tl.store(mine + part * EACH + at, acc, mask=there)
    if PAIR:
        tl.store(mine + part * EACH + SIZE + at, more, mask=there)
    tl.debug_barrier()
    before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
    last = before == SPLIT - 1
    if last:
        tl.debug_barrier()
        acc = tl.load(mine + at, mask=there, cache_modifier=".cg")
        if PAIR:
            more = tl.load(mine + SIZE + at, mask=there, cache_modifier=".cg")
        for other in tl.static_range(1, SPLIT):
            acc += tl.load(mine + other * EACH + at, mask=there, cache_modifier=".cg")
            if PAIR:
                more += tl.load(mine + other * EACH + SIZE + at, mask=there, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return acc, more, last


@triton.jit
def bounded(x, BOUND: tl.constexpr):
    """BOUND * tanh(x / BOUND) of float32; near 0 by its series, for the difference of two numbers
    near 1 has few digits."""
    ratio = x / BOUND
    square = ratio * ratio
    small = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    return tl.where(square < 0.01, small, BOUND * (2.0 / (1.0 + tl.exp(-2.0 * ratio)) - 1.0))


@triton.jit
def gated(
    gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, BOUND: tl.constexpr,
    UP_BOUND: tl.constexpr,
):  # fmt: skip
    """`quantkit_kernels.Gating` of float32; LIMIT, BOUND and UP_BOUND 0 for none. What is no number
    stays none."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up)
    if UP_BOUND > 0:
        up = bounded(up, UP_BOUND)
    if SHIFT != 0:
        up = up + SHIFT
    factor = gate
    if BOUND > 0:
        factor = bounded(gate, BOUND)
    if ALPHA == 1:
        return factor / (1.0 + tl.exp(-gate)) * up
    else:
        return factor / (1.0 + tl.exp(-ALPHA * gate)) * up


@triton.jit(do_not_specialize=["m", "steps", "top_k"])
def multiply(
    x, x_scale, codes, scales, row_scale, bias, out, partial, arrived, order, tile_expert,
    tile_count, pair_weights,
    m, n, k, out_n, steps, top_k, up,
    KIND: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, EPILOGUE: tl.constexpr,
    EXPERTS: tl.constexpr, SPLIT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    NVIDIA: tl.constexpr, STAGES: tl.constexpr,
    DTYPE: tl.constexpr, ALONE: tl.constexpr, SCALED_SUMS: tl.constexpr, BIASED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, BOUND: tl.constexpr,
    UP_BOUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One linear: x[m, k] -> out[m, out_n]. EXPERTS: of a tile of sorted pairs, from x's rows pair
    // top_k to out's rows pair.

    n: rows of the packed weight, of each expert; up: rows from a feature of gate to that of up,
    with SILU_MUL. ALONE: of each tile only the
    first token is one. SCALED_SUMS: of int4, `add_codes_step`. BIASED: bias float32 as row_scale
    lies. ALPHA to UP_BOUND: of `gated`.
    """
    row_tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    token_tile = tl.program_id(1)
    own = row_tile * BN + tl.arange(0, BN)
    rows = own
    if not EVEN_N:  # rows past the last are read as the last, and not written
        rows = tl.minimum(own, (up if EPILOGUE == SILU_MUL else n) - 1)
    slots = token_tile * BM + tl.arange(0, BM)
    begin = steps * part // SPLIT
    end = steps * (part + 1) // SPLIT
    BYTE_CODES: tl.constexpr = KIND >= INT8  # and W8A16
    WIDTH: tl.constexpr = SPAN if BYTE_CODES else SPAN // 4
    BYTES: tl.constexpr = BN * SPAN if BYTE_CODES else BN * SPAN // 2
    if PDL and EVEN_N and not EXPERTS:  # weights are there before the tokens are
        for ahead in tl.static_range(STAGES - 1):
            fetch(
                codes
                + tl.minimum(begin + ahead, end - 1).to(tl.int64) * n * WIDTH
                + row_tile * BN * WIDTH,
                BYTES,
            )
    wait_for_input(PDL)
    expert = 0
    if EXPERTS == ONE_TOKEN:
        expert = tl.load(tile_expert + token_tile)
        there = tl.arange(0, BM) < 1
        token = tl.full((BM,), 0, tl.int32) + token_tile
        source = token // top_k
    elif EXPERTS:
        expert = tl.load(tile_expert + token_tile)
        if expert < 0:
            return
        there = tl.arange(0, BM) < tl.load(tile_count + token_tile)
        token = tl.load(order + slots, mask=there, other=0)
        source = token // top_k
    else:
        there = slots < m
        token = slots
        source = slots
    places = source.to(tl.int64) * k
    n = n.to(tl.int64)
    weight_rows = n * expert
    codes += weight_rows * steps * WIDTH
    PER_STEP: tl.constexpr = (
        SPAN // GROUP if KIND == W8A16 else 2 if KIND == INT4 and GROUP == 32 else 1
    )
    scales += weight_rows * steps * PER_STEP
    row_scale += weight_rows
    if BIASED:
        bias += weight_rows
    acc = tl.zeros((BN, BM), tl.int32 if KIND == INT8 else tl.float32)
    more = acc
    for step in tl.range(begin, end, num_stages=STAGES):
        if KIND == INT8:
            acc = add_int8_step(acc, step, x, places, k, there, codes, n, rows, EVEN_K)
            if EPILOGUE == SILU_MUL:
                more = add_int8_step(more, step, x, places, k, there, codes, n, rows + up, EVEN_K)
        elif KIND == W8A16:
            acc = add_w8a16_step(
                acc, step, x, places, k, there, codes, scales, n, rows, GROUP, DTYPE, EVEN_K
            )
            if EPILOGUE == SILU_MUL:
                more = add_w8a16_step(
                    more, step, x, places, k, there, codes, scales, n, rows + up, GROUP, DTYPE,
                    EVEN_K
                )  # fmt: skip
        elif SCALED_SUMS:
            acc = add_codes_step(
                acc, step, x, places, k, there, codes, scales, n, rows, GROUP, DTYPE, EVEN_K, NVIDIA
            )
            if EPILOGUE == SILU_MUL:
                more = add_codes_step(
                    more,
                    step,
                    x,
                    places,
                    k,
                    there,
                    codes,
                    scales,
                    n,
                    rows + up,
                    GROUP,
                    DTYPE,
                    EVEN_K,
                    NVIDIA,
                )
        else:
            acc = add_step(
                acc,
                step,
                x,
                places,
                k,
                there,
                codes,
                scales,
                n,
                rows,
                COLUMNS,
                KIND,
                GROUP,
                DTYPE,
                EVEN_K,
                NVIDIA,
            )
            if EPILOGUE == SILU_MUL:
                more = add_step(
                    more,
                    step,
                    x,
                    places,
                    k,
                    there,
                    codes,
                    scales,
                    n,
                    rows + up,
                    COLUMNS,
                    KIND,
                    GROUP,
                    DTYPE,
                    EVEN_K,
                    NVIDIA,
                )
    result = acc.to(tl.float32)
    other = more.to(tl.float32)
    last = True
    if SPLIT > 1:
        tile = token_tile * (tl.num_programs(0) // SPLIT) + row_tile
        result, other, last = sum_of_parts(
            result, other, partial, arrived, tile, part, SPLIT, BN, BM, EPILOGUE == SILU_MUL, ALONE
        )
    if last:
        factor = 1.0
        if KIND == INT8:
            factor = tl.load(x_scale + source, mask=there, other=0.0)[None, :]
        result = result * tl.load(row_scale + rows)[:, None] * factor
        if BIASED:
            result += tl.load(bias + rows)[:, None]
        if EPILOGUE == SILU_MUL:
            other = other * tl.load(row_scale + rows + up)[:, None] * factor
            if BIASED:
                other += tl.load(bias + rows + up)[:, None]
            result = gated(result, other, ALPHA, LIMIT, SHIFT, BOUND, UP_BOUND)
        if EPILOGUE == WEIGH:
            result = result * tl.load(pair_weights + token, mask=there, other=0.0)[None, :]
        to = out + token.to(tl.int64)[None, :] * out_n + own[:, None]
        tl.store(
            to, rounded(result, out.dtype.element_ty), mask=there[None, :] & (own[:, None] < out_n)
        )
