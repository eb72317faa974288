# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Token-expert pairs sorted by expert, in tiles of one expert each: one launch, and the host does
not wait for the device."""

import triton
import triton.language as tl

from quantkit_kernels.triton.weights_kernel import wait_for_input


@triton.jit(do_not_specialize=["pairs", "tiles", "experts"])
def sort_pairs(
    ids, pairs, tile_expert, tile_count, order, tiles, experts, EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program per expert: it counts the pairs of all experts, so that it knows where its own
    tiles begin, and writes them.

    EXPERTS: a power of two, at least `experts`. The last program also marks the tiles that no
    expert uses.
    """
    wait_for_input(PDL)
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    number = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, pairs, BLOCK):
        some = tl.load(ids + start + at, mask=start + at < pairs, other=0).to(tl.int32)
        counts += tl.histogram(some, EXPERTS, mask=start + at < pairs)
    used = (counts + TOKENS - 1) // TOKENS
    first = tl.sum(tl.where(number < expert, used, 0), 0)
    own = tl.sum(tl.where(number == expert, counts, 0), 0)
    for tile in range(0, (own + TOKENS - 1) // TOKENS):
        tl.store(tile_expert + first + tile, expert)
        tl.store(tile_count + first + tile, tl.minimum(own - tile * TOKENS, TOKENS))
    if expert == experts - 1:
        for tile in range(first + (own + TOKENS - 1) // TOKENS, tiles):
            tl.store(tile_expert + tile, -1)
    if own > 0:
        before = 0
        for start in range(0, pairs, BLOCK):
            some = tl.load(ids + start + at, mask=start + at < pairs, other=-1).to(tl.int32)
            mine = (some == expert).to(tl.int32)
            place = before + tl.cumsum(mine, 0) - 1
            tl.store(order + first * TOKENS + place, start + at, mask=mine > 0)
            before += tl.sum(mine, 0)
