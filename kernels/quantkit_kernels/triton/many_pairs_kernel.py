# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Many token-expert pairs sorted by expert, by blocks of pairs: how many of a block ask for each expert, how many before it did, and where
each pair belongs. Pairs of an expert keep their order; an id below 0 is no expert's."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs"])
def count_pairs(ids, pairs, counts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """A program per block: counts int32 [blocks, EXPERTS]."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    some = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32)
    found = tl.histogram(tl.maximum(some, 0), EXPERTS, mask=some >= 0)
    tl.store(counts + block * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit(do_not_specialize=["blocks"])
def count_before(counts, totals, blocks, EXPERTS: tl.constexpr, EACH: tl.constexpr, BLOCKS: tl.constexpr):
    """A program per EACH experts: counts become those of all blocks before; totals int32 [EXPERTS]."""
    expert = tl.program_id(0) * EACH + tl.arange(0, EACH)
    total = tl.zeros((EACH,), tl.int32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        at = counts + block[:, None] * EXPERTS + expert[None, :]
        inside = block[:, None] < blocks
        own = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(own, 0) - own, mask=inside)
        total += tl.sum(own, 0)
    tl.store(totals + expert, total)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def place_pairs(
    ids, pairs, before, totals, tile_expert, tile_count, order, tiles,
    EXPERTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A program per block of pairs, which writes TILES of all tiles, too. STEP: pairs or experts that are compared at a time."""
    block = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    total = tl.load(totals + number)
    used = (total + TOKENS - 1) // TOKENS
    end = tl.cumsum(used, 0)
    tile = block * TILES + tl.arange(0, TILES)
    expert = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1)
    own = number[None, :] == expert[:, None]
    within = tile - tl.sum(tl.where(own, (end - used)[None, :], 0), 1)
    left = tl.sum(tl.where(own, total[None, :], 0), 1) - within * TOKENS
    taken = expert < EXPERTS
    tl.store(tile_expert + tile, tl.where(taken, expert, -1), mask=tile < tiles)
    tl.store(tile_count + tile, tl.where(taken, tl.minimum(left, TOKENS), 0), mask=tile < tiles)

    pair = tl.arange(0, BLOCK)
    at = block * BLOCK + pair
    some = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32)
    place = tl.load(before + block * EXPERTS + some, mask=some >= 0, other=0)
    for start in range(0, BLOCK, STEP):
        other = block * BLOCK + start + tl.arange(0, STEP)
        its = tl.load(ids + other, mask=other < pairs, other=-1).to(tl.int32)
        earlier = (its[None, :] == some[:, None]) & (other[None, :] < at[:, None])
        place += tl.sum(earlier.to(tl.int32), 1)
    tiles_before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, EXPERTS, STEP):
        lower = start + tl.arange(0, STEP)
        its_used = (tl.load(totals + lower) + TOKENS - 1) // TOKENS
        tiles_before += tl.sum(tl.where(lower[None, :] < some[:, None], its_used[None, :], 0), 1)
    tl.store(order + tiles_before * TOKENS + place, at, mask=some >= 0)
