# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Attention of prompts as one Triton kernel: many queries of several sequences, over pages or over
expanded latents, with nothing but queries, keys, values and results in memory.

Keys are taken in blocks that begin at multiples of BLOCK_N of a sequence's own positions, whichever
queries are computed: a token's result is the same to the bit however its prompt was cut. Written in
Triton because its dot compiles to Hopper's asynchronous matrix instructions with copies in flight,
which mma.sync does not reach where arithmetic is the limit.
"""

import triton
import triton.language as tl

from quantkit_kernels.triton.weights_kernel import dot, rounded


@triton.jit
def attend_prompts(
    q, q_pe, keys, k_pe, values, sinks, out, lse, starts, seq_lens, table, firsts, lasts, key_rows,
    q_token, q_head, pe_token, k_token, k_head, k_pe_token, v_token, v_head, table_width, heads,
    scale, window,
    SHARED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, R: tl.constexpr,
    V: tl.constexpr, V_PADDED: tl.constexpr,
    PAGE: tl.constexpr, WINDOWED: tl.constexpr, SUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program per BLOCK_M new tokens, head and sequence; the last tokens, which see most, first.

    PAGE: tokens of a page, keys and values are paged; or 0: token t of sequence b, for firsts[b] <=
    t < lasts[b], is in row key_rows[b] + t, and lse receives the logarithm (to base 2) of each
    token's sum. scale: times log2(e). R: width of a rotary part with keys that all heads share, or
    0.
    """
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    begin = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - begin
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first_token >= new:
        return
    past = tl.load(seq_lens + sequence) - new
    rows = first_token + tl.arange(0, BLOCK_M)
    valid = rows < new
    tokens = (begin + rows).to(tl.int64)
    columns, v_columns = tl.arange(0, D_PADDED), tl.arange(0, V_PADDED)
    query = tl.load(
        q + tokens[:, None] * q_token + head * q_head + columns[None, :],
        mask=valid[:, None] & (columns[None, :] < D),
        other=0.0,
    )
    rotary = query
    if R > 0:
        pe_columns = tl.arange(0, R)
        rotary = tl.load(
            q_pe + tokens[:, None] * pe_token + head * R + pe_columns[None, :],
            mask=valid[:, None],
            other=0.0,
        )
    positions = past + rows
    low = 0
    high = past + tl.minimum(first_token + BLOCK_M, new)
    row0 = 0
    if PAGE == 0:
        low = tl.load(firsts + sequence)
        high = tl.minimum(high, tl.load(lasts + sequence))
        row0 = tl.load(key_rows + sequence)
    if WINDOWED:
        low = tl.maximum(low, (past + first_token - window + 1) // BLOCK_N * BLOCK_N)
    # Up to here every token sees every key of a block.
    whole = low + tl.maximum(tl.minimum(past + first_token + 1, high) - low, 0) // BLOCK_N * BLOCK_N
    if WINDOWED:
        whole = low
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SUNK:  # one more key, which every token sees
        largest = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks + head) * 1.4426950408889634
        total += 1.0
    sums = tl.zeros((BLOCK_M, V_PADDED), tl.float32)
    kv_head = head // SHARED
    keys += kv_head * k_head
    values += kv_head * v_head
    for start in tl.range(low, whole, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        if PAGE > 0:
            places = (
                tl.load(table + sequence * table_width + at // PAGE).to(tl.int64) * PAGE + at % PAGE
            )
        else:
            places = (row0 + at).to(tl.int64)
        if D == D_PADDED:
            k = tl.load(keys + places[:, None] * k_token + columns[None, :])
        else:
            k = tl.load(
                keys + places[:, None] * k_token + columns[None, :],
                mask=columns[None, :] < D,
                other=0.0,
            )
        scores = dot(query, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        if R > 0:
            rotated = tl.load(k_pe + places[:, None] * k_pe_token + pe_columns[None, :])
            scores = dot(rotary, tl.trans(rotated), scores)
        top = tl.maximum(largest, tl.max(scores, 1) * scale)
        probabilities = tl.exp2(scores * scale - top[:, None])
        less = tl.exp2(largest - top)
        total = total * less + tl.sum(probabilities, 1)
        sums = sums * less[:, None]
        if V == V_PADDED:
            v = tl.load(values + places[:, None] * v_token + v_columns[None, :])
        else:
            v = tl.load(
                values + places[:, None] * v_token + v_columns[None, :],
                mask=v_columns[None, :] < V,
                other=0.0,
            )
        sums = dot(rounded(probabilities, v.dtype), v, sums)
        largest = top
    for start in tl.range(whole, high, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        there = at < high
        if PAGE > 0:
            places = (
                tl.load(table + sequence * table_width + at // PAGE, mask=there, other=0).to(
                    tl.int64
                )
                * PAGE
                + at % PAGE
            )
        else:
            places = (row0 + at).to(tl.int64)
        k = tl.load(
            keys + places[:, None] * k_token + columns[None, :],
            mask=there[:, None] & (columns[None, :] < D),
            other=0.0,
        )
        scores = dot(query, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        if R > 0:
            rotated = tl.load(
                k_pe + places[:, None] * k_pe_token + pe_columns[None, :],
                mask=there[:, None],
                other=0.0,
            )
            scores = dot(rotary, tl.trans(rotated), scores)
        seen = (at[None, :] <= positions[:, None]) & there[None, :]
        if WINDOWED:
            seen = seen & (at[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(largest, tl.max(scores, 1) * scale)
        # A token that has seen nothing yet has no largest score.
        base = tl.where(top == float("-inf"), 0.0, top)
        probabilities = tl.exp2(scores * scale - base[:, None])
        less = tl.exp2(largest - base)
        total = total * less + tl.sum(probabilities, 1)
        sums = sums * less[:, None]
        v = tl.load(
            values + places[:, None] * v_token + v_columns[None, :],
            mask=there[:, None] & (v_columns[None, :] < V),
            other=0.0,
        )
        sums = dot(rounded(probabilities, v.dtype), v, sums)
        largest = top
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    to = (tokens * heads + head) * V
    tl.store(
        out + to[:, None] + v_columns[None, :],
        rounded(result, out.dtype.element_ty),
        mask=valid[:, None] & (v_columns[None, :] < V),
    )
    if PAGE == 0:
        tl.store(lse + tokens * heads + head, largest + tl.log2(total), mask=valid)
