# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Triton kernels of decode_batch.py: one program per sequence."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _accepted(table, sampled, out, most, number):
    one = tl.program_id(0)
    own = table + one * (2 + most)
    first = tl.load(own)
    count = first * 0
    go_on = count == 0
    for place in range(most):
        # Padding is -1, which matches no token; its row may lie after the last one.
        draft = tl.load(own + 2 + place)
        go_on = go_on & (draft >= 0)
        go_on = go_on & (tl.load(sampled + first + place, mask=go_on, other=-1) == draft)
        count += go_on.to(tl.int64)
    tl.store(out + one, count)
    tl.store(out + number + one, first + count)
    tl.store(out + 2 * number + one, tl.load(own + 1) + count)


@triton.jit
def _next_rows(table, sampled, drafted, out, number, each, width, block_size):
    one = tl.program_id(0)
    own = table + one * width
    count = tl.load(drafted + one)
    place = tl.load(own + 1) + count
    token = tl.load(sampled + tl.load(own) + count)
    rows = number * each
    for step in range(each):
        if step > 0:
            token = tl.load(drafted + step * number + one)
        at = place + step
        row = out + one * each + step
        tl.store(row, token)
        tl.store(row + rows, at)
        tl.store(
            row + 2 * rows,
            tl.load(own + 2 + at // block_size).to(tl.int64) * block_size + at % block_size,
        )


@triton.jit
def _cache_slots(positions, tables, out, number, width, end, block_size):
    one = tl.program_id(0)
    place = tl.load(positions + one)
    clamped = tl.minimum(place, end - 1)
    block = tl.load(tables + one * width + clamped // block_size).to(tl.int64)
    tl.store(out + one, clamped)
    tl.store(out + number + one, tl.where(place < end, block, 0) * block_size + place % block_size)


def accepted(table: Tensor, sampled: Tensor) -> Tensor:
    """As `decode_batch.accepted`."""
    number, width = table.shape
    out = table.new_empty(3, number)
    _accepted[(number,)](
        table.contiguous(), sampled.contiguous(), out, width - 2, number, num_warps=1
    )
    return out


def next_rows(table: Tensor, sampled: Tensor, drafted: Tensor, block_size: int) -> Tensor:
    """As `decode_batch.next_rows`."""
    number, width = table.shape
    each = len(drafted) // number
    out = torch.empty(3, number * each, dtype=torch.int64, device=table.device)
    tensors = (table.contiguous(), sampled.contiguous(), drafted.contiguous(), out)
    _next_rows[(number,)](*tensors, number, each, width, block_size, num_warps=1)
    return out


def cache_slots(positions: Tensor, tables: Tensor, block_size: int, limit: int) -> Tensor:
    """As `decode_batch.cache_slots`."""
    number, width = tables.shape
    out = positions.new_empty(2, number)
    end = min(limit, width * block_size)
    _cache_slots[(number,)](
        positions.contiguous(),
        tables.contiguous(),
        out,
        number,
        width,
        end,
        block_size,
        num_warps=1,
    )
    return out
