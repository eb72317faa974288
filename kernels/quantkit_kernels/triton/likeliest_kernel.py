# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""The largest number of a row, by many programs: of parts of it, then of these."""

import triton
import triton.language as tl

from quantkit_kernels.triton.weights_kernel import wait_for_input


@triton.jit
def of_parts(
    x, values, places, width, share, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The largest of `share` numbers of a row [width] of float32, in blocks, and its place. NaN
    counts as infinity."""
    wait_for_input(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, end = part * share, tl.minimum((part + 1) * share, width)
    x += row * width
    at = tl.arange(0, BLOCK)
    best, place = float("-inf"), tl.minimum(first, width - 1)
    for start in range(first, end, BLOCK):
        some = tl.load(x + start + at, mask=start + at < end, other=float("-inf"))
        some = tl.where(some != some, float("inf"), some)
        largest, where = tl.max(some, 0, return_indices=True, return_indices_tie_break_left=True)
        place = tl.where(largest > best, start + where, place)
        best = tl.maximum(largest, best)
    tl.store(values + row * PARTS + part, best)
    tl.store(places + row * PARTS + part, place)


@triton.jit
def of_rows(values, places, found, PARTS: tl.constexpr, PDL: tl.constexpr):
    """The place of the largest part's."""
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    some = tl.load(values + row * PARTS + tl.arange(0, PARTS))
    _, part = tl.max(some, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(found + row, tl.load(places + row * PARTS + part).to(tl.int64))
