# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""What decode_batch.py computes, on a GPU: a program for each sequence."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _accepted(known, chosen, found, most, number):
    one = tl.program_id(0)
    own = known + one * (2 + most)
    first = tl.load(own)
    right = first * 0
    go_on = right == 0
    for place in range(most):
        # A sequence with fewer guesses has -1 there, which is no token; its row may be behind the
        # last.
        guess = tl.load(own + 2 + place)
        go_on = go_on & (guess >= 0)
        go_on = go_on & (tl.load(chosen + first + place, mask=go_on, other=-1) == guess)
        right += go_on.to(tl.int64)
    tl.store(found + one, right)
    tl.store(found + number + one, first + right)
    tl.store(found + 2 * number + one, tl.load(own + 1) + right)


@triton.jit
def _next_rows(known, chosen, guessed, made, number, each, width, block_size):
    one = tl.program_id(0)
    own = known + one * width
    right = tl.load(guessed + one)
    place = tl.load(own + 1) + right
    token = tl.load(chosen + tl.load(own) + right)
    rows = number * each
    for turn in range(each):
        if turn > 0:
            token = tl.load(guessed + turn * number + one)
        at = place + turn
        row = made + one * each + turn
        tl.store(row, token)
        tl.store(row + rows, at)
        tl.store(
            row + 2 * rows,
            tl.load(own + 2 + at // block_size).to(tl.int64) * block_size + at % block_size,
        )


@triton.jit
def _cache_places(places, tables, made, number, width, end, block_size):
    one = tl.program_id(0)
    place = tl.load(places + one)
    within = tl.minimum(place, end - 1)
    block = tl.load(tables + one * width + within // block_size).to(tl.int64)
    tl.store(made + one, within)
    tl.store(made + number + one, tl.where(place < end, block, 0) * block_size + place % block_size)


def accepted(known: Tensor, chosen: Tensor) -> Tensor:
    """As `decode_batch.accepted`."""
    number, width = known.shape
    found = known.new_empty(3, number)
    _accepted[(number,)](
        known.contiguous(), chosen.contiguous(), found, width - 2, number, num_warps=1
    )
    return found


def next_rows(known: Tensor, chosen: Tensor, guessed: Tensor, block_size: int) -> Tensor:
    """As `decode_batch.next_rows`."""
    number, width = known.shape
    each = len(guessed) // number
    made = torch.empty(3, number * each, dtype=torch.int64, device=known.device)
    tensors = (known.contiguous(), chosen.contiguous(), guessed.contiguous(), made)
    _next_rows[(number,)](*tensors, number, each, width, block_size, num_warps=1)
    return made


def cache_places(places: Tensor, tables: Tensor, block_size: int, reach: int) -> Tensor:
    """As `decode_batch.cache_places`."""
    number, width = tables.shape
    made = places.new_empty(2, number)
    end = min(reach, width * block_size)
    _cache_places[(number,)](
        places.contiguous(), tables.contiguous(), made, number, width, end, block_size, num_warps=1
    )
    return made
