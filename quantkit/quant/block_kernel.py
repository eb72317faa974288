# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""A block of GPTQ's columns in one kernel launch on a GPU, where PyTorch needs some ten small ones
per column.

A program holds ROWS rows and processes STRIP columns at a time, in order: look up the scale, round,
store the error, and update the remaining columns of the strip. A strip begins with the errors of all
earlier ones, as one product each, read back from where its own targets were.

A linear of many columns is limited by launches from the host, so the elementwise operations before
and after are done here, too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.grids.base import Quantizer
from quantkit.grids.best_scale_kernel import round_level
from quantkit.quant.block_rounding import BlockParts, ColumnScales, batch_stride

ROWS, STRIP = 32, 32
"""Of a program, which is one warp: columns depend on each other, so a program's speed is the number
of instructions of a column."""
PRECISION = "tf32x3" if torch.version.cuda and torch.cuda.is_available() else "ieee"
"""Of the products of errors: float32's, or near it."""


@triton.jit
def _round_block(
    target, update, scales, zero, groups, pivot, values, before, difference, factored_error,
    rows_all, steps_batch, groups_batch, values_batch, before_batch, apart_batch, seen_batch, low,
    high,
    COLUMNS: tl.constexpr, STRIP: tl.constexpr, ROWS: tl.constexpr, FP4: tl.constexpr,
    FP8: tl.constexpr, ZERO: tl.constexpr, SEEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, STRIP)
    inside = row < rows_all
    target += batch * COLUMNS * rows_all + row
    update += batch * COLUMNS * COLUMNS
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
    for start in range(0, COLUMNS, STRIP):
        own = start + column
        here_too = (own < COLUMNS)[:, None] & inside[None, :]
        become = tl.load(target + own[:, None] * rows_all, mask=here_too, other=0.0)
        for earlier in range(0, start, STRIP):
            past = earlier + column
            errors = tl.load(target + past[:, None] * rows_all, mask=inside[None, :], other=0.0)
            coefficients = tl.load(
                update + past[None, :] * COLUMNS + own[:, None],
                mask=(own < COLUMNS)[:, None],
                other=0.0,
            )
            become = tl.dot(coefficients, errors, acc=become, input_precision=PRECISION)
        answers = update + own
        inverse_t = tl.load(
            answers + start * COLUMNS, mask=(column > 0) & (own < COLUMNS), other=0.0
        )
        for i in range(start, min(start + STRIP, COLUMNS)):
            # The next column's inputs are loaded while this one is rounded: the columns depend on
            # each other anyway.
            more = inside & (
                (i + 1) * rows_all + row < COLUMNS * rows_all
            )  # a tensor: Triton 3.2's interpreter does not take a Python bool as mask
            next_size = tl.load(sizes + group * rows_all, mask=more, other=1.0)
            next_nought = tl.load(noughts + group * rows_all, mask=more, other=0.0)
            next_was = tl.load(before + (i + 1) * rows_all, mask=more, other=0.0)
            next_answer = tl.load(
                answers + (i + 1) * COLUMNS, mask=(own > i + 1) & (own < COLUMNS), other=0.0
            )
            group = tl.load(groups + (i + 2) % COLUMNS)
            here = tl.sum(tl.where(own[:, None] == i, become, 0.0), axis=0)
            level = round_level(tl.div_rn(here, size), nought, low, high, FP4, FP8, ZERO)
            value = level * size
            left = here - value
            tl.store(values + i * rows_all, value, mask=inside)
            tl.store(difference + i * rows_all, was - value, mask=inside)
            tl.store(target + i * rows_all, left, mask=inside)
            if SEEN:
                tl.store(factored_error + i * rows_all, left * tl.load(pivot + i), mask=inside)
            become += inverse_t[:, None] * left[None, :]
            size, nought, was, inverse_t = next_size, next_nought, next_was, next_answer
        tl.debug_barrier()  # the errors are read by other threads


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
    _round_block[(triton.cdiv(rows, ROWS), batch)](
        target, update_t, size, nought, groups, factor, *in_all,
        rows, batch_stride(size), groups.stride(0) if groups.dim() == 2 else 0,
        *map(batch_stride, in_all),
        float(low), float(high),
        COLUMNS=columns, STRIP=STRIP, ROWS=ROWS, PRECISION=PRECISION,
        FP4=quantizer.kind == "fp4", FP8=quantizer.kind == "fp8",
        ZERO=zero is not None, SEEN=parts.factored_error is not None, num_warps=1,
    )  # fmt: skip
