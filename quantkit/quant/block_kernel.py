# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""A block of GPTQ's columns in one kernel launch on a GPU, where PyTorch needs some ten small ones
per column.

A program holds all columns of ROWS rows and processes them in order: look up the scale, round,
store the error, and update the remaining columns. The operations are those of
`quantize` of `IntQuantizer`, `Fp4Quantizer` and `Fp8Quantizer`; clamping precedes rounding, which is the same
if the limits are whole levels, and keeps every number where adding and subtracting 1.5 * 2^23
rounds to even.

A linear of many columns is limited by launches from the host, so the elementwise operations before
and after are done here, too.
"""

import triton
import triton.language as tl
from torch import Tensor

from quantkit.grids.base import Quantizer
from quantkit.grids.e2m1 import E2M1_MAX
from quantkit.grids.nvfp4 import E4M3_MAX
from quantkit.quant.block_rounding import BlockParts, ColumnScales

ROWS, FEW_ROWS = 16, 8
"""Of a program, which is one warp: columns depend on each other, so a program's speed is the number
of instructions of a column. FEW_ROWS if all rows are enough programs for the GPU."""
FEW = 2048
"""Rows, over a batch, up to which programs have FEW_ROWS."""
HALF_EVEN = tl.constexpr(12582912.0)
FP4_END = tl.constexpr(E2M1_MAX)
FP8_END = tl.constexpr(E4M3_MAX)


@triton.jit
def _whole(x):
    """Round to the nearest integer, ties to even; |x| below 2^22."""
    return (x + HALF_EVEN) - HALF_EVEN


@triton.jit
def _round_block(
    target, update, scales, zero, groups, pivot, values, before, difference, factored_error,
    rows_all, steps_batch, groups_batch, values_batch, before_batch, apart_batch, seen_batch, low,
    high,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, FP4: tl.constexpr,
    FP8: tl.constexpr, ZERO: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = row < rows_all
    at = column[:, None] * rows_all + row[None, :]
    become = tl.load(
        target + batch * COLUMNS * rows_all + at,
        mask=(column[:, None] < COLUMNS) & inside[None, :],
        other=0.0,
    )
    answers = update + batch * COLUMNS * COLUMNS + column
    sizes, noughts, groups = (
        scales + batch * steps_batch + row,
        zero + batch * steps_batch + row,
        groups + batch * groups_batch,
    )
    values, before = values + batch * values_batch + row, before + batch * before_batch + row
    difference, factored_error, pivot = (
        difference + batch * apart_batch + row,
        factored_error + batch * seen_batch + row,
        pivot + batch * COLUMNS,
    )
    group = tl.load(groups)
    size = tl.load(sizes + group * rows_all, mask=inside, other=1.0)
    nought = tl.load(noughts + group * rows_all, mask=inside, other=0.0)
    group = tl.load(groups + 1 % COLUMNS)
    was = tl.load(before, mask=inside, other=0.0)
    inverse_t = tl.load(answers, mask=(column > 0) & (column < COLUMNS), other=0.0)
    for i in range(COLUMNS):
        # The next column's inputs are loaded while this one is rounded: the columns depend on
        # each other anyway.
        more = inside & (
            (i + 1) * rows_all + row < COLUMNS * rows_all
        )  # a tensor: Triton 3.2's interpreter does not take a Python bool as mask
        next_size = tl.load(sizes + group * rows_all, mask=more, other=1.0)
        next_nought = tl.load(noughts + group * rows_all, mask=more, other=0.0)
        next_was = tl.load(before + (i + 1) * rows_all, mask=more, other=0.0)
        next_answer = tl.load(
            answers + (i + 1) * COLUMNS, mask=(column > i + 1) & (column < COLUMNS), other=0.0
        )
        group = tl.load(groups + (i + 2) % COLUMNS)
        here = tl.sum(tl.where(column[:, None] == i, become, 0.0), axis=0)
        level = tl.div_rn(here, size)
        if FP4:
            level = tl.minimum(tl.maximum(level, -FP4_END), FP4_END)
            spacing = tl.where(tl.abs(level) < 2, 0.5, tl.where(tl.abs(level) < 4, 1.0, 2.0))
            level = _whole(level / spacing) * spacing
        elif FP8:
            level = tl.minimum(tl.maximum(level, -FP8_END), FP8_END)
            power = level.to(tl.int32, bitcast=True) & 0x7F800000
            # an eighth of the level's power of two, at least 2^-9
            spacing = tl.maximum(power - (3 << 23), 118 << 23).to(tl.float32, bitcast=True)
            level = _whole(level / spacing) * spacing
        elif ZERO:
            level = _whole(tl.minimum(tl.maximum(level, low - nought), high - nought))
        else:
            level = _whole(tl.minimum(tl.maximum(level, low), high))
        value = level * size
        left = here - value
        tl.store(values + i * rows_all, value, mask=inside)
        tl.store(difference + i * rows_all, was - value, mask=inside)
        if SEEN:
            tl.store(factored_error + i * rows_all, left * tl.load(pivot + i), mask=inside)
        become += inverse_t[:, None] * left[None, :]
        size, nought, was, inverse_t = next_size, next_nought, next_was, next_answer


def round_block(
    target: Tensor, update: Tensor, quantizer: Quantizer, steps: ColumnScales, parts: BlockParts
) -> None:
    """A `RoundBlock`. At most one leading dimension."""
    columns, rows = target.shape[-2:]
    target, update_t = target.contiguous(), update.mT.contiguous()
    size, zero, groups = steps.scales.scale.contiguous(), steps.scales.zero_point, steps.groups
    nought = size if zero is None else zero.contiguous()
    factor = size if parts.pivot is None else parts.pivot.contiguous()
    assert size.shape[-1] == rows, size.shape
    assert groups.shape[-1] == columns, groups.shape
    assert groups.stride(-1) == 1, groups.stride()
    in_all = (
        parts.values,
        parts.before,
        parts.difference,
        parts.difference if parts.factored_error is None else parts.factored_error,
    )
    assert all(one.stride()[-2:] == (rows, 1) for one in in_all), (
        f"not whole columns: {[one.stride() for one in in_all]}"
    )
    batch = len(target) if target.dim() == 3 else 1
    low, high = quantizer.code_range or (0, 0)
    own = ROWS if rows * batch > FEW else FEW_ROWS
    _round_block[(triton.cdiv(rows, own), batch)](
        target, update_t, size, nought, groups, factor, *in_all,
        rows, _batch_stride(size), groups.stride(0) if groups.dim() == 2 else 0,
        *map(_batch_stride, in_all),
        float(low), float(high),
        COLUMNS=columns, WIDTH=triton.next_power_of_2(columns), ROWS=own,
        FP4=quantizer.kind == "fp4", FP8=quantizer.kind == "fp8",
        ZERO=zero is not None, SEEN=parts.factored_error is not None, num_warps=1,
    )  # fmt: skip


def _batch_stride(t: Tensor) -> int:
    """From one of a batch to the next."""
    return t.stride(0) if t.dim() == 3 else 0
