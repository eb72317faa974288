# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Scores of an indexer for prompts on Hopper, in Gluon, Triton's lower language: what index_scores
of indexer_kernel.py computes.

Triton 3.6 waits for a product before it asks for the next keys, and each program reads all keys for
two tokens. Here one warp copies keys by TMA, some blocks ahead, for PARTS partitions of four warps,
each with tokens of its own; while one adds up its products, the others' run.
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
KEYS = gl.constexpr(64)
"""Of a block: rows of an instruction."""
ROWS = gl.constexpr(128)
"""Heads of all tokens of a partition."""
WARPS = gl.constexpr(4)
PARTS = gl.constexpr(4)
REGISTERS = gl.constexpr(112)
"""Of a thread of all partitions but the first. With three or two partitions of more registers an H200
takes 1.03 to 1.27 times as long."""


@gluon.jit
def first_of(table, table_width, block, PAGE: gl.constexpr):
    """Where a block of keys is cached."""
    page = gl.load(table + gl.minimum(block * KEYS // PAGE, table_width - 1))
    return page.to(gl.int32) * PAGE + block * KEYS % PAGE


@gluon.jit
def produce(
    keys, scales, table, table_width, begin, end, there, free, places, scale_places,
    PAGE: gl.constexpr, STAGES: gl.constexpr, CODED: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    place, phase = 0, 1
    row = first_of(table, table_width, begin, PAGE)
    for block in range(begin, end):
        following = first_of(table, table_width, block + 1, PAGE)
        mbarrier.wait(free.index(place), phase)
        mbarrier.expect(there.index(place), BYTES)
        load_tile(keys, [row, 0], there.index(place), places.index(place))
        if CODED:
            load_tile(scales, [row], there.index(place), scale_places.index(place))
        row = following
        place += 1
        if place == STAGES:
            place = 0
            phase ^= 1


@gluon.jit
def consume(
    part, q, weights, positions, scores, tokens, first, score_row, begin, end, there, free, places,
    scale_places, queries, H: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CODED: gl.constexpr,
):  # fmt: skip
    """Scores of ROWS // H tokens from `first` on, and blocks of keys from `begin` to `end`."""
    TOKENS: gl.constexpr = ROWS // H
    DTYPE: gl.constexpr = queries.dtype
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1], [16, ROWS, 32 if CODED else 16]
    )
    LINES: gl.constexpr = gl.BlockedLayout([1, 16], [512 // D, D // 16], [WARPS, 1], [1, 0])
    OF_LINE: gl.constexpr = gl.SliceLayout(1, LINES)
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCTS)
    line = first * H + gl.arange(0, ROWS, OF_LINE)
    inside = line < tokens * H
    channel = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, LINES)), 0)
    at = gl.expand_dims(line.to(gl.int64), 1) * D + channel
    query = gl.load(q + at, mask=gl.expand_dims(inside, 1) & (channel >= 0), other=0.0)
    weight = gl.load(weights + line, mask=inside, other=0.0) * 0.5
    if CODED:  # by the least power of two that is not below the largest over 448, the largest code
        wide = query.to(gl.float32)
        largest = gl.max(gl.abs(wide), 1).to(gl.int32, bitcast=True)
        unit = gl.maximum(((largest + 0x1FFFFF) & 0x7F800000) - 0x04000000, 0x2F000000)
        inverse = (0x7F000000 - unit).to(gl.float32, bitcast=True)
        weight *= unit.to(gl.float32, bitcast=True)
        query = wide * gl.expand_dims(inverse, 1)
    queries.store(query.to(DTYPE))
    fence_async_shared()
    weight = gl.expand_dims(gl.convert_layout(weight, OF_COLUMN), 0)
    blank = gl.zeros([KEYS, ROWS], gl.float32, PRODUCTS)
    found = gl.sum(blank.reshape([KEYS, TOKENS, H]), 2)
    FOUND: gl.constexpr = found.type.layout
    token = first + gl.arange(0, TOKENS, gl.SliceLayout(0, FOUND))
    position = gl.load(positions + token, mask=token < tokens, other=-1).to(gl.int32)
    position = gl.expand_dims(position, 0)
    key = gl.expand_dims(begin * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, FOUND)), 1)
    to = scores + gl.expand_dims(token.to(gl.int64), 0) * score_row + key
    place, phase = 0, 0
    for _ in range(begin, end):
        mbarrier.wait(there.index(place), phase)
        products = warpgroup_mma(
            places.index(place), queries.permute((1, 0)), blank, use_acc=False, is_async=True
        )
        products = warpgroup_mma_wait(num_outstanding=0, deps=(products,))
        if CODED:
            scale = scale_places.index(place).load(gl.SliceLayout(1, FOUND))
        mbarrier.arrive(free.index(place), count=1)
        # Twice relu(x): an addition takes half of the time that a maximum does.
        products = (products + gl.abs(products)) * weight
        found = gl.sum(products.reshape([KEYS, TOKENS, H]), 2)
        if CODED:
            found *= gl.expand_dims(scale, 1)
        found = gl.where(found == 0.0, 0.0, found)  # no -0, whose bits differ
        gl.store(to, found, mask=key <= position)
        key += KEYS
        to += KEYS
        place += 1
        if place == STAGES:
            place = 0
            phase ^= 1


