# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Linear attention by a gated delta rule (quantkit_kernels/delta.py): a decode step in one launch;
prompts by chunks, whose updates are the solution of a triangular system. Arithmetic is float32.

Every program finds its sequence's copy of the state by the number of tokens in it, and writes the
other copy. The number written never equals the one looked for, so programs of a launch need no
order."""

import triton
import triton.language as tl

from quantkit_kernels.triton.weights_kernel import rounded, wait_for_input

EPS = tl.constexpr(1e-6)
"""Of the norms of queries and keys."""


@triton.jit
def delta_step(
    q, k, v, gate, decay, rate, q_token, q_group, k_token, k_group, v_token, v_group, v_head,
    gate_token, gate_group, gate_head, decay_token, decay_group, decay_head, rate_token, rate_group,
    rate_head, convolution, speed, bias, norm, recent, memory, tokens, where, positions, out,
    places, groups, eps, lower,
    R: tl.constexpr, D: tl.constexpr, V: tl.constexpr, K: tl.constexpr, D_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, BY_CHANNEL: tl.constexpr, SIGMOID: tl.constexpr,
    BOUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per row and value head. D_WIDTH, V_WIDTH: powers of two. x_token, x_group, x_head:
    strides."""
    wait_for_input(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, own = head // R, head % R
    place, position = tl.load(where + row), tl.load(positions + row)
    copy = (tl.load(tokens + places + place) == position).to(tl.int64)
    channels, keys, started = groups * (2 * D + R * V), groups * D, position > 0
    now = recent + (copy * places + place) * (K - 1) * channels
    after = recent + ((1 - copy) * places + place) * (K - 1) * channels
    at, to = tl.arange(0, D_WIDTH), tl.arange(0, V_WIDTH)

    queries = convolved(
        q + row * q_token + group * q_group, now, after, convolution, group * D, at, D, started,
        own == 0, channels, K,
    )  # fmt: skip
    queries *= tl.rsqrt(tl.sum(queries * queries, 0) + EPS) * D**-0.5
    one = convolved(
        k + row * k_token + group * k_group, now, after, convolution, keys + group * D, at, D,
        started, own == 0, channels, K,
    )  # fmt: skip
    one *= tl.rsqrt(tl.sum(one * one, 0) + EPS)
    values = convolved(
        v + row * v_token + group * v_group + own * v_head, now, after, convolution,
        2 * keys + head * V, to, V, started, True, channels, K,
    )  # fmt: skip

    speeds = tl.load(speed + head)
    decay += row * decay_token + group * decay_group + own * decay_head
    if BY_CHANNEL:
        shift = tl.load(bias + head * D + at, mask=at < D, other=0.0)
        some = tl.load(decay + at, mask=at < D, other=0.0) + shift
        left = decayed(some, speeds, lower, BOUNDED)[:, None]
    else:
        left = decayed(tl.load(decay) + tl.load(bias + head), speeds, lower, BOUNDED)
    beta = tl.sigmoid(tl.load(rate + row * rate_token + group * rate_group + own * rate_head))

    state = (head * D + at[:, None]) * V + to[None, :]
    inside, size = (at < D)[:, None] & (to < V)[None, :], groups * R * D * V
    memories = tl.load(
        memory + (copy * places + place) * size + state, mask=inside & started, other=0.0
    )
    memories *= tl.exp(left)
    learned = (values - tl.sum(one[:, None] * memories, 0)) * beta
    memories += one[:, None] * learned[None, :]
    tl.store(memory + ((1 - copy) * places + place) * size + state, memories, mask=inside)
    if head == 0:
        tl.store(tokens + (1 - copy) * places + place, position + 1)

    attended = tl.sum(queries[:, None] * memories, 0)
    attended *= tl.rsqrt(tl.sum(attended * attended, 0) / V + eps)
    gates = gate + row * gate_token + group * gate_group + own * gate_head
    gated = gated_norm(attended, norm, gates + to, to, V, to < V, SIGMOID)
    to_row = out + (row * groups * R + head) * V + to
    tl.store(to_row, rounded(gated, out.dtype.element_ty), mask=to < V)


@triton.jit
def convolved(
    x, now, after, convolution, first, at, width, started, stores, channels, K: tl.constexpr
):
    """SiLU of the convolution of a token's channels from `first` on, x being its own; `now`: the
    inputs before it, of which all but the oldest, and x, are those `after` it."""
    inside, channel = at < width, first + at
    new = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total = new * tl.load(convolution + channel * K + K - 1, mask=inside, other=0.0)
    for i in tl.static_range(K - 1):
        old = tl.load(now + i * channels + channel, mask=inside & started, other=0.0)
        total += old * tl.load(convolution + channel * K + i, mask=inside, other=0.0)
        if i > 0:
            tl.store(after + (i - 1) * channels + channel, old, mask=inside & stores)
    if K > 1:
        tl.store(after + (K - 2) * channels + channel, new, mask=inside & stores)
    return total * tl.sigmoid(total)


@triton.jit
def decayed(values, speed, lower, BOUNDED: tl.constexpr):
    """-speed softplus(values), or with a lower bound lower sigmoid(speed values)."""
    if BOUNDED:
        made = lower * tl.sigmoid(speed * values)
    else:
        made = -speed * (tl.maximum(values, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(values))))
    return made


