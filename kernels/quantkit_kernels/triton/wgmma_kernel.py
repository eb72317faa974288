# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""x @ W.T in int8 on Hopper, in Gluon, Triton's lower language. Of tl.dot in int8 Triton 3.6 waits
for each product before it issues the next, and then the tensor cores idle; here one product
is under way while the next is issued.

Tiles of BM tokens and BN rows of the weight come by TMA into STAGES places of shared memory, a step
of 128 input features at a time. A program computes tile after tile, and what it loads runs ahead of
what it multiplies, over the end of a tile, too. SHARED: it computes one of `split` parts of a
tile's steps and adds it to sums in memory, exactly, in any order, for they are whole numbers.
EARLY: the scales of a tile are loaded before its products, where no other program of the
multiprocessor hides the wait for them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Its name from Triton 3.9 on, and before."""
SPAN = gl.constexpr(128)
"""Input features of a step."""
WIDEST = gl.constexpr(128)
"""Columns of one instruction: of int8 Triton 3.6 lowers no wider ones that divide a tile."""


@gluon.jit
def place(tile, token_tiles, row_tiles, BAND: gl.constexpr):
    """Where a tile is, in tiles of tokens and of rows: in bands of BAND tiles of tokens, so that
    programs at work share what the last cache holds."""
    first = tile // (BAND * row_tiles) * BAND
    size = gl.maximum(gl.minimum(token_tiles - first, BAND), 1)
    inside = tile % (BAND * row_tiles)
    return first + inside % size, inside // size


@gluon.jit(do_not_specialize=["m", "steps", "split", "token_tiles", "row_tiles"])
def multiply_int8(
    x, w, x_scale, row_scale, out, sums, arrived, m, n, rows, steps, split, token_tiles, row_tiles,
    BM: gl.constexpr, BN: gl.constexpr, SHARED: gl.constexpr, EARLY: gl.constexpr,
    STAGES: gl.constexpr, LEFT: gl.constexpr,
    BAND: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[m, n] of x int8 [m, k], a descriptor of tiles [BM, 128], and w int8 [steps * rows, 128],
    of tiles [BN, 128]. LEFT: the weight is the left operand, of which an instruction takes 64 rows,
    while tokens may be 16."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    A: gl.constexpr = BN if LEFT else BM
    B: gl.constexpr = BM if LEFT else BN
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1], [16, B if B < WIDEST else WIDEST, 32]
    )
    BYTES: gl.constexpr = (BM + BN) * SPAN
    xs = gl.allocate_shared_memory(gl.int8, [STAGES, BM, SPAN], x.layout)
    ws = gl.allocate_shared_memory(gl.int8, [STAGES, BN, SPAN], w.layout)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
    part = gl.program_id(0) % split
    begin = steps * part // split
    end = steps * (part + 1) // split
    tile = gl.program_id(0) // split
    programs = gl.num_programs(0) // split
    tiles = (token_tiles * row_tiles - tile + programs - 1) // programs
    total = tiles * (end - begin)

    # What is loaded next: step number `ahead` of `total`, of the tile at (token, row).
    ahead_tile = tile
    token, row = place(tile, token_tiles, row_tiles, BAND)
    step = begin
    for i in gl.static_range(STAGES - 1):
        mbarrier.expect(there.index(i), BYTES, pred=i < total)
        if i == 0:  # weights are there before the tokens are
            load_tile(w, [step * rows + row * BN, 0], there.index(i), ws.index(i), pred=i < total)
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    for i in gl.static_range(STAGES - 1):
        if i > 0:
            load_tile(w, [step * rows + row * BN, 0], there.index(i), ws.index(i), pred=i < total)
        load_tile(x, [token * BM, step * SPAN], there.index(i), xs.index(i), pred=i < total)
        step += 1
        if step == end:
            step = begin
            ahead_tile += programs
            token, row = place(ahead_tile, token_tiles, row_tiles, BAND)
    ahead = STAGES - 1
    slot = 0
    phase = 0
    for index in range(tiles):
        acc = gl.zeros([A, B], gl.int32, SUMS)
        token_scales = x_scale
        row_scales = row_scale
        if EARLY:
            token_tile, row_tile = place(tile + index * programs, token_tiles, row_tiles, BAND)
            token_scales, row_scales = scales_of(
                x_scale, row_scale, token_tile, row_tile, m, n, BM, BN, 0 if LEFT else 1, SUMS
            )
        for _ in range(end - begin):
            mbarrier.wait(there.index(slot), phase)
            if LEFT:
                acc = warpgroup_mma(
                    ws.index(slot), xs.index(slot).permute((1, 0)), acc, is_async=True
                )
            else:
                acc = warpgroup_mma(
                    xs.index(slot), ws.index(slot).permute((1, 0)), acc, is_async=True
                )
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            # The product before this one is done: its place is free.
            free = gl.where(slot == 0, STAGES - 1, slot - 1)
            mbarrier.expect(there.index(free), BYTES, pred=ahead < total)
            load_tile(
                w,
                [step * rows + row * BN, 0],
                there.index(free),
                ws.index(free),
                pred=ahead < total,
            )
            load_tile(
                x, [token * BM, step * SPAN], there.index(free), xs.index(free), pred=ahead < total
            )
            ahead += 1
            step += 1
            if step == end:
                step = begin
                ahead_tile += programs
                token, row = place(ahead_tile, token_tiles, row_tiles, BAND)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        at = tile + index * programs
        token_tile, row_tile = place(at, token_tiles, row_tiles, BAND)
        mine = sums + at * (BM * BN)
        finish(
            acc, mine, arrived + at, split, token_scales, row_scales, out, token_tile, row_tile, m,
            n,
            BM, BN, SHARED, EARLY, LEFT, WARPS, SUMS,
        )  # fmt: skip


@gluon.jit
def finish(
    acc, mine, arrived, split, x_scale, row_scale, out, token, row, m, n,
    BM: gl.constexpr, BN: gl.constexpr, SHARED: gl.constexpr, EARLY: gl.constexpr,
    LEFT: gl.constexpr, WARPS: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """A tile is scaled and written, if it is shared by the last program to arrive. Its sums and
    counter are zero before and after."""
    ACROSS: gl.constexpr = 0 if LEFT else 1  # the dimension that a vector of tokens lacks
    WIDE: gl.constexpr = (
        BN // 8 if BN // 8 < 32 else 32
    )  # threads of a warp side by side, of eight features each
    ROWS: gl.constexpr = (
        gl.BlockedLayout([8, 1], [WIDE, 32 // WIDE], [1, WARPS], [0, 1])
        if LEFT
        else gl.BlockedLayout([1, 8], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    )
    if SHARED:
        kept = tokens_there(token, m, BM, BN, ACROSS, SUMS)
        gl.atomic_add(
            mine + cells(BN, BM, ACROSS, SUMS), acc, mask=kept, sem="relaxed", scope="gpu"
        )
        gl.thread_barrier()
        before = gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
        if before == split - 1:
            gl.thread_barrier()
            there = tokens_there(token, m, BM, BN, ACROSS, ROWS)
            at = mine + cells(BN, BM, ACROSS, ROWS)
            total = gl.load(at, mask=there, other=0, cache_modifier=".cg")
            gl.store(at, gl.zeros([BN, BM] if LEFT else [BM, BN], gl.int32, ROWS), mask=there)
            gl.store(arrived, 0)
            write(
                total, x_scale, row_scale, out, token, row, m, n, BM, BN, False, ACROSS, ROWS, ROWS
            )
    else:
        write(acc, x_scale, row_scale, out, token, row, m, n, BM, BN, EARLY, ACROSS, SUMS, ROWS)


@gluon.jit
def cells(BN: gl.constexpr, BM: gl.constexpr, ACROSS: gl.constexpr, LAYOUT: gl.constexpr):
    """Where each sum of a tile lies: token after token."""
    tokens = gl.arange(0, BM, gl.SliceLayout(ACROSS, LAYOUT))
    features = gl.arange(0, BN, gl.SliceLayout(1 - ACROSS, LAYOUT))
    return gl.expand_dims(tokens, ACROSS) * BN + gl.expand_dims(features, 1 - ACROSS)


@gluon.jit
def tokens_there(
    token, m, BM: gl.constexpr, BN: gl.constexpr, ACROSS: gl.constexpr, LAYOUT: gl.constexpr
):
    tokens = gl.arange(0, BM, gl.SliceLayout(ACROSS, LAYOUT))
    features = gl.arange(0, BN, gl.SliceLayout(1 - ACROSS, LAYOUT))
    return gl.expand_dims(token * BM + tokens < m, ACROSS) & gl.expand_dims(
        features >= 0, 1 - ACROSS
    )


@gluon.jit
def scales_of(
    x_scale,
    row_scale,
    token,
    row,
    m,
    n,
    BM: gl.constexpr,
    BN: gl.constexpr,
    ACROSS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Of a tile's tokens, and of its rows of the weight."""
    at = token * BM + gl.arange(0, BM, gl.SliceLayout(ACROSS, LAYOUT))
    own = row * BN + gl.arange(0, BN, gl.SliceLayout(1 - ACROSS, LAYOUT))
    of_token = gl.load(x_scale + at, mask=at < m, other=0.0)
    of_row = gl.load(row_scale + own, mask=own < n, other=0.0)
    return of_token, of_row