@gluon.jit(do_not_specialize=["tokens", "table_width"])
def prompt_scores(
    q, weights, keys, scales, table, positions, scores, tokens, table_width, score_row,
    H: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    CODED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """scores float32 [tokens, score_row] of the keys up to each token, which share one row of the
    table. A program per share of the keys and PARTS * ROWS // H tokens, the last first. keys: a
    descriptor of tiles [KEYS, D]; scales, where CODED, of KEYS float32: keys are then FP8 codes,
    and queries are rounded to such."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; // $0",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    EACH: gl.constexpr = ROWS // H
    TYPE: gl.constexpr = keys.dtype
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], TYPE)
    places = gl.allocate_shared_memory(TYPE, [STAGES, KEYS, D], keys.layout)
    scale_places = places
    if CODED:
        scale_places = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], scales.layout)
    queries = gl.allocate_shared_memory(TYPE, [PARTS, ROWS, D], Q)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
        mbarrier.init(free.index(i), count=PARTS)
    fence_async_shared()  # TMA sees the barriers
    first = (gl.num_programs(1) - 1 - gl.program_id(1)) * (PARTS * EACH)
    last = gl.minimum(first + PARTS * EACH, tokens) - 1
    highest = gl.load(positions + last).to(gl.int32)
    for i in gl.static_range(PARTS * EACH - 1):
        at = gl.minimum(first + i, tokens - 1)
        highest = gl.maximum(highest, gl.load(positions + at).to(gl.int32))
    blocks = gl.minimum(highest + KEYS, table_width * PAGE) // KEYS
    begin = blocks * gl.program_id(0) // gl.num_programs(0)
    end = blocks * (gl.program_id(0) + 1) // gl.num_programs(0)
    BYTES: gl.constexpr = KEYS * D * TYPE.primitive_bitwidth // 8 + (KEYS * 4 if CODED else 0)
    gl.warp_specialize(
        [
            (consume, (0, q, weights, positions, scores, tokens, first, score_row,
                       begin, end, there, free, places, scale_places, queries.index(0), H, D, STAGES, CODED)),
            (consume, (1, q, weights, positions, scores, tokens, first + EACH, score_row,
                       begin, end, there, free, places, scale_places, queries.index(1), H, D, STAGES, CODED)),
            (consume, (2, q, weights, positions, scores, tokens, first + 2 * EACH, score_row,
                       begin, end, there, free, places, scale_places, queries.index(2), H, D, STAGES, CODED)),
            (consume, (3, q, weights, positions, scores, tokens, first + 3 * EACH, score_row,
                       begin, end, there, free, places, scale_places, queries.index(3), H, D, STAGES, CODED)),
            (produce, (keys, scales, table, table_width, begin, end, there, free, places, scale_places, PAGE, STAGES, CODED, BYTES)),
        ],
        [WARPS, WARPS, WARPS, 1],
        [REGISTERS, REGISTERS, REGISTERS, 24],
    )  # fmt: skip
