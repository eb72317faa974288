"""A block of columns of `gptq` in one call on a CPU, where PyTorch takes some ten small ones for
each column: by the project's C++ (round_block.cpp of the kernels)."""

import torch
from quantkit_kernels.cpu.build import once
from torch import Tensor

from quantkit.grids.integer import int_range
from quantkit.grids.rounding import IntRounder, Rounder, RoundingStep

_INTEGER, _INTEGER_WITH_ZERO, _E2M1 = range(3)
_MOST_COLUMNS = 128
"""For which the C++ has room."""


def is_there() -> bool:
    """Whether this machine has the C++ or can compile it."""
    return once("round_block") is not None


def round_block(
    target: Tensor, reaction: Tensor, rounder: Rounder, step: RoundingStep, values: Tensor
) -> Tensor:
    """As `gptq`'s own: rounds target [..., C, N], C at most 128, into `values`, a part of [..., K,
    N], and returns the rounding errors [..., C, N]; target is not changed. reaction [..., C, C]: by
    how much column i changes for an error of 1 in column j. At most one leading dimension."""
    columns, rows = target.shape[-2:]
    assert columns <= _MOST_COLUMNS, columns
    zero = step.step if step.zero is None else step.zero
    told = [one.contiguous() for one in (target, reaction, step.step, zero)]
    missed = torch.empty_like(told[0])
    assert step.step.shape == zero.shape == target.shape
    assert values.stride()[-2:] == (rows, 1), f"not whole columns of one memory: {values.stride()}"
    batch, apart = (len(target), values.stride(0)) if target.dim() == 3 else (1, 0)
    if isinstance(rounder, IntRounder):
        grid, (low, high) = (
            _INTEGER if step.zero is None else _INTEGER_WITH_ZERO,
            int_range(rounder.grid.bits),
        )
    else:
        grid, low, high = _E2M1, 0, 0
    loaded = once("round_block")
    assert loaded is not None, "is_there() was asked before"
    pointers = (one.data_ptr() for one in (*told, values, missed))
    loaded.qk_round_block(
        *pointers, grid, batch, columns, rows, apart, low, high, torch.get_num_threads()
    )
    return missed
