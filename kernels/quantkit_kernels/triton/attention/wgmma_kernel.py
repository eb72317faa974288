# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Attention of prompts on Hopper, in Gluon, Triton's lower language: what prefill_kernel.py computes, over the same blocks of keys, with
keys and values copied by TMA, and the product of probabilities and values under way while the next scores become probabilities.

Step t of a program takes the keys of block t and the values of block t - 1. They come into one of STAGES places of shared memory, behind
one barrier; the place is loaded again as soon as both products of the step are done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Its name from Triton 3.9 on, and before."""


@gluon.jit
def load_queries(
    to, pointer, begin, first, new, stride, column, BM: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """BM of a sequence's new tokens from `first` on, D numbers of each; zeros beyond."""
    WIDE: gl.constexpr = WIDTH // 8 if WIDTH // 8 < 32 else 32  # threads of a warp side by side, of eight numbers each
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    rows = gl.expand_dims(first + gl.arange(0, BM, gl.SliceLayout(1, ROWS)), 1)
    columns = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS)), 0)
    at = (begin + rows).to(gl.int64) * stride + column + columns
    to.store(gl.load(pointer + at, mask=(rows < new) & (columns < D), other=0.0))


@gluon.jit
def rows_of(table, table_width, block, PAGE: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr):
    """Where the first and the last box of a block of pages begin."""
    if PAGE == 0:
        return 0, 0
    first = block * BN
    last = first + BN - BOX
    one = gl.load(table + gl.minimum(first // PAGE, table_width - 1)) * PAGE + first % PAGE
    return one, gl.load(table + gl.minimum(last // PAGE, table_width - 1)) * PAGE + last % PAGE


@gluon.jit
def fetch(
    step, steps, row, rows, rows_before, there, sources, places, slot, columns,
    BN: gl.constexpr, BOX: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr, K_BYTES: gl.constexpr,
    V_BYTES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Load what a step needs: keys from `row` on, or from rows of pages, and values from BN rows before, or from those of the pages before.
    The FIRST step has no values; with the keys of the last nothing is done."""
    keys, k_pe, values = sources
    ks, pes, vs = places
    inside = step <= steps
    arrival = there.index(slot)
    mbarrier.expect(arrival, K_BYTES if FIRST else K_BYTES + V_BYTES, pred=inside)
    if PAGE == 0:
        load_tile(keys, [row, columns[0]], arrival, ks.index(slot), pred=inside)
        if R > 0:
            load_tile(k_pe, [row, 0], arrival, pes.index(slot), pred=inside)
        if not FIRST:
            load_tile(values, [row - BN, columns[1]], arrival, vs.index(slot), pred=inside)
    else:
        for box in gl.static_range(BN // BOX):
            load_tile(keys, [rows[box], columns[0]], arrival, ks.index(slot).slice(box * BOX, BOX), pred=inside)
            if not FIRST:
                load_tile(values, [rows_before[box], columns[1]], arrival, vs.index(slot).slice(box * BOX, BOX), pred=inside)


@gluon.jit
def soften(scores, largest, total, scale, positions, at, high, MASKED: gl.constexpr):
    """-> probabilities, the largest scores and the sums so far, and what sums before are worth now."""
    if MASKED:
        seen = (gl.expand_dims(at, 0) <= gl.expand_dims(positions, 1)) & gl.expand_dims(at < high, 0)
        scores = gl.where(seen, scores, float("-inf"))
    top = gl.maximum(largest, gl.max(scores, 1) * scale)
    base = top
    if MASKED:  # a token that has seen nothing yet has no largest score
        base = gl.where(top == float("-inf"), 0.0, top)
    probabilities = gl.exp2(scores * scale - gl.expand_dims(base, 1))
    less = gl.exp2(largest - base)
    return probabilities, top, total * less + gl.sum(probabilities, 1), less


@gluon.jit
def score(qs, q_pes, places, slot, blank, R: gl.constexpr):
    """Issue the product of queries and a block of keys."""
    scores = warpgroup_mma(qs, places[0].index(slot).permute((1, 0)), blank, use_acc=False, is_async=True)
    if R > 0:
        scores = warpgroup_mma(q_pes, places[1].index(slot).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def clear_beyond(place, kept, BN: gl.constexpr, WARPS: gl.constexpr):
    """What a page holds beyond a sequence may be NaN."""
    if kept < BN:
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        inside = gl.arange(0, BN, gl.SliceLayout(1, ROWS)) < kept
        place.store(gl.where(gl.expand_dims(inside, 1), place.load(ROWS), 0.0))
        fence_async_shared()


@gluon.jit(do_not_specialize=["table_width", "heads", "shared", "together", "tiles"])
def attend_prompts(
    q, q_pe, keys, k_pe, values, out, lse, starts, seq_lens, table, firsts, lasts, key_rows,
    q_token, q_head, pe_token, k_head, v_head, table_width, heads, shared, together, tiles, scale,
    D: gl.constexpr, D_PADDED: gl.constexpr, R: gl.constexpr, V: gl.constexpr, V_PADDED: gl.constexpr,
    PAGE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A program per BM new tokens, head and sequence: of `together` heads at a time the last tokens, which see most, first.

    keys, values: descriptors of tiles [BOX, D_PADDED] and [BOX, V_PADDED] of rows of all heads; k_pe of tiles [BOX, R]. The rest as of
    prefill_kernel.py.
    """
    sequence = gl.program_id(1)
    group = gl.program_id(0) // (tiles * together)
    inside = gl.program_id(0) % (tiles * together)
    size = gl.minimum(heads - group * together, together)
    head = group * together + inside % size
    begin = gl.load(starts + sequence)
    new = gl.load(starts + sequence + 1) - begin
    first_token = (tiles - 1 - inside // size) * BM
    if first_token < new:
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
        SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V_PADDED, 16])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
        OF_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
        DTYPE: gl.constexpr = q.dtype.element_ty
        K_BYTES: gl.constexpr = BN * (D_PADDED + R) * 2
        V_BYTES: gl.constexpr = BN * V_PADDED * 2
        qs = gl.allocate_shared_memory(DTYPE, [BM, D_PADDED], gl.NVMMASharedLayout.get_default_for([BM, D_PADDED], DTYPE))
        ks = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D_PADDED], keys.layout)
        vs = gl.allocate_shared_memory(DTYPE, [STAGES, BN, V_PADDED], values.layout)
        q_pes = qs
        pes = ks
        if R > 0:
            q_pes = gl.allocate_shared_memory(DTYPE, [BM, R], gl.NVMMASharedLayout.get_default_for([BM, R], DTYPE))
            pes = gl.allocate_shared_memory(DTYPE, [STAGES, BN, R], k_pe.layout)
        there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(there.index(i), count=1)

        seq_len = gl.load(seq_lens + sequence)
        past = seq_len - new
        low = 0
        high = past + gl.minimum(first_token + BM, new)
        row = 0
        if PAGE == 0:
            low = gl.load(firsts + sequence)
            high = gl.minimum(high, gl.load(lasts + sequence))
            row = gl.load(key_rows + sequence) + low
        steps = gl.maximum((high - low + BN - 1) // BN, 1)
        # Up to here every token sees every key of a block.
        whole = gl.maximum(gl.minimum(past + first_token + 1, high) - low, 0) // BN
        kv_head = head // shared
        columns = (kv_head * k_head, kv_head * v_head)
        sources = (keys, k_pe, values)
        places = (ks, pes, vs)
        table += sequence * table_width
        rows = rows_of(table, table_width, 0, PAGE, BN, BOX)
        before = rows
        for i in gl.static_range(STAGES):
            fetch(i, steps, row, rows, before, there, sources, places, i, columns, BN, BOX, R, PAGE, K_BYTES, V_BYTES, i == 0)
            row += BN
            before = rows
            rows = rows_of(table, table_width, i + 1, PAGE, BN, BOX)
        load_queries(qs, q, begin, first_token, new, q_token, head * q_head, BM, D, D_PADDED, WARPS)
        if R > 0:
            load_queries(q_pes, q_pe, begin, first_token, new, pe_token, head * R, BM, R, R, WARPS)
        fence_async_shared()

        positions = past + first_token + gl.arange(0, BM, OF_ROW)
        keys_of = low + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
        largest = gl.full([BM], float("-inf"), gl.float32, OF_ROW)
        total = gl.zeros([BM], gl.float32, OF_ROW)
        sums = gl.zeros([BM, V_PADDED], gl.float32, SUMS)
        blank = gl.zeros([BM, BN], gl.float32, SCORES)
        mbarrier.wait(there.index(0), 0)
        scores = score(qs, q_pes, places, 0, blank, R)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        probabilities, largest, total, less = soften(scores, largest, total, scale, positions, keys_of, high, True)
        p = gl.convert_layout(probabilities.to(DTYPE), LEFT)
        fetch(STAGES, steps, row, rows, before, there, sources, places, 0, columns, BN, BOX, R, PAGE, K_BYTES, V_BYTES, False)
        slot = 1
        phase = 0
        mbarrier.wait(there.index(1), 0)
        for masked in gl.static_range(2):
            for step in range(1 if masked == 0 else gl.maximum(whole, 1), whole if masked == 0 else steps):
                row += BN
                before = rows
                rows = rows_of(table, table_width, step + STAGES, PAGE, BN, BOX)
                scores = score(qs, q_pes, places, slot, blank, R)
                sums = warpgroup_mma(p, vs.index(slot), sums, is_async=True)
                scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
                at = keys_of + step * BN
                probabilities, largest, total, less = soften(scores, largest, total, scale, positions, at, high, masked == 1)
                p_next = gl.convert_layout(probabilities.to(DTYPE), LEFT)
                now = slot
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
                # The assembler moves arithmetic behind a wait for products, unless there is a loop between.
                mbarrier.wait(there.index(slot), phase)
                sums, p = warpgroup_mma_wait(num_outstanding=0, deps=(sums, p_next))
                ahead = step + STAGES
                fetch(ahead, steps, row, rows, before, there, sources, places, now, columns, BN, BOX, R, PAGE, K_BYTES, V_BYTES, False)
                sums = sums * gl.expand_dims(gl.convert_layout(less, gl.SliceLayout(1, SUMS)), 1)
        if PAGE > 0:
            clear_beyond(vs.index(slot), seq_len - (steps - 1) * BN, BN, WARPS)
        sums = warpgroup_mma(p, vs.index(slot), sums, is_async=True)
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        if PAGE == 0:
            tokens = first_token + gl.arange(0, BM, OF_ROW)
            gl.store(lse + (begin + tokens).to(gl.int64) * heads + head, largest + gl.log2(total), mask=tokens < new)
        total = gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, SUMS))
        result = sums / gl.expand_dims(total, 1)
        tokens = gl.expand_dims(first_token + gl.arange(0, BM, gl.SliceLayout(1, SUMS)), 1)
        columns = gl.expand_dims(gl.arange(0, V_PADDED, gl.SliceLayout(0, SUMS)), 0)
        to = out + ((begin + tokens).to(gl.int64) * heads + head) * V + columns
        gl.store(to, result.to(out.dtype.element_ty), mask=(tokens < new) & (columns < V))