@triton.jit
def gated_norm(normed, norm, gate, at, width, inside, SIGMOID: tl.constexpr):
    """normed times the gain of its `width` channels and the activation of its gate."""
    gates = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(norm + at, mask=at < width, other=0.0).to(tl.float32)
    active = tl.sigmoid(gates)
    if not SIGMOID:
        active *= gates
    return normed * gain * active


@triton.jit
def convolve_prompts(
    q, k, v, q_token, q_group, k_token, k_group, v_token, v_group, v_head, convolution, recent,
    tokens, spans, chunks, queries, keys, values, places, groups,
    R: tl.constexpr, D: tl.constexpr, V: tl.constexpr, K: tl.constexpr, D_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, K_WIDTH: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per chunk and head, of queries, keys and values: float32 queries and keys [T, G,
    D], normed, and values [T, G R, V]; and the inputs after each sequence."""
    wait_for_input(PDL)
    span = spans + 5 * tl.load(chunks + 2 * tl.program_id(0))
    number, head = tl.load(chunks + 2 * tl.program_id(0) + 1), tl.program_id(1)
    place, start = tl.load(span).to(tl.int64), tl.load(span + 1)
    first, length = tl.load(span + 2).to(tl.int64), tl.load(span + 3)
    channels, size = groups * (2 * D + R * V), (K - 1) * groups * (2 * D + R * V)
    copy = (tl.load(tokens + places + place) == start).to(tl.int64)
    now = recent + (copy * places + place) * size
    after = recent + ((1 - copy) * places + place) * size
    at, to = tl.arange(0, D_WIDTH), tl.arange(0, V_WIDTH)
    rows = number * CHUNK + tl.arange(0, CHUNK)
    last = length - (K - 1) + tl.arange(0, K_WIDTH)
    last = tl.where(tl.arange(0, K_WIDTH) < K - 1, last, length)
    ends = (number + 1) * CHUNK >= length
    if head < 2 * groups:
        group = head % groups
        x, kept = q + first * q_token + group * q_group, queries
        if head >= groups:
            x, kept = k + first * k_token + group * k_group, keys
        stride = tl.where(head < groups, q_token, k_token)
        some = convolved_rows(
            x, stride, now, convolution, head * D, at, rows, D, length, start > 0, channels, K
        )
        some *= tl.rsqrt(tl.sum(some * some, 1) + EPS)[:, None]
        some *= tl.where(head < groups, D**-0.5, 1.0)
        where = ((first + rows) * groups + group)[:, None] * D + at[None, :]
        tl.store(kept + where, some, mask=(rows < length)[:, None] & (at < D)[None, :])
        if ends:
            keep_last(x, stride, now, after, head * D, at, last, D, length, start > 0, channels, K)
    else:
        own = head - 2 * groups
        x = v + first * v_token + own // R * v_group + own % R * v_head
        lane = 2 * groups * D + own * V
        value = convolved_rows(
            x, v_token, now, convolution, lane, to, rows, V, length, start > 0, channels, K
        )
        known = ((first + rows) * groups * R + own)[:, None] * V + to[None, :]
        tl.store(values + known, value, mask=(rows < length)[:, None] & (to < V)[None, :])
        if ends:
            keep_last(x, v_token, now, after, lane, to, last, V, length, start > 0, channels, K)


@triton.jit
def convolved_rows(
    x, stride, now, convolution, first, at, rows, width, length, started, channels, K: tl.constexpr
):
    """As `convolved`, of tokens `rows` of `length` new ones."""
    inside = (at < width)[None, :] & (rows < length)[:, None]
    total = tl.zeros((rows.shape[0], at.shape[0]), tl.float32)
    for i in tl.static_range(K):
        some = input_rows(
            x, stride, now, first, at, rows + (i - K + 1), inside, started, channels, K
        )
        weight = tl.load(convolution + (first + at) * K + i, mask=at < width, other=0.0)
        total += some * weight[None, :]
    return total * tl.sigmoid(total)


@triton.jit
def input_rows(x, stride, now, first, at, rows, inside, started, channels, K: tl.constexpr):
    """Inputs of tokens `rows`, negative ones before the new tokens."""
    new = inside & (rows >= 0)[:, None]
    some = tl.load(x + rows.to(tl.int64)[:, None] * stride + at[None, :], mask=new, other=0.0).to(
        tl.float32
    )
    before = now + (rows + (K - 1))[:, None] * channels + (first + at)[None, :]
    old = inside & (rows < 0)[:, None] & started
    return some + tl.load(before, mask=old, other=0.0)


@triton.jit
def keep_last(
    x, stride, now, after, first, at, rows, width, length, started, channels, K: tl.constexpr
):
    """Inputs of tokens `rows`, those below `length`, to where they are kept for the next pass."""
    inside = (at < width)[None, :] & (rows < length)[:, None]
    some = input_rows(x, stride, now, first, at, rows, inside, started, channels, K)
    to = after + (rows - length + K - 1)[:, None] * channels + (first + at)[None, :]
    tl.store(to, some, mask=inside)


@triton.jit
def solve_chunks(
    queries, keys, decay, rate, decay_token, decay_group, decay_head, rate_token, rate_group,
    rate_head, speed, bias, spans, chunks, past, solved, scores, groups, lower,
    R: tl.constexpr, D: tl.constexpr, D_WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per chunk and value head, whose results do not depend on the state: past [T, G R]
    or [T, G R, D], the sums of decays from the chunk's start on; solved [T, G R, CHUNK], the
    inverse of the triangular system times beta; scores [T, G R, CHUNK] of queries and keys,
    decayed from a key's time to a query's."""
    wait_for_input(PDL)
    span = spans + 5 * tl.load(chunks + 2 * tl.program_id(0))
    number, head = tl.load(chunks + 2 * tl.program_id(0) + 1), tl.program_id(1)
    group, own, heads = head // R, head % R, groups * R
    first = tl.load(span + 2).to(tl.int64) + number * CHUNK
    count = tl.load(span + 3) - number * CHUNK
    row, at, column = tl.arange(0, CHUNK), tl.arange(0, D_WIDTH), tl.arange(0, CHUNK)
    inside = (row < count)[:, None] & (at < D)[None, :]
    where = ((first + row) * groups + group)[:, None] * D
    system = tl.zeros((CHUNK, CHUNK), tl.float32)
    score = tl.zeros((CHUNK, CHUNK), tl.float32)
    rate += group * rate_group + own * rate_head
    beta = tl.sigmoid(tl.load(rate + (first + row) * rate_token, mask=row < count, other=0.0))
    decay += (first + row) * decay_token + group * decay_group + own * decay_head
    speeds = tl.load(speed + head)
    if BY_CHANNEL:
        shift = tl.load(bias + head * D + at, mask=at < D, other=0.0)
        some = tl.load(decay[:, None] + at[None, :], mask=inside, other=0.0) + shift[None, :]
        sums = tl.cumsum(tl.where(inside, decayed(some, speeds, lower, BOUNDED), 0.0), 0)
        to = ((first + row) * heads + head)[:, None] * D + at[None, :]
        tl.store(past + to, sums, mask=inside)
        one = tl.load(keys + where + at[None, :], mask=inside, other=0.0)
        query = tl.load(queries + where + at[None, :], mask=inside, other=0.0)
        tl.debug_barrier()  # the rows of `past` below are other threads'
        for j in range(tl.minimum(count, CHUNK)):
            other = tl.load(keys + ((first + j) * groups + group) * D + at, mask=at < D, other=0.0)
            then = tl.load(past + ((first + j) * heads + head) * D + at, mask=at < D, other=0.0)
            weighed = other[None, :] * tl.exp(tl.minimum(sums - then[None, :], 0.0))
            here = column[None, :] == j
            system = tl.where(here, tl.sum(one * weighed, 1)[:, None], system)
            score = tl.where(here, tl.sum(query * weighed, 1)[:, None], score)
    else:
        some = tl.load(decay, mask=row < count, other=0.0) + tl.load(bias + head)
        sums = tl.cumsum(tl.where(row < count, decayed(some, speeds, lower, BOUNDED), 0.0), 0)
        tl.store(past + (first + row) * heads + head, sums, mask=row < count)
        # The same sums by column: equal to those by row, from which a layout has them.
        across = tl.sum(tl.where(row[:, None] == column[None, :], sums[:, None], 0.0), 0)
        between = tl.exp(tl.minimum(sums[:, None] - across[None, :], 0.0))
        for begin in range(0, D, 32):
            slices = where + begin + tl.arange(0, 32)[None, :]
            mask = (row < count)[:, None] & (begin + tl.arange(0, 32) < D)[None, :]
            one = tl.load(keys + slices, mask=mask, other=0.0)
            query = tl.load(queries + slices, mask=mask, other=0.0)
            system = tl.dot(one, tl.trans(one), system, input_precision=PRECISION)
            score = tl.dot(query, tl.trans(one), score, input_precision=PRECISION)
        system *= between
        score *= between
    score = tl.where(row[:, None] >= column[None, :], score, 0.0)
    system = tl.where(row[:, None] > column[None, :], system * beta[:, None], 0.0)
    # Row i of the inverse of 1 + system: that of 1, less the rows before it.
    below = tl.trans(system)
    inverse = tl.where(row[:, None] == column[None, :], 1.0, 0.0)
    for i in range(1, tl.minimum(count, CHUNK)):
        factors = tl.sum(tl.where(column[None, :] == i, below, 0.0), 1)
        less = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(row[:, None] == i, inverse - less[None, :], inverse)
    rates = tl.sum(tl.where(row[:, None] == column[None, :], beta[:, None], 0.0), 0)
    to = ((first + row) * heads + head)[:, None] * CHUNK + column[None, :]
    tl.store(solved + to, inverse * rates[None, :], mask=(row < count)[:, None])
    tl.store(scores + to, score, mask=(row < count)[:, None])


@triton.jit
def pass_chunks(
    queries, keys, values, past, solved, scores, memory, tokens, spans, attended, places, groups,
    R: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, BY_CHANNEL: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per sequence, value head and BLOCK channels of the values: chunk after chunk,
    attended float32 [T, G R, V] and the state after all. PART: key channels of a product, D or half
    of it."""
    wait_for_input(PDL)
    span, head, heads = spans + 5 * tl.program_id(0), tl.program_id(1), groups * R
    place, start = tl.load(span).to(tl.int64), tl.load(span + 1)
    first, length = tl.load(span + 2).to(tl.int64), tl.load(span + 3)
    copy = (tl.load(tokens + places + place) == start).to(tl.int64)
    at, to = tl.arange(0, PART), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row, column = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
    state = (head * D + at[:, None]) * V + to[None, :]
    before = memory + (copy * places + place) * heads * D * V + state
    after = memory + ((1 - copy) * places + place) * heads * D * V + state
    inside, started = (at < D)[:, None] & (to < V)[None, :], start > 0
    memories = tl.load(before, mask=inside & started, other=0.0)
    if D > PART:
        further = (PART + at < D)[:, None] & (to < V)[None, :]
        more = tl.load(before + PART * V, mask=further & started, other=0.0)
    for begin in range(0, length, CHUNK):
        rows, here = first + begin + row, begin + row < length
        final = first + tl.minimum(begin + CHUNK, length) - 1
        known = (rows * heads + head)[:, None] * V + to[None, :]
        valued = here[:, None] & (to < V)[None, :]
        value = tl.load(values + known, mask=valued, other=0.0)
        square = (rows * heads + head)[:, None] * CHUNK + column[None, :]
        system = tl.load(solved + square, mask=here[:, None], other=0.0)
        score = tl.load(scores + square, mask=here[:, None], other=0.0)
        query, key, last, left = part_of(
            queries, keys, past, rows, here, final, head, heads, at, R, D, BY_CHANNEL
        )
        value -= tl.dot(key, memories, input_precision=PRECISION)
        found = tl.dot(query, memories, input_precision=PRECISION)
        if D > PART:
            query, key, last_more, left_more = part_of(
                queries, keys, past, rows, here, final, head, heads, PART + at, R, D, BY_CHANNEL
            )
            value -= tl.dot(key, more, input_precision=PRECISION)
            found = tl.dot(query, more, found, input_precision=PRECISION)
        learned = tl.dot(system, value, input_precision=PRECISION)
        found = tl.dot(score, learned, found, input_precision=PRECISION)
        tl.store(attended + known, found, mask=valued)
        memories = tl.dot(tl.trans(last), learned, memories * left, input_precision=PRECISION)
        if D > PART:
            more = tl.dot(tl.trans(last_more), learned, more * left_more, input_precision=PRECISION)
    tl.store(after, memories, mask=inside)
    if D > PART:
        tl.store(after + PART * V, more, mask=further)
    if head + tl.program_id(2) == 0:
        tl.store(tokens + (1 - copy) * places + place, (start + length).to(tl.int64))


@triton.jit
def part_of(
    queries, keys, past, rows, here, final, head, heads, at, R: tl.constexpr, D: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Channels `at` of a chunk's queries and keys, decayed from the chunk's start, keys also to its
    end, which is token `final`; and what is left of the state then."""
    inside = here[:, None] & (at < D)[None, :]
    where = (rows * (heads // R) + head // R)[:, None] * D + at[None, :]
    key = tl.load(keys + where, mask=inside, other=0.0)
    query = tl.load(queries + where, mask=inside, other=0.0)
    if BY_CHANNEL:
        to = (rows * heads + head)[:, None] * D + at[None, :]
        sums = tl.load(past + to, mask=inside, other=0.0)
        ends = tl.load(past + (final * heads + head) * D + at, mask=at < D, other=0.0)
        rest, left = tl.exp(ends[None, :] - sums), tl.exp(ends)[:, None]
    else:
        sums = tl.load(past + rows * heads + head, mask=here, other=0.0)[:, None]
        ends = tl.load(past + final * heads + head)
        rest, left = tl.exp(ends - sums), tl.exp(ends)
    sofar = tl.exp(sums)
    return query * sofar, key * sofar, key * rest, left


@triton.jit
def norm_and_gate(
    attended, gate, gate_token, gate_group, gate_head, norm, out, heads, eps,
    R: tl.constexpr, V: tl.constexpr, V_WIDTH: tl.constexpr, HEADS: tl.constexpr,
    SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """attended float32 [T, G R, V], normed over each head and gated."""
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    head, at = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, V_WIDTH)
    inside = (head < heads)[:, None] & (at < V)[None, :]
    where = (row * heads + head)[:, None] * V + at[None, :]
    some = tl.load(attended + where, mask=inside, other=0.0)
    some *= tl.rsqrt(tl.sum(some * some, 1) / V + eps)[:, None]
    gates = row * gate_token + (head // R * gate_group + head % R * gate_head)[:, None]
    gated = gated_norm(some, norm, gate + gates + at[None, :], at[None, :], V, inside, SIGMOID)
    tl.store(out + where, rounded(gated, out.dtype.element_ty), mask=inside)
