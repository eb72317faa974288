# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Triton kernels of decode_batch.py: one program per sequence."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _accepted(known, sampled, found, most, number):
    one = tl.program_id(0)
    own = known + one * (2 + most)
    first = tl.load(own)
    count = first * 0
    go_on = count == 0
    for place in range(most):
        # Padding is -1, which matches no token; its row may lie after the last one.
        draft = tl.load(own + 2 + place)
        go_on = go_on & (draft >= 0)
        go_on = go_on & (tl.load(sampled + first + place, mask=go_on, other=-1) == draft)
        count += go_on.to(tl.int64)
    tl.store(found + one, count)
    tl.store(found + number + one, first + count)
    tl.store(found + 2 * number + one, tl.load(own + 1) + count)


@triton.jit
def _next_rows(known, sampled, drafted, made, number, each, width, block_size):
    one = tl.program_id(0)
    own = known + one * width
    count = tl.load(drafted + one)
    place = tl.load(own + 1) + count
    token = tl.load(sampled + tl.load(own) + count)
    rows = number * each
    for step in range(each):
        if step > 0:
            token = tl.load(drafted + step * number + one)
        at = place + step
        row = made + one * each + step
        tl.store(row, token)
        tl.store(row + rows, at)
        tl.store(
            row + 2 * rows,
            tl.load(own + 2 + at // block_size).to(tl.int64) * block_size + at % block_size,
        )


@triton.jit
def _cache_slots(positions, tables, made, number, width, end, block_size):
    one = tl.program_id(0)
    place = tl.load(positions + one)
    within = tl.minimum(place, end - 1)
    block = tl.load(tables + one * width + within // block_size).to(tl.int64)
    tl.store(made + one, within)
    tl.store(made + number + one, tl.where(place < end, block, 0) * block_size + place % block_size)


def accepted(known: Tensor, sampled: Tensor) -> Tensor:
    """As `decode_batch.accepted`."""
    number, width = known.shape
    found = known.new_empty(3, number)
    _accepted[(number,)](
        known.contiguous(), sampled.contiguous(), found, width - 2, number, num_warps=1
    )
    return found


def next_rows(known: Tensor, sampled: Tensor, drafted: Tensor, block_size: int) -> Tensor:
    """As `decode_batch.next_rows`."""
    number, width = known.shape
    each = len(drafted) // number
    made = torch.empty(3, number * each, dtype=torch.int64, device=known.device)
    tensors = (known.contiguous(), sampled.contiguous(), drafted.contiguous(), made)
    _next_rows[(number,)](*tensors, number, each, width, block_size, num_warps=1)
    return made


def cache_slots(positions: Tensor, tables: Tensor, block_size: int, limit: int) -> Tensor:
    """As `decode_batch.cache_slots`."""
    number, width = tables.shape
    made = positions.new_empty(2, number)
    end = min(limit, width * block_size)
    _cache_slots[(number,)](
        positions.contiguous(),
        tables.contiguous(),
        made,
        number,
        width,
        end,
        block_size,
        num_warps=1,
    )
    return made
