# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Token-expert pairs of prompts sorted by expert, in tiles of one expert each, in two launches
whose programs read their own pairs: those of `experts_kernel.sort_pairs` read all of them twice."""

import triton
import triton.language as tl

from quantkit_kernels.triton.weights_kernel import wait_for_input


@triton.jit(do_not_specialize=["pairs"])
def count_pairs(ids, pairs, counts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """counts[block] = the pairs of each expert among BLOCK of them."""
    wait_for_input(PDL)
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    some = tl.load(ids + at, mask=at < pairs, other=0).to(tl.int32)
    tl.store(
        counts + block * EXPERTS + tl.arange(0, EXPERTS),
        tl.histogram(some, EXPERTS, mask=at < pairs),
    )


@triton.jit
def slots_of(
    ids, pairs, counts, block, blocks, EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """A block's pairs and the slot of each, in tiles of TOKENS; and of each expert how many pairs
    it has, its first tile, and the one after its last."""
    number = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, blocks, SOME):
        which = start + tl.arange(0, SOME)[:, None]
        some = tl.load(counts + which * EXPERTS + number[None, :], mask=which < blocks, other=0)
        total += tl.sum(some, 0)
        before += tl.sum(tl.where(which < block, some, 0), 0)
    used = (total + TOKENS - 1) // TOKENS
    end = tl.cumsum(used, 0)
    first = end - used
    own = tl.arange(0, BLOCK)
    at = block * BLOCK + own
    mine = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32)
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, BLOCK, SOME):
        others = start + tl.arange(0, SOME)
        theirs = tl.load(
            ids + block * BLOCK + others, mask=block * BLOCK + others < pairs, other=-1
        ).to(tl.int32)
        rank += tl.sum(
            ((theirs[None, :] == mine[:, None]) & (others[None, :] < own[:, None])).to(tl.int32), 1
        )
    slot = tl.gather(first * TOKENS + before, tl.maximum(mine, 0), 0) + rank
    return at, slot, total, first, end


@triton.jit(do_not_specialize=["pairs", "blocks", "tiles"])
def place_pairs(
    ids, pairs, counts, blocks, tile_expert, tile_count, order, tiles,
    EXPERTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    SOME: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per BLOCK pairs, which also describes TILES tiles; unused ones have expert -1 and
    no pairs. SOME: blocks, and pairs, that are looked at at once."""
    wait_for_input(PDL)
    block = tl.program_id(0)
    at, slot, total, first, end = slots_of(
        ids, pairs, counts, block, blocks, EXPERTS, TOKENS, BLOCK, SOME
    )
    tl.store(order + slot, at, mask=at < pairs)
    tile = block * TILES + tl.arange(0, TILES)
    expert = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1)
    known = tl.minimum(expert, EXPERTS - 1)
    count = tl.minimum(
        tl.gather(total, known, 0) - (tile - tl.gather(first, known, 0)) * TOKENS, TOKENS
    )
    tl.store(tile_expert + tile, tl.where(expert < EXPERTS, expert, -1), mask=tile < tiles)
    tl.store(tile_count + tile, tl.where(expert < EXPERTS, count, 0), mask=tile < tiles)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def place_rows(
    ids, pairs, counts, blocks, rows, ends, experts,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per BLOCK pairs: rows[pair] among all pairs sorted by expert. The first also
    writes where each expert's rows end."""
    wait_for_input(PDL)
    block = tl.program_id(0)
    at, row, _, _, end = slots_of(ids, pairs, counts, block, blocks, EXPERTS, 1, BLOCK, SOME)
    tl.store(rows + at, row, mask=at < pairs)
    number = tl.arange(0, EXPERTS)
    tl.store(ends + number, end, mask=(number < experts) & (block == 0))
