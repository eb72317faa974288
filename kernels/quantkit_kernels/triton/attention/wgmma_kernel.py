# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Attention of prompts on Hopper, in Gluon, Triton's lower language: what prefill_kernel.py
computes, over the same blocks of keys.

A program has two partitions of four warps, each with 64 queries of its own, and one warp that
copies keys and values by TMA to both, into places of shared memory, which the two give back when
their products are done. In a partition the product of the last probabilities and the values is
under way while the next scores become probabilities; and while one partition does that, the other
one's products run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Its name from Triton 3.9 on, and before."""
BM = gl.constexpr(128)
"""Queries of a program."""
HALF = gl.constexpr(64)
"""Queries of a partition."""
WARPS = gl.constexpr(4)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def load_queries(
    to, pointer, begin, first, new, stride, column, D: gl.constexpr, WIDTH: gl.constexpr
):
    """HALF of a sequence's new tokens from `first` on, D numbers of each; zeros beyond."""
    WIDE: gl.constexpr = (
        WIDTH // 8 if WIDTH // 8 < 32 else 32
    )  # threads of a warp side by side, of eight numbers each
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    rows = gl.expand_dims(first + gl.arange(0, HALF, gl.SliceLayout(1, ROWS)), 1)
    columns = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS)), 0)
    at = (begin + rows).to(gl.int64) * stride + column + columns
    to.store(gl.load(pointer + at, mask=(rows < new) & (columns < D), other=0.0))


