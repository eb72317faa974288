# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""A block of columns of `gptq` in one launch on a GPU, where PyTorch takes some ten small ones for each column.

A program holds all columns of ROWS rows and goes from column to column: round it, and let the columns after it make up for what it
missed. The operations are those of `IntRounder.snap` and `Fp4Rounder.snap`; clamping comes before rounding, which is the same where
the ends are whole levels and keeps every number where adding and taking away 1.5 * 2^23 rounds to even.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.quant.fp4 import E2M1_MAX
from quantkit.quant.integer import int_range
from quantkit.quant.rounding import Fp4Rounder, IntRounder, Rounder, RoundingStep

ROWS = 16
"""Of a program, which is one warp: columns wait for each other, so a program is as fast as the fewest instructions of a column."""
HALF_EVEN = tl.constexpr(12582912.0)
FP4_END = tl.constexpr(E2M1_MAX)


@triton.jit
def _whole(x):
    """To the nearest whole number, ties to even; |x| below 2^22."""
    return (x + HALF_EVEN) - HALF_EVEN


@triton.jit
def _round_block(
    target, reaction, step, zero, values, missed, rows_all, values_batch, low, high,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, FP4: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = row < rows_all
    block = batch * COLUMNS * rows_all
    at = column[:, None] * rows_all + row[None, :]
    become = tl.load(target + block + at, mask=(column[:, None] < COLUMNS) & inside[None, :], other=0.0)
    answers = reaction + batch * COLUMNS * COLUMNS + column
    size = tl.load(step + block + row, mask=inside, other=1.0)
    nought = tl.load(zero + block + row, mask=inside, other=0.0)
    answer = tl.load(answers, mask=(column > 0) & (column < COLUMNS), other=0.0)
    for i in range(COLUMNS):
        own = block + i * rows_all + row
        # What the next column needs is on its way while this one is rounded: the columns wait for each other as it is.
        more = inside & ((i + 1) * rows_all + row < COLUMNS * rows_all)  # of tensors: Triton 3.2's interpreter has no mask of a plain bool
        next_size = tl.load(step + own + rows_all, mask=more, other=1.0)
        next_nought = tl.load(zero + own + rows_all, mask=more, other=0.0)
        next_answer = tl.load(answers + (i + 1) * COLUMNS, mask=(column > i + 1) & (column < COLUMNS), other=0.0)
        here = tl.sum(tl.where(column[:, None] == i, become, 0.0), axis=0)
        level = tl.div_rn(here, size)
        if FP4:
            level = tl.minimum(tl.maximum(level, -FP4_END), FP4_END)
            spacing = tl.where(tl.abs(level) < 2, 0.5, tl.where(tl.abs(level) < 4, 1.0, 2.0))
            level = _whole(level / spacing) * spacing
        elif ZERO:
            level = _whole(tl.minimum(tl.maximum(level, low - nought), high - nought))
        else:
            level = _whole(tl.minimum(tl.maximum(level, low), high))
        value = level * size
        left = here - value
        tl.store(values + batch * values_batch + i * rows_all + row, value, mask=inside)
        tl.store(missed + own, left, mask=inside)
        become += answer[:, None] * left[None, :]
        size, nought, answer = next_size, next_nought, next_answer


def round_block(target: Tensor, reaction: Tensor, rounder: Rounder, step: RoundingStep, values: Tensor) -> Tensor:
    """As `gptq`'s own: rounds target [..., C, N] into `values`, a part of [..., K, N], and returns the rounding
    errors [..., C, N]; target is not changed. reaction [..., C, C]: by how much column i changes for an error of 1 in column j. At most
    one leading dimension."""
    columns, rows = target.shape[-2:]
    target, told, size = target.contiguous(), reaction.mT.contiguous(), step.step.contiguous()
    zero = None if step.zero is None else step.zero.contiguous()
    missed = torch.empty_like(target)
    assert size.shape == target.shape
    assert values.stride()[-2:] == (rows, 1), f"not whole columns of one memory: {values.stride()}"
    batch, apart = (len(target), values.stride(0)) if target.dim() == 3 else (1, 0)
    low, high = int_range(rounder.grid.bits) if isinstance(rounder, IntRounder) else (0, 0)
    _round_block[(triton.cdiv(rows, ROWS), batch)](
        target, told, size, size if zero is None else zero, values, missed, rows, apart, float(low), float(high),
        COLUMNS=columns, WIDTH=triton.next_power_of_2(columns), ROWS=ROWS,
        FP4=isinstance(rounder, Fp4Rounder), ZERO=zero is not None, num_warps=1,
    )  # fmt: skip
    return missed
