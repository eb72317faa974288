# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""The indexer of sparse attention: keys normed, rotated and stored; scores over paged keys; and the
highest scores of a row, by a threshold that is found by counting."""

import triton
import triton.language as tl

from quantkit_kernels.triton.codes_kernel import FP8_CODES, decoded, nearest_code
from quantkit_kernels.triton.rope_kernel import partner_of
from quantkit_kernels.triton.weights_kernel import INTERPRETED, dot, rounded, wait_for_input


@triton.jit
def index_prepare(
    q, k, gain, shift, cosines, sines, slots, out, keys, scales, heads, q_token, q_head, k_token,
    eps,
    D: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    CENTRED: tl.constexpr, INTERLEAVED: tl.constexpr, CODED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per token and HEADS heads, and one for its key. WIDTH: a power of two, at least D.
    CODED: keys are FP8 codes, with scales; keys and queries are multiplied by the Hadamard matrix
    of D = WIDTH before."""
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside, turns = channel < D, channel < R
    partner, pair, sign = partner_of(channel, R, INTERLEAVED)
    angle = token * (R // 2) + pair
    common = channel[:, None] & channel[None, :]  # Sylvester's: -1 where an odd number of bits are
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    signs = (1 - 2 * (common & 1)).to(tl.float32)
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
        slot = tl.load(slots + token)
        to = keys + slot * D + channel
        if CODED:
            spread = tl.sum(rotated_key[:, None] * signs, 0) * D**-0.5
            spread = rounded(spread, k.dtype.element_ty).to(tl.float32)
            unit = unit_of(tl.max(tl.abs(spread), 0))
            scale = unit.to(tl.float32, bitcast=True)
            inverse = (0x7F000000 - unit).to(tl.float32, bitcast=True)
            tl.store(to, nearest_code(spread * inverse, FP8_CODES))
            tl.store(scales + slot, scale)
        else:
            tl.store(to, rounded(rotated_key, keys.dtype.element_ty), mask=inside)
    else:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        there = (head < heads)[:, None]
        row = q + token * q_token + head[:, None] * q_head
        query = tl.load(row + channel[None, :], mask=there & inside[None, :], other=0.0)
        pairs = tl.load(row + partner[None, :], mask=there & turns[None, :], other=0.0)
        both = query.to(tl.float32) * cosine[None, :] + pairs.to(tl.float32) * sine[None, :]
        at = out + (token * heads + head[:, None]) * D + channel[None, :]
        if CODED:
            both = rounded(both, q.dtype.element_ty)
            both = dot(both, signs.to(both.dtype), tl.zeros((HEADS, WIDTH), tl.float32)) * D**-0.5
        tl.store(at, rounded(both, out.dtype.element_ty), mask=there & inside[None, :])


@triton.jit
def index_scores(
    q, weights, keys, scales, table, positions, scores, tokens, table_row, table_width, score_row,
    H: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, CODED: tl.constexpr, FP8: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """scores float32 [tokens, score_row] of the keys up to each token. A program per TOKENS tokens,
    which share a row of the table, and every so manieth block of KEYS keys. CODED: keys are FP8
    codes, with scales, and queries are rounded to such; FP8: codes are multiplied as they are."""
    wait_for_input(PDL)
    first = tl.program_id(0) * TOKENS
    of_row = first * H + tl.arange(0, TOKENS * H)
    is_row = of_row < tokens * H
    channel = tl.arange(0, D)
    query = tl.load(
        q + of_row.to(tl.int64)[:, None] * D + channel[None, :], mask=is_row[:, None], other=0.0
    )
    weight = tl.load(weights + of_row, mask=is_row, other=0.0)
    TYPE: tl.constexpr = q.dtype.element_ty
    if CODED:
        wide = query.to(tl.float32)
        unit = unit_of(tl.max(tl.abs(wide), 1))
        weight *= unit.to(tl.float32, bitcast=True)
        inverse = (0x7F000000 - unit).to(tl.float32, bitcast=True)  # of a power of two, exactly
        wide *= inverse[:, None]
        if not FP8:
            query = decoded(nearest_code(wide, FP8_CODES), FP8_CODES, TYPE)
        else:  # keys by the pointer's type, so that loads are issued ahead
            keys = keys.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
            if INTERPRETED:
                query = nearest_code(wide, FP8_CODES).to(tl.float8e4nv, bitcast=True)
            else:
                query = wide.to(tl.float8e4nv)
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
        if CODED and not FP8:
            key = decoded(key, FP8_CODES, TYPE)
        products = dot(key, tl.trans(query), tl.zeros((KEYS, TOKENS * H), tl.float32))
        products = tl.maximum(products, 0.0) * weight[None, :]
        found = tl.sum(tl.reshape(products, (KEYS, TOKENS, H)), 2)
        if CODED:
            found *= tl.load(scales + places, mask=there, other=0.0)[:, None]
        found = tl.where(found == 0.0, 0.0, found)  # no -0, whose bits differ
        tl.store(to + at[:, None], found, mask=at[:, None] <= position[None, :])


@triton.jit
def unit_of(largest):
    """The bits of what code 1 of FP8 is worth for numbers up to `largest`, float32: the least power
    of two that is not below largest / 448 and 1e-10."""
    bits = largest.to(tl.int32, bitcast=True)  # 448 = 1.75 * 2^8
    return tl.maximum(((bits + 0x1FFFFF) & 0x7F800000) - 0x04000000, 0x2F000000)


@triton.jit
def ordered(value):
    """float32 as int32 in the same order; what is not larger than -inf, NaN too, as the least."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value > float("-inf"), bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)


@triton.jit
def value_of(key):
    """The inverse of `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def thresholds(scores, valid, count):
    """high, low and how many reach high: the `count` highest of `valid` scores above -inf are those,
    and if there are fewer, the first of those equal to low.

    Between two bounds the number of scores is taken to be linear in them, and a bound that stays
    weighs half as much each time (the Illinois method): some 9 rounds for 8192 scores, where
    halving their keys takes 17. From the twelfth on these are halved."""
    low = tl.full((), -2139095040, tl.int32)  # the least finite number
    high, above = low, valid
    if valid > count:
        low = ordered(tl.min(tl.where(scores > float("-inf"), scores, float("inf")), 0))
        high = ordered(tl.max(scores, 0)) + 1
        reach, above = valid, valid * 0  # how many reach low, and high
        over, under = (valid - count).to(tl.float32), count.to(tl.float32)
        rounds, stayed = above, above
        while (reach > count) & (low + 1 < high):
            share = over / (over + under)
            guess = ordered(value_of(low) * (1 - share) + value_of(high) * share)
            if rounds >= 12:
                guess = (low & high) + ((low ^ high) >> 1)
            guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
            found = tl.sum((scores >= value_of(guess)).to(tl.int32), 0)
            if found >= count:
                low, reach, over = guess, found, (found - count).to(tl.float32)
                under = tl.where(stayed > 0, under * 0.5, under)
                stayed = tl.full((), 1, tl.int32)
            else:
                high, above, under = guess, found, (count - found).to(tl.float32)
                over = tl.where(stayed < 0, over * 0.5, over)
                stayed = tl.full((), -1, tl.int32)
            rounds += 1
        if reach == count:
            high, above = low, reach
    return value_of(high), value_of(low), above


@triton.jit
def select_highest(
    scores, columns, table, positions, out_scores, out_columns, slots, counts, score_row, width,
    table_row, k,
    SEGMENT: tl.constexpr, AT_ONCE: tl.constexpr, PAGE: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per token and segment of its `width` scores: the k highest, the first of equal
    ones, in their order. All are in registers until it is known which they are; they are written
    AT_ONCE at a time, so that four programs fit a multiprocessor.

    FIRST: the scores are those of all columns up to the token, else of `columns` and -inf for none.
    out_columns has k places a segment. LAST: there is one; slots receives where these tokens are
    cached, counts how many are valid; else out_scores their scores.
    """
    wait_for_input(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seen = (tl.load(positions + token) + 1).to(tl.int32)
    begin = part * SEGMENT
    end = tl.minimum(begin + SEGMENT, width)
    if FIRST:
        end = tl.minimum(seen, end)
    row = scores + token * score_row
    at = begin + tl.arange(0, SEGMENT)
    every = tl.load(row + at, mask=at < end, other=float("-inf"))
    every = tl.where(every > float("-inf"), every, float("-inf"))  # no NaN
    valid = tl.sum((every > float("-inf")).to(tl.int32), 0)
    count = tl.minimum(valid, k)
    high, low, above = thresholds(every, valid, count)
    until = begin  # before it lie those equal to low that are chosen
    if above < count:
        for start in tl.range(begin, end, AT_ONCE):
            column = start + tl.arange(0, AT_ONCE)
            equal = tl.load(row + column, mask=column < end, other=float("-inf")) == low
            first = equal & (above + tl.cumsum(equal.to(tl.int32), 0) <= count)
            until = tl.maximum(until, tl.max(tl.where(first, column + 1, 0), 0))
            above += tl.sum(equal.to(tl.int32), 0)
    to = (token * tl.num_programs(1) + part) * k
    written = tl.full((), 0, tl.int32)
    for start in tl.range(begin, end, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        score = tl.load(row + column, mask=column < end, other=float("-inf"))
        chosen = (score >= high) | ((score == low) & (column < until))
        ones = chosen.to(tl.int32)
        place = written + tl.cumsum(ones, 0) - 1
        written += tl.sum(ones, 0)
        if not FIRST:
            column = tl.load(columns + token * score_row + column, mask=chosen, other=0)
        tl.store(out_columns + (to + place), column, mask=chosen)
        if LAST:
            block = tl.load(table + token * table_row + column // PAGE, mask=chosen, other=0)
            tl.store(slots + (to + place), block.to(tl.int32) * PAGE + column % PAGE, mask=chosen)
        else:
            tl.store(out_scores + (to + place), score, mask=chosen)
    for start in tl.range(count, k, AT_ONCE):
        unused = start + tl.arange(0, AT_ONCE)
        if LAST:
            tl.store(slots + to + unused, 0, mask=unused < k)
        else:
            tl.store(out_scores + to + unused, float("-inf"), mask=unused < k)
    if LAST:
        tl.store(counts + token, tl.minimum(seen, k))


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