@gluon.jit
def rows_of(
    table, table_width, row, block, PAGE: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr
):
    """Where the first and the last box of a block begin."""
    first = row + block * BN
    last = first
    if PAGE > 0:
        end = block * BN + BN - BOX
        last = gl.load(table + gl.minimum(end // PAGE, table_width - 1)) * PAGE + end % PAGE
        first = (
            gl.load(table + gl.minimum(block * BN // PAGE, table_width - 1)) * PAGE
            + block * BN % PAGE
        )
    return first, last


@gluon.jit
def next_place(place, phase, STAGES: gl.constexpr):
    place += 1
    if place == STAGES:
        place = 0
        phase ^= 1
    return place, phase


@gluon.jit
def load_box(
    source, row, column, there, place, at: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr
):
    """A tile, or one of its two boxes."""
    if BN == BOX:
        load_tile(source, [row, column], there, place)
    else:
        load_tile(source, [row, column], there, place.slice(at, BOX))


@gluon.jit
def produce(
    begin, blocks, row, table, table_width, descriptors, places, barriers, k_column, v_column,
    R: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
    K_BYTES: gl.constexpr,
    V_BYTES: gl.constexpr,
):  # fmt: skip
    """Of `blocks` blocks from number `begin` on, copy the keys of one, then the values of the one
    before, as they are asked for."""
    keys, k_pe, values = descriptors
    ks, pes, vs = places
    k_there, k_free, v_there, v_free = barriers
    first, last = rows_of(table, table_width, row, begin, PAGE, BN, BOX)
    first_before, last_before = (
        first - BN,
        last - BN,
    )  # other values than `first`: aliases are not carried by the loop
    k_place, k_phase, v_place, v_phase = 0, 1, 0, 1
    for block in range(blocks + 1):
        first_next, last_next = rows_of(table, table_width, row, begin + block + 1, PAGE, BN, BOX)
        if block < blocks:
            mbarrier.wait(k_free.index(k_place), k_phase)
            mbarrier.expect(k_there.index(k_place), K_BYTES)
            load_box(keys, first, k_column, k_there.index(k_place), ks.index(k_place), 0, BN, BOX)
            if BN > BOX:
                load_box(
                    keys, last, k_column, k_there.index(k_place), ks.index(k_place), BOX, BN, BOX
                )
            if R > 0:
                load_tile(k_pe, [first, 0], k_there.index(k_place), pes.index(k_place))
            k_place, k_phase = next_place(k_place, k_phase, STAGES)
        if block > 0:
            mbarrier.wait(v_free.index(v_place), v_phase)
            mbarrier.expect(v_there.index(v_place), V_BYTES)
            load_box(
                values,
                first_before,
                v_column,
                v_there.index(v_place),
                vs.index(v_place),
                0,
                BN,
                BOX,
            )
            if BN > BOX:
                load_box(
                    values,
                    last_before,
                    v_column,
                    v_there.index(v_place),
                    vs.index(v_place),
                    BOX,
                    BN,
                    BOX,
                )
            v_place, v_phase = next_place(v_place, v_phase, STAGES)
        first_before, last_before = first, last
        first, last = first_next, last_next


@gluon.jit
def words_of(words, word_row, begin, first, new, block, BITS: gl.constexpr):
    """The bits of HALF queries for a block of 128 keys, int32 [HALF, 4]."""
    OF_WORD: gl.constexpr = gl.SliceLayout(2, BITS)
    rows = gl.expand_dims(first + gl.arange(0, HALF, gl.SliceLayout(1, OF_WORD)), 1)
    word = gl.expand_dims(block * 4 + gl.arange(0, 4, gl.SliceLayout(0, OF_WORD)), 0)
    at = (begin + rows).to(gl.int64) * word_row + word
    return gl.load(words + at, mask=rows < new, other=0)


@gluon.jit
def keep_selected(scores, own, BITS: gl.constexpr, SCORES: gl.constexpr):
    """scores [HALF, 128] of a block of keys, -inf of those that a query does not attend to by its
    `words_of`."""
    bit = gl.expand_dims(
        gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(0, BITS))), 0), 0
    )
    chosen = ((gl.expand_dims(own, 2) >> (bit & 6)) >> (bit & 25)) & 1
    chosen = gl.convert_layout(chosen.reshape([HALF, 128]), SCORES)  # the first shift: a thread's
    return gl.where(chosen != 0, scores, float("-inf"))


@gluon.jit
def soften(
    scores,
    largest,
    total,
    scale,
    positions,
    at,
    high,
    window,
    MASKED: gl.constexpr,
    WINDOWED: gl.constexpr,
    SELECTED: gl.constexpr,
):
    """-> probabilities, the largest scores and the sums so far, and what sums before are worth now.
    SELECTED: scores of keys that a token does not see are -inf already."""
    if MASKED and not SELECTED:
        seen = (gl.expand_dims(at, 0) <= gl.expand_dims(positions, 1)) & gl.expand_dims(
            at < high, 0
        )
        if WINDOWED:
            seen = seen & (gl.expand_dims(at, 0) > gl.expand_dims(positions - window, 1))
        scores = gl.where(seen, scores, float("-inf"))
    top = gl.maximum(largest, gl.max(scores, 1) * scale)
    base = top
    if MASKED:  # a token that has seen nothing yet has no largest score
        base = gl.where(top == float("-inf"), 0.0, top)
    probabilities = gl.exp2(scores * scale - gl.expand_dims(base, 1))
    less = gl.exp2(largest - base)
    return probabilities, top, total * less + gl.sum(probabilities, 1), less


@gluon.jit
def score(queries, places, place, blank, R: gl.constexpr):
    scores = warpgroup_mma(
        queries[0], places[0].index(place).permute((1, 0)), blank, use_acc=False, is_async=True
    )
    if R > 0:
        scores = warpgroup_mma(
            queries[1], places[1].index(place).permute((1, 0)), scores, is_async=True
        )
    return scores


@gluon.jit
def consume(
    half, q, q_pe, queries, places, barriers, turns, sinks, out, lse, begin, new, first_token,
    past, low, high, blocks,
    q_token, q_head, pe_token, head, heads, scale, window, words, word_row,
    D: gl.constexpr, D_PADDED: gl.constexpr, R: gl.constexpr, V: gl.constexpr,
    V_PADDED: gl.constexpr, PAGE: gl.constexpr,
    WINDOWED: gl.constexpr, SUNK: gl.constexpr, SELECTED: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The queries from first_token on, over blocks of keys from position `low` on. TURNS: the
    partitions issue their products one after the other."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V_PADDED, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    # A thread has all four words of its two queries, whose bits lie as its scores do.
    BITS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [8, 0, 0], [0, 0, 1], [0, 0, 8], [0, 0, 16]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [HALF, 4, 32],
    )
    DTYPE: gl.constexpr = q.dtype.element_ty
    vs = places[2]
    k_there, k_free, v_there, v_free = barriers
    load_queries(queries[0], q, begin, first_token, new, q_token, head * q_head, D, D_PADDED)
    if R > 0:
        load_queries(queries[1], q_pe, begin, first_token, new, pe_token, head * R, R, R)
    fence_async_shared()
    # Up to here every token sees every key of a block.
    whole = gl.maximum(gl.minimum(past + first_token + 1, high) - low, 0) // BN
    if WINDOWED or SELECTED:
        whole = 0
    positions = past + first_token + gl.arange(0, HALF, OF_ROW)
    keys_of = low + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
    largest = gl.full([HALF], float("-inf"), gl.float32, OF_ROW)
    total = gl.zeros([HALF], gl.float32, OF_ROW)
    if SUNK:  # one more key, which every token sees
        largest = total + gl.load(sinks + head) * LOG2E
        total += 1.0
    sums = gl.zeros([HALF, V_PADDED], gl.float32, SUMS)
    blank = gl.zeros([HALF, BN], gl.float32, SCORES)
    if SELECTED:
        own = words_of(words, word_row, begin, first_token, new, low // BN, BITS)
    mbarrier.wait(k_there.index(0), 0)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(score(queries, places, 0, blank, R),))
    mbarrier.arrive(k_free.index(0), count=1)
    if SELECTED:
        scores = keep_selected(scores, own, BITS, SCORES)
    probabilities, largest, total, less = soften(
        scores, largest, total, scale, positions, keys_of, high, window, True, WINDOWED, SELECTED
    )
    p = gl.convert_layout(probabilities.to(DTYPE), LEFT)
    k_place, k_phase, v_place, v_phase, turn = 1, 0, 0, 0, 0
    mbarrier.wait(k_there.index(k_place), k_phase, pred=blocks > 1)
    for masked in gl.static_range(2):
        for block in range(
            1 if masked == 0 else gl.maximum(whole, 1), whole if masked == 0 else blocks
        ):
            if TURNS:
                mbarrier.wait(turns.index(half), turn)
                turn ^= 1
            if SELECTED:  # there when the scores are
                own = words_of(words, word_row, begin, first_token, new, low // BN + block, BITS)
            scores = score(queries, places, k_place, blank, R)
            mbarrier.wait(v_there.index(v_place), v_phase)
            sums = warpgroup_mma(p, vs.index(v_place), sums, is_async=True)
            if TURNS:
                mbarrier.arrive(turns.index(1 - half), count=1)
            scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
            mbarrier.arrive(k_free.index(k_place), count=1)
            at = keys_of + block * BN
            if SELECTED:
                scores = keep_selected(scores, own, BITS, SCORES)
            probabilities, largest, total, less = soften(
                scores, largest, total, scale, positions, at, high, window, masked == 1, WINDOWED,
                SELECTED,
            )  # fmt: skip
            following = gl.convert_layout(probabilities.to(DTYPE), LEFT)
            k_place, k_phase = next_place(k_place, k_phase, STAGES)
            # Without a loop between, the assembler moves arithmetic after the wait for products,
            # and nothing runs at the same time.
            mbarrier.wait(k_there.index(k_place), k_phase, pred=block + 1 < blocks)
            sums, p = warpgroup_mma_wait(num_outstanding=0, deps=(sums, following))
            mbarrier.arrive(v_free.index(v_place), count=1)
            v_place, v_phase = next_place(v_place, v_phase, STAGES)
            sums = sums * gl.expand_dims(gl.convert_layout(less, gl.SliceLayout(1, SUMS)), 1)
    mbarrier.wait(v_there.index(v_place), v_phase)
    if PAGE > 0:
        clear_beyond(vs.index(v_place), past + new - low - (blocks - 1) * BN, BN)
    sums = warpgroup_mma(p, vs.index(v_place), sums, is_async=True)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    finish(
        sums,
        largest,
        total,
        out,
        lse,
        begin,
        new,
        first_token,
        head,
        heads,
        V,
        V_PADDED,
        PAGE,
        SUMS,
        OF_ROW,
    )


@gluon.jit
def clear_beyond(place, kept, BN: gl.constexpr):
    """What a page holds beyond a sequence may be NaN. Both partitions write the same."""
    if kept < BN:
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        inside = gl.arange(0, BN, gl.SliceLayout(1, ROWS)) < kept
        place.store(gl.where(gl.expand_dims(inside, 1), place.load(ROWS), 0.0))
        fence_async_shared()


@gluon.jit
def finish(
    sums, largest, total, out, lse, begin, new, first_token, head, heads,
    V: gl.constexpr, V_PADDED: gl.constexpr, PAGE: gl.constexpr, SUMS: gl.constexpr,
    OF_ROW: gl.constexpr,
):  # fmt: skip
    tokens = first_token + gl.arange(0, HALF, OF_ROW)
    to_lse = lse + (begin + tokens).to(gl.int64) * heads + head
    share = 1 / gl.where(total == 0.0, 1.0, total)
    if PAGE == 0:
        gl.store(to_lse, largest + gl.log2(total), mask=tokens < new)
    result = sums * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, SUMS)), 1)
    rows = gl.expand_dims(first_token + gl.arange(0, HALF, gl.SliceLayout(1, SUMS)), 1)
    columns = gl.expand_dims(gl.arange(0, V_PADDED, gl.SliceLayout(0, SUMS)), 0)
    to = ((begin + rows).to(gl.int64) * heads + head) * V + columns
    inside = (rows < new) & (columns < V)
    gl.store(out + to, result.to(out.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["table_width", "heads", "shared", "together", "tiles", "word_row"])
def attend_prompts(
    q, q_pe, keys, k_pe, values, sinks, out, lse, starts, seq_lens, table, firsts, lasts, key_rows,
    q_token, q_head, pe_token, k_head, v_head, table_width, heads, shared, together, tiles, scale,
    window, words, word_row,
    D: gl.constexpr, D_PADDED: gl.constexpr, R: gl.constexpr, V: gl.constexpr,
    V_PADDED: gl.constexpr, PAGE: gl.constexpr,
    WINDOWED: gl.constexpr, SUNK: gl.constexpr, SELECTED: gl.constexpr, BN: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """A program per BM new tokens, head and sequence: of `together` heads at a time the last
    tokens, which see most, first.

    keys, values: descriptors of tiles [BOX, D_PADDED] and [BOX, V_PADDED] of rows of all heads;
    k_pe of tiles [BOX, R]. SELECTED: each token attends to the keys whose bits are set in its
    `words` alone (indexer.py), in blocks of 128. The rest as of prefill_kernel.py.
    """
    sequence = gl.program_id(1)
    group = gl.program_id(0) // (tiles * together)
    inside = gl.program_id(0) % (tiles * together)
    size = gl.minimum(heads - group * together, together)
    head = group * together + inside % size
    begin = gl.load(starts + sequence)
    new = gl.load(starts + sequence + 1) - begin
    first = (tiles - 1 - inside // size) * BM
    if first < new:
        DTYPE: gl.constexpr = q.dtype.element_ty
        Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, D_PADDED], DTYPE)
        ks = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D_PADDED], keys.layout)
        vs = gl.allocate_shared_memory(DTYPE, [STAGES, BN, V_PADDED], values.layout)
        one = gl.allocate_shared_memory(DTYPE, [HALF, D_PADDED], Q)
        other = gl.allocate_shared_memory(DTYPE, [HALF, D_PADDED], Q)
        pes = ks
        one_pe = one
        other_pe = other
        if R > 0:
            Q_PE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, R], DTYPE)
            pes = gl.allocate_shared_memory(DTYPE, [STAGES, BN, R], k_pe.layout)
            one_pe = gl.allocate_shared_memory(DTYPE, [HALF, R], Q_PE)
            other_pe = gl.allocate_shared_memory(DTYPE, [HALF, R], Q_PE)
        k_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        turns = k_there
        for i in gl.static_range(STAGES):
            mbarrier.init(k_there.index(i), count=1)
            mbarrier.init(v_there.index(i), count=1)
            mbarrier.init(k_free.index(i), count=2)
            mbarrier.init(v_free.index(i), count=2)
        # Only where partitions take turns: the memory of barriers without waiters goes to the
        # arguments of partitions, and where another process computed on the card a partition read a
        # barrier's first value there in place of how many keys it sees.
        if TURNS:
            turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
            mbarrier.init(turns.index(0), count=1)
            mbarrier.init(turns.index(1), count=1)
            mbarrier.arrive(turns.index(0), count=1)
        fence_async_shared()  # TMA sees the barriers
        places = (ks, pes, vs)
        barriers = (k_there, k_free, v_there, v_free)
        past = gl.load(seq_lens + sequence) - new
        low = 0
        high = past + gl.minimum(first + BM, new)
        row = 0
        if PAGE == 0:
            low = gl.load(firsts + sequence)
            high = gl.minimum(high, gl.load(lasts + sequence))
            row = gl.load(key_rows + sequence) + low
        unseen = 0  # blocks before the window of the first query
        if WINDOWED:
            unseen = gl.maximum(past + first - window + 1 - low, 0) // BN
        low += unseen * BN
        blocks = gl.maximum((high - low + BN - 1) // BN, 1)
        kv_head = head // shared
        gl.warp_specialize(
            [
                (consume, (
                    0, q, q_pe, (one, one_pe), places, barriers, turns, sinks, out, lse, begin,
                    new, first, past, low, high, blocks,
                    q_token, q_head, pe_token, head, heads, scale, window, words, word_row, D,
                    D_PADDED, R, V, V_PADDED, PAGE, WINDOWED, SUNK, SELECTED, BN, STAGES, TURNS,
                )),
                (consume, (
                    1, q, q_pe, (other, other_pe), places, barriers, turns, sinks, out, lse, begin,
                    new, first + HALF, past, low, high,
                    blocks, q_token, q_head, pe_token, head, heads, scale, window, words, word_row,
                    D, D_PADDED, R, V, V_PADDED, PAGE, WINDOWED, SUNK, SELECTED, BN, STAGES, TURNS,
                )),
                (produce, (
                    unseen, blocks, row, table + sequence * table_width, table_width, (keys, k_pe,
                    values), places, barriers,
                    kv_head * k_head, kv_head * v_head, R, PAGE, BN, BOX, STAGES,
                    BN * (D_PADDED + R) * 2, BN * V_PADDED * 2,
                )),
            ],
            [WARPS, 1],
            [240, 24],
        )  # fmt: skip
