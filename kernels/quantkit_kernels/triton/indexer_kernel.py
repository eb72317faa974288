# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""The indexer of sparse attention: keys normed, rotated and stored; scores over paged keys; and the
highest scores of a row, by bisection of their bits."""

import triton
import triton.language as tl

from quantkit_kernels.triton.rope_kernel import partner_of
from quantkit_kernels.triton.weights_kernel import dot, rounded, wait_for_input


@triton.jit
def index_prepare(
    q, k, gain, shift, cosines, sines, slots, out, keys, heads, q_token, q_head, k_token, eps,
    D: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    CENTRED: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per token and HEADS heads, and one for its key. WIDTH: a power of two, at least
    D."""
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside, turns = channel < D, channel < R
    partner, pair, sign = partner_of(channel, R, INTERLEAVED)
    angle = token * (R // 2) + pair
    cosine = tl.load(cosines + angle, mask=turns, other=1.0)
    sine = tl.load(sines + angle, mask=turns, other=0.0) * sign
    if tl.program_id(1) == tl.num_programs(1) - 1:
        one = tl.load(k + token * k_token + channel, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(k + token * k_token + partner, mask=turns, other=0.0).to(tl.float32)
        if CENTRED:
            mean = tl.sum(one, 0) / D
            one = tl.where(inside, one - mean, 0.0)
            other -= mean
        factor = tl.rsqrt(tl.sum(one * one, 0) / D + eps)
        one *= factor * tl.load(gain + channel, mask=inside, other=0.0)
        other *= factor * tl.load(gain + partner, mask=turns, other=0.0)
        if CENTRED:
            one += tl.load(shift + channel, mask=inside, other=0.0)
            other += tl.load(shift + partner, mask=turns, other=0.0)
        one = rounded(one, k.dtype.element_ty).to(tl.float32)
        other = rounded(other, k.dtype.element_ty).to(tl.float32)
        rotated_key = rounded(one * cosine + other * sine, k.dtype.element_ty).to(tl.float32)
        to = keys + tl.load(slots + token) * D + channel
        tl.store(to, rounded(rotated_key, keys.dtype.element_ty), mask=inside)
    else:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        there = (head < heads)[:, None]
        row = q + token * q_token + head[:, None] * q_head
        query = tl.load(row + channel[None, :], mask=there & inside[None, :], other=0.0)
        pairs = tl.load(row + partner[None, :], mask=there & turns[None, :], other=0.0)
        both = query.to(tl.float32) * cosine[None, :] + pairs.to(tl.float32) * sine[None, :]
        at = out + (token * heads + head[:, None]) * D + channel[None, :]
        tl.store(at, rounded(both, out.dtype.element_ty), mask=there & inside[None, :])


@triton.jit
def index_scores(
    q, weights, keys, table, positions, scores, tokens, table_row, table_width, score_row,
    H: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """scores float32 [tokens, score_row] of the keys up to each token. A program per TOKENS tokens,
    which share a row of the table, and every so manieth block of KEYS keys."""
    wait_for_input(PDL)
    first = tl.program_id(0) * TOKENS
    of_row = first * H + tl.arange(0, TOKENS * H)
    is_row = of_row < tokens * H
    channel = tl.arange(0, D)
    query = tl.load(
        q + of_row.to(tl.int64)[:, None] * D + channel[None, :], mask=is_row[:, None], other=0.0
    )
    weight = tl.load(weights + of_row, mask=is_row, other=0.0)
    token = first + tl.arange(0, TOKENS)
    position = tl.load(positions + token, mask=token < tokens, other=-1).to(tl.int32)
    seen = tl.minimum(tl.max(position, 0) + 1, table_width * PAGE)
    table += first.to(tl.int64) * table_row
    to = scores + token.to(tl.int64)[None, :] * score_row
    step = tl.num_programs(1) * KEYS
    for start in tl.range(tl.program_id(1) * KEYS, seen, step, num_stages=STAGES):
        at = start + tl.arange(0, KEYS)
        there = at < seen
        places = tl.load(table + at // PAGE, mask=there, other=0).to(tl.int64) * PAGE + at % PAGE
        key = tl.load(keys + places[:, None] * D + channel[None, :], mask=there[:, None], other=0.0)
        products = dot(key, tl.trans(query), tl.zeros((KEYS, TOKENS * H), tl.float32))
        products = tl.maximum(products, 0.0) * weight[None, :]
        found = tl.sum(tl.reshape(products, (KEYS, TOKENS, H)), 2)
        found = tl.where(found == 0.0, 0.0, found)  # no -0, whose bits differ
        tl.store(to + at[:, None], found, mask=at[:, None] <= position[None, :])


@triton.jit
def ordered(value):
    """float32 as int32 in the same order; what is not larger than -inf, NaN too, as the least."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value > float("-inf"), bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)


@triton.jit
def threshold(key, count):
    """The largest number that `count` of the keys reach."""
    least = tl.full((), -2147483648, tl.int32)
    for step in range(32):
        candidate = least + (tl.full((), 1, tl.int32) << (31 - step))
        if tl.sum((key >= candidate).to(tl.int32), 0) >= count:
            least = candidate
    return least


@triton.jit
def highest(key, count):
    """Which of the keys are the `count` highest, the first of equal ones, and how many of these are
    before each."""
    least = tl.full((), -2147483648, tl.int32)
    if tl.sum((key > least).to(tl.int32), 0) > count:
        least = threshold(key, count)
    above, equal = (key > least).to(tl.int32), (key == least).to(tl.int32)
    room = count - tl.sum(above, 0)
    both = above + (equal << 16)
    before = tl.cumsum(both, 0) - both
    equal_before = before >> 16
    chosen = (above > 0) | ((equal > 0) & (equal_before < room))
    return chosen, (before & 0xFFFF) + tl.minimum(equal_before, room)


@triton.jit
def select_highest(
    scores, columns, table, positions, out_scores, out_columns, slots, counts, score_row, width,
    table_row, k,
    SEGMENT: tl.constexpr, PAGE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program per token and segment of its `width` scores: the k highest, in their order.

    FIRST: the scores are those of all columns up to the token, else of `columns` and -inf for none.
    out_columns has k places a segment. LAST: there is one; slots receives where these tokens are
    cached, counts how many are valid; else out_scores their scores.
    """
    wait_for_input(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seen = (tl.load(positions + token) + 1).to(tl.int32)
    end = width
    if FIRST:
        end = tl.minimum(seen, width)
    at = part * SEGMENT + tl.arange(0, SEGMENT)
    key = ordered(tl.load(scores + token * score_row + at, mask=at < end, other=float("-inf")))
    count = tl.minimum(tl.sum((key > -2147483648).to(tl.int32), 0), k)
    chosen, place = highest(key, count)
    column = at
    if not FIRST:
        column = tl.load(columns + token * score_row + at, mask=chosen, other=0)
    to = (token * tl.num_programs(1) + part) * k
    tl.store(out_columns + to + place, column, mask=chosen)
    rest = tl.arange(0, SEGMENT)
    unused = (rest >= count) & (rest < k)
    if LAST:
        block = tl.load(table + token * table_row + column // PAGE, mask=chosen, other=0)
        tl.store(slots + to + place, block.to(tl.int32) * PAGE + column % PAGE, mask=chosen)
        tl.store(slots + to + rest, 0, mask=unused)
        tl.store(counts + token, tl.minimum(seen, k))
    else:
        score = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(out_scores + to + place, score, mask=chosen)
        tl.store(out_scores + to + rest, float("-inf"), mask=unused)


@triton.jit
def set_bits(positions, counts, words, k, word_row, WIDTH: tl.constexpr):
    """A program per token: bit p % 32 of its word p // 32 for each of its positions p. WIDTH: a
    power of two, at least k."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    valid = place < tl.load(counts + token)
    position = tl.load(positions + token * k + place, mask=valid, other=0)
    bit = tl.full((WIDTH,), 1, tl.int32) << (position % 32)
    tl.atomic_or(words + token * word_row + position // 32, bit, mask=valid, sem="relaxed")
