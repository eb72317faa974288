# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Attention over a window and compressed KV entries (quantkit_kernels/compressed.py). Arithmetic is
float32."""

import triton
import triton.language as tl

from quantkit_kernels.triton.rope_kernel import partner_of
from quantkit_kernels.triton.weights_kernel import dot, rounded, wait_for_input


@triton.jit
def rotate_heads(
    x, gain, key, key_gain, cosines, sines, y, key_y, heads, x_token, x_head, key_token, eps,
    key_eps,
    D: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    NORMED: tl.constexpr, GAINED: tl.constexpr, BACK: tl.constexpr, INTERLEAVED: tl.constexpr,
    KEYED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per token and HEADS heads: y contiguous, normed with NORMED, by a gain with GAINED,
    its last R channels rotated. KEYED: one more per token, for its key, which is normed by a
    gain."""
    wait_for_input(PDL)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cosines += token * (R // 2)
    sines += token * (R // 2)
    if KEYED and block == tl.num_programs(1) - 1:
        one = tl.arange(0, 1)
        rotate_rows(
            key + token * key_token + one, key_y + token * D + one, one == 0, key_gain, cosines,
            sines, key_eps, D, R, WIDTH, True, True, BACK, INTERLEAVED,
        )  # fmt: skip
    else:
        head = block * HEADS + tl.arange(0, HEADS)
        rotate_rows(
            x + token * x_token + head * x_head, y + (token * heads + head) * D, head < heads, gain,
            cosines, sines, eps, D, R, WIDTH, NORMED, GAINED, BACK, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def rotate_rows(
    rows, to, there, gain, cosines, sines, eps, D: tl.constexpr, R: tl.constexpr,
    WIDTH: tl.constexpr, NORMED: tl.constexpr, GAINED: tl.constexpr, BACK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The D numbers at each of the pointers `rows`, of those that are `there`. WIDTH: a power of
    two, at least D."""
    TYPE: tl.constexpr = to.dtype.element_ty
    channel = tl.arange(0, WIDTH)
    inside = there[:, None] & (channel < D)[None, :]
    turns = (channel >= D - R) & (channel < D)
    partner, pair, sign = partner_of(tl.maximum(channel - (D - R), 0), R, INTERLEAVED)
    if BACK:
        sign = -sign
    both, row = there[:, None] & turns[None, :], rows[:, None]
    one = tl.load(row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(row + (D - R) + partner[None, :], mask=both, other=0.0).to(tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(one * one, 1) / D + eps)[:, None]
        one *= factor
        other *= factor
        if GAINED:
            one *= tl.load(gain + channel, mask=channel < D, other=0.0).to(tl.float32)[None, :]
            gains = tl.load(gain + (D - R) + partner, mask=turns, other=0.0).to(tl.float32)
            other *= gains[None, :]
        one = rounded(one, TYPE).to(tl.float32)
        other = rounded(other, TYPE).to(tl.float32)
    cosine = tl.load(cosines + pair, mask=turns, other=1.0)
    sine = tl.load(sines + pair, mask=turns, other=0.0) * sign
    found = rounded(one * cosine[None, :] + other * sine[None, :], TYPE)
    tl.store(to[:, None] + channel[None, :], found, mask=inside)


@triton.jit
def store_recent(
    x, rings, ends, places, positions, first, x_row, spaces, length, W: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per row. Whichever of a sequence's rows have been stored, the larger end is that of
    the same copy, so programs need no order."""
    wait_for_input(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    place, position = tl.load(places + row), tl.load(positions + row)
    copy = (tl.load(ends + spaces + place) > tl.load(ends + place)).to(tl.int64)
    begin = (copy * spaces + place) * length
    some = tl.load(x + row * x_row + at, mask=at < W, other=0.0).to(rings.dtype.element_ty)
    tl.store(rings + (begin + position % length) * W + at, some, mask=at < W)
    tl.store(ends + copy * spaces + place, position + 1)
    tl.store(ends + (1 - copy) * spaces + place, -1)
    tl.store(first + row, begin)


@triton.jit
def pool_entries(
    raw, firsts, positions, table, cosines, sines, bias, gain, pages, more_bias, more_gain,
    more_pages, period, table_row, eps, more_eps,
    C: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, MORE_D: tl.constexpr,
    MORE_WIDTH: tl.constexpr, R: tl.constexpr, RATE: tl.constexpr, REACH: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per position and pool, one or two. TOKENS: taken at a time."""
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if (position + 1) % RATE == 0:
        number = position // RATE
        block = position // BLOCK
        row = tl.load(table + token * table_row + block).to(tl.int64) * PER_BLOCK
        row += number - block * BLOCK // RATE
        raw += tl.load(firsts + token) * C
        angle = token * (R // 2)
        if tl.program_id(1) == 0:
            pool_entry(
                raw, period, number, bias, gain, pages + row * D, cosines + angle, sines + angle,
                eps, C, D, WIDTH, R, RATE, REACH, TOKENS, INTERLEAVED, NORMED,
            )  # fmt: skip
        elif MORE_D > 0:
            pool_entry(
                raw + 2 * D * (REACH // RATE), period, number, more_bias, more_gain,
                more_pages + row * MORE_D, cosines + angle, sines + angle,
                more_eps, C, MORE_D, MORE_WIDTH, R, RATE, REACH, TOKENS, INTERLEAVED, NORMED,
            )  # fmt: skip


@triton.jit
def pool_entry(
    raw, period, number, bias, gain, to, cosines, sines, eps,
    C: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, RATE: tl.constexpr,
    REACH: tl.constexpr, TOKENS: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The entry of one group, by an online softmax over its tokens."""
    TYPE: tl.constexpr = to.dtype.element_ty
    WIDE: tl.constexpr = D * (REACH // RATE)
    channel, step = tl.arange(0, WIDTH), tl.arange(0, TOKENS)
    inside = channel < D
    largest = tl.full((WIDTH,), float("-inf"), tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    sums = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, REACH, TOKENS):
        own = start + step
        at = (number + 1) * RATE - REACH + own
        there = ((own < REACH) & (at >= 0))[:, None] & inside[None, :]
        half = (own // RATE * D)[:, None] + channel[None, :]
        place = raw + (tl.maximum(at, 0) % period)[:, None] * C + half
        weights = tl.load(place + WIDE, mask=there, other=0.0).to(tl.float32)
        weights += tl.load(bias + (own % RATE * WIDE)[:, None] + half, mask=there, other=0.0)
        weights = tl.where(there, weights, float("-inf"))
        top = tl.maximum(largest, tl.max(weights, 0))
        base = tl.where(top == float("-inf"), 0.0, top)
        shares, less = tl.exp(weights - base[None, :]), tl.exp(largest - base)
        total = total * less + tl.sum(shares, 0)
        values = tl.load(place, mask=there, other=0.0).to(tl.float32)
        sums = sums * less + tl.sum(shares * values, 0)
        largest = top
    pooled = rounded(tl.where(inside, sums / total, 0.0), TYPE).to(tl.float32)
    if NORMED:
        pooled *= tl.rsqrt(tl.sum(pooled * pooled, 0) / D + eps)
        pooled *= tl.load(gain + channel, mask=inside, other=0.0).to(tl.float32)
        pooled = rounded(pooled, TYPE).to(tl.float32)
        turns = (channel >= D - R) & inside
        partner, pair, sign = partner_of(tl.maximum(channel - (D - R), 0), R, INTERLEAVED)
        other = tl.gather(pooled, tl.where(turns, D - R + partner, channel), 0)
        cosine = tl.load(cosines + pair, mask=turns, other=1.0)
        sine = tl.load(sines + pair, mask=turns, other=0.0) * sign
        pooled = pooled * cosine + other * sine
    tl.store(to + channel, rounded(pooled, TYPE), mask=inside)


@triton.jit
def add_keys(query, keys, there, scale, largest, total, sums):
    """The state of an online softmax after keys at the pointers [TOKENS, D], those that are
    `there`."""
    HEADS: tl.constexpr = sums.shape[0]
    TOKENS: tl.constexpr = keys.shape[0]
    k = tl.load(keys, mask=there, other=0.0)
    scores = dot(query, tl.trans(k), tl.zeros((HEADS, TOKENS), tl.float32))
    seen = tl.max(there.to(tl.int32), 1) > 0
    scores = tl.where(seen[None, :], scores * scale, float("-inf"))
    top = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    probabilities = tl.exp2(scores - base[:, None])
    less = tl.exp2(largest - base)
    total = total * less + tl.sum(probabilities, 1)
    sums = dot(rounded(probabilities, k.dtype), k, sums * less[:, None])
    return top, total, sums


@triton.jit
def compressed_attend(
    q, positions, recent, firsts, kv, table, rows, counts, sinks, out, found, q_token, q_head,
    heads, period, window, table_row, chosen_row, splits, scale,
    HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, TOKENS: tl.constexpr,
    RATE: tl.constexpr, BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per token, HEADS heads and share of what it sees: blocks of TOKENS tokens of its
    window, then of its entries. RATE 0: no entries. scale: times log2(e).

    out [T, heads, D]; or with SPLIT float32 [T, heads, splits, D], and found [T, heads, splits],
    the logarithm to base 2 of each share's sum.
    """
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column, step = tl.arange(0, D_PADDED), tl.arange(0, TOKENS)
    is_head, whole = (head < heads)[:, None], (column < D)[None, :]
    position = tl.load(positions + token)
    query = tl.load(
        q + token * q_token + head[:, None] * q_head + column[None, :], mask=is_head & whole,
        other=0.0,
    )  # fmt: skip
    low = tl.maximum(position - window + 1, 0)
    recent_tiles = tl.cdiv(position - low + 1, TOKENS).to(tl.int32)
    tiles = recent_tiles
    if RATE > 0:
        count = (position + 1) // RATE
        if CHOSEN:
            count = tl.load(counts + token).to(tl.int64)
        tiles += tl.cdiv(count, TOKENS).to(tl.int32)
    per = tl.cdiv(tiles, splits)
    part = tl.program_id(2)
    begin, end = part * per, tl.minimum(part * per + per, tiles)
    # One more key, in the first share.
    first = (head < heads) & (part == 0)
    largest = tl.load(sinks + head, mask=first, other=float("-inf")) * 1.4426950408889634
    total = tl.where(first, 1.0, 0.0)
    sums = tl.zeros((HEADS, D_PADDED), tl.float32)
    recent += tl.load(firsts + token) * D
    for tile in tl.range(begin, tl.minimum(end, recent_tiles), num_stages=STAGES):
        at = low + tile * TOKENS + step
        keys = recent + (at % period)[:, None] * D + column[None, :]
        there = (at <= position)[:, None] & whole
        largest, total, sums = add_keys(query, keys, there, scale, largest, total, sums)
    if RATE > 0:
        for tile in tl.range(tl.maximum(begin, recent_tiles), end, num_stages=STAGES):
            number = (tile - recent_tiles) * TOKENS + step
            inside = number < count
            if CHOSEN:
                place = tl.load(rows + token * chosen_row + number, mask=inside, other=0)
                place = place.to(tl.int64)
            else:
                block = ((number + 1) * RATE - 1) // BLOCK
                place = tl.load(table + token * table_row + block, mask=inside, other=0)
                place = place.to(tl.int64) * PER_BLOCK + number - block * BLOCK // RATE
            keys = kv + place[:, None] * D + column[None, :]
            there = inside[:, None] & whole
            largest, total, sums = add_keys(query, keys, there, scale, largest, total, sums)
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    to = (token * heads + head) * splits + part
    tl.store(
        out + to[:, None] * D + column[None, :], rounded(result, out.dtype.element_ty),
        mask=is_head & whole,
    )  # fmt: skip
    if SPLIT:
        tl.store(found + to, largest + tl.log2(total), mask=head < heads)
