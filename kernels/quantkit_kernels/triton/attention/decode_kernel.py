# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Attention of a decode step over pages: keys and values of grouped heads, or latents, which are
both.

A program has some heads of a row and a share of its tokens; a second launch merges the shares by
their log-sum-exp.
"""

import triton
import triton.language as tl

from quantkit_kernels.triton.codes_kernel import LEAST_SCALE, decoded
from quantkit_kernels.triton.rope_kernel import partner_of
from quantkit_kernels.triton.weights_kernel import dot, rounded, wait_for_input


@triton.jit
def rotated_part(pe, cosines, sines, row, is_head, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The rotary part of a row's heads at pe [HEADS], rotated: [HEADS, R] of the type it has."""
    channel = tl.arange(0, R)
    partner, pair, sign = partner_of(channel, R, INTERLEAVED)
    cosine = tl.load(cosines + row * (R // 2) + pair)
    sine = tl.load(sines + row * (R // 2) + pair) * sign
    one = tl.load(pe[:, None] + channel[None, :], mask=is_head[:, None], other=0.0)
    other = tl.load(pe[:, None] + partner[None, :], mask=is_head[:, None], other=0.0)
    return rounded(
        one.to(tl.float32) * cosine[None, :] + other.to(tl.float32) * sine[None, :], one.dtype
    )


@triton.jit(do_not_specialize=["table_width", "splits"])
def attend_cached(
    q, q_pe, cosines, sines, keys, values, k_pe, key_scales, value_scales, sinks, table, lengths,
    out, found,
    q_row, q_head, pe_row, pe_head, table_width, heads, k_token, k_head, k_pe_token, scales_token,
    splits, scale, window,
    SHARED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    R: tl.constexpr, PAGE: tl.constexpr, LATENT: tl.constexpr,
    TOKENS: tl.constexpr, INTERLEAVED: tl.constexpr, WINDOWED: tl.constexpr, SUNK: tl.constexpr,
    SPLIT: tl.constexpr, CODES: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q [rows, heads, D], and q_pe [rows, heads, R], not yet rotated; keys of a token and key head
    D numbers, and k_pe of a token R, rotated; R may be 0. LATENT: keys are the values, which else
    have D of their own. scale: times log2(e). CODES: codes_kernel.py, with a scale for each token
    and key head, which keys and values each have, if apart; the probabilities then take the values'
    scales, over the largest so far, along.

    SHARED: query heads of a key head. out [rows, heads, D]; or with SPLIT float32 [rows, heads,
    splits, D], and found [rows, heads, splits], the logarithm to base 2 of each share's sum.
    """
    wait_for_input(PDL)
    row = tl.program_id(0)
    blocks: tl.constexpr = (SHARED + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // blocks
    own = tl.program_id(1) % blocks * HEADS + tl.arange(0, HEADS)
    head = kv_head * SHARED + own
    is_head = own < SHARED
    column = tl.arange(0, D_PADDED)
    whole = column < D
    from_row = q + row.to(tl.int64) * q_row + head * q_head
    query = tl.load(
        from_row[:, None] + column[None, :], mask=is_head[:, None] & whole[None, :], other=0.0
    )
    rotary = query
    if R > 0:
        pe = tl.arange(0, R)
        rotary = rotated_part(
            q_pe + row.to(tl.int64) * pe_row + head * pe_head,
            cosines,
            sines,
            row,
            is_head,
            R,
            INTERLEAVED,
        )
    length = tl.load(lengths + row).to(tl.int32)
    low = 0
    if WINDOWED:
        low = tl.maximum(length - window, 0) // TOKENS * TOKENS
    part = tl.program_id(2)
    tiles = tl.cdiv(length - low, TOKENS)
    per = tl.cdiv(tiles, splits)
    begin = low + part * per * TOKENS
    end = tl.minimum(begin + per * TOKENS, length)
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    if SUNK:  # one more key, in the first share of a row that is not empty
        first = is_head & (part == 0) & (length > 0)
        largest = tl.load(sinks + head, mask=first, other=float("-inf")) * 1.4426950408889634
        total = tl.where(first, 1.0, 0.0)
    sums = tl.zeros((HEADS, D_PADDED), tl.float32)
    unit = LEAST_SCALE  # with codes, of the sums
    keys += kv_head * k_head
    values += kv_head * k_head
    for start in tl.range(begin, end, TOKENS, num_stages=STAGES):
        at = start + tl.arange(0, TOKENS)
        there = at < end
        places = (
            tl.load(table + row * table_width + at // PAGE, mask=there, other=0).to(tl.int64) * PAGE
            + at % PAGE
        )
        token = places[:, None] * k_token
        k = tl.load(keys + token + column[None, :], mask=there[:, None] & whole[None, :], other=0)
        if CODES:
            k = decoded(k, CODES, query.dtype)
        scores = dot(query, tl.trans(k), tl.zeros((HEADS, TOKENS), tl.float32))
        if R > 0:
            rotated = tl.load(
                k_pe + places[:, None] * k_pe_token + pe[None, :], mask=there[:, None], other=0.0
            )
            scores = dot(rotary, tl.trans(rotated), scores)
        if CODES:
            of_tokens = tl.load(key_scales + places * scales_token + kv_head, mask=there, other=0.0)
            scores *= of_tokens[None, :]
        seen = there
        if WINDOWED:
            seen = seen & (at >= length - window)
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        probabilities = tl.exp2(scores - base[:, None])
        less = tl.exp2(largest - base)
        total = total * less + tl.sum(probabilities, 1)
        if LATENT:
            v = k
        else:
            v = tl.load(
                values + token + column[None, :], mask=there[:, None] & whole[None, :], other=0
            )
        if CODES:
            if not LATENT:
                v = decoded(v, CODES, query.dtype)
                of_tokens = tl.load(
                    value_scales + places * scales_token + kv_head, mask=there, other=0.0
                )
            larger = tl.maximum(unit, tl.max(of_tokens, 0))
            probabilities *= (of_tokens / larger)[None, :]
            less *= unit / larger
            unit = larger
        sums = dot(rounded(probabilities, v.dtype), v, sums * less[:, None])
        largest = top
    if CODES:
        sums *= unit
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    to = (row.to(tl.int64) * heads + head) * splits + part
    tl.store(
        out + to[:, None] * D + column[None, :],
        rounded(result, out.dtype.element_ty),
        mask=is_head[:, None] & whole[None, :],
    )
    if SPLIT:
        tl.store(found + to, largest + tl.log2(total), mask=is_head)


@triton.jit(do_not_specialize=["splits"])
def merge(
    partial,
    found,
    out,
    splits,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per row and head, and COLUMNS of them: shares weighed by what they found. SPLITS: a
    power of two, at least splits."""
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, SPLITS)
    logs = tl.load(found + row * splits + every, mask=every < splits, other=float("-inf"))
    top = tl.max(logs, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(logs - base), 0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for start in tl.static_range(0, SPLITS, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        there = part < splits
        weights = tl.exp2(
            tl.load(found + row * splits + part, mask=there, other=float("-inf")) - base
        )
        at = partial + (row * splits + part)[:, None] * D + column[None, :]
        sums += tl.sum(
            weights[:, None] * tl.load(at, mask=there[:, None] & (column < D)[None, :], other=0.0),
            0,
        )
    result = sums / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * D + column, rounded(result, out.dtype.element_ty), mask=column < D)