@gluon.jit
def write(
    sums, x_scale, row_scale, out, token, row, m, n,
    BM: gl.constexpr, BN: gl.constexpr, EARLY: gl.constexpr, ACROSS: gl.constexpr,
    LAYOUT: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """out = sums by both scales, with EARLY the tile's own. LAYOUT: of the sums; ROWS: in which
    features of a token lie in a thread side by side."""
    of_token = x_scale
    of_row = row_scale
    if not EARLY:
        of_token, of_row = scales_of(x_scale, row_scale, token, row, m, n, BM, BN, ACROSS, LAYOUT)
    scaled = (
        sums.to(gl.float32) * gl.expand_dims(of_row, 1 - ACROSS) * gl.expand_dims(of_token, ACROSS)
    )
    values = gl.convert_layout(scaled.to(out.dtype.element_ty), ROWS)
    to_token = token * BM + gl.arange(0, BM, gl.SliceLayout(ACROSS, ROWS))
    to_row = row * BN + gl.arange(0, BN, gl.SliceLayout(1 - ACROSS, ROWS))
    inside = gl.expand_dims(to_token < m, ACROSS) & gl.expand_dims(to_row < n, 1 - ACROSS)
    to = (
        out + gl.expand_dims(to_token.to(gl.int64) * n, ACROSS) + gl.expand_dims(to_row, 1 - ACROSS)
    )
    gl.store(to, values, mask=inside)
