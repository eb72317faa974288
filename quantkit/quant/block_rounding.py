"""Rounding of one block of GPTQ's columns on a CPU, and the scales of its columns in GPTQ's order.

PyTorch needs some ten small operations per column; the project's C++ (round_block.cpp of the
kernels) does a block in one call.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from quantkit_kernels.cpu.build import once
from torch import Tensor

from quantkit.grids.base import Quantizer, Scales


@dataclass(frozen=True)
class ColumnScales:
    """Of C columns. scales: [..., G, N] of all groups; groups int64 [..., C], or [C] for all: the
    group of each column."""

    scales: Scales
    groups: Tensor

    @property
    def spread(self) -> Scales:
        """Of every column, [..., C, N]."""
        return self.scales.map(lambda t: take(t, self.groups))


class GroupScales:
    """Scales [..., N, G] in column order. groups int64 [..., K]: the group of each column; divisor
    [..., K, C] divides the scales for C candidates, whose rows follow one another in N."""

    def __init__(self, scales: Scales, groups: Tensor, divisor: Tensor | None = None) -> None:
        self.scales = scales.map(lambda t: t.mT.contiguous())
        self.groups, self.divisor = groups, divisor

    def of(self, start: int, stop: int) -> ColumnScales:
        """Of columns start..stop."""
        own = ColumnScales(self.scales, self.groups[..., start:stop])
        if self.divisor is None:
            return own
        divisor, spread = self.divisor[..., start:stop, :], own.spread
        candidates = spread.scale.unflatten(-1, (divisor.shape[-1], -1))
        scale = candidates.div_(divisor.unsqueeze(-1)).flatten(-2)
        return ColumnScales(
            Scales(scale, spread.zero_point), torch.arange(stop - start, device=scale.device)
        )

    @property
    def of_rows(self) -> Scales:
        """As they were given, [..., N, G], with the changes made since."""
        return self.scales.map(lambda t: t.mT.contiguous())


def group_of_columns(order: Tensor, w: Tensor, quantizer: Quantizer) -> Tensor:
    return order.div(quantizer.group_size or w.shape[-1], rounding_mode="floor")


def take(t: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [..., C] of [..., K, N], contiguous."""
    if index.dim() == 1:
        return t.contiguous().index_select(
            -2, index
        )  # contiguous rows: several times as fast as from a transposed tensor
    return t.gather(-2, index.unsqueeze(-1).expand(*index.shape, t.shape[-1]))


@dataclass(frozen=True)
class BlockParts:
    """Rows of a block's C columns in tensors [..., K, N] of all columns: each float32 [..., C, N],
    a column contiguous in memory.

    values: output, the rounded columns. before: input, the values they are compared with; may alias
    `values`. difference: output, before - values. factored_error: output if given, the rounding
    errors times pivot [..., C, 1], which is given with it.
    """

    values: Tensor
    before: Tensor
    difference: Tensor
    factored_error: Tensor | None = None
    pivot: Tensor | None = None

    def __post_init__(self) -> None:
        assert (self.factored_error is None) == (self.pivot is None), (
            "factored_error is errors times pivot"
        )


class RoundBlock(Protocol):
    """Rounds the C columns of target float32 [..., C, N], which is overwritten, one after the other
    into `parts`; the remaining columns compensate for the errors of those before. update float32
    [..., C, C]: change of column i for an error of 1 in column j."""

    def __call__(
        self,
        target: Tensor,
        update: Tensor,
        quantizer: Quantizer,
        steps: ColumnScales,
        parts: BlockParts,
    ) -> None: ...


_INTEGER, _INTEGER_WITH_ZERO, _E2M1, _E4M3 = range(4)
STRIP = 16
_MOST_COLUMNS = 128
"""Limit of the C++."""


def has_cpp() -> bool:
    """Whether this machine has the C++ or can compile it."""
    return once("round_block") is not None


def round_block_cpp(
    target: Tensor, update: Tensor, quantizer: Quantizer, scales: Scales, values: Tensor
) -> Tensor:
    """Rounds target [..., C, N], C at most 128, into `values`, a part of [..., K, N], and returns
    the rounding errors [..., C, N]; target is not changed. update [..., C, C]: change of column i
    for an error of 1 in column j. At most one leading dimension."""
    columns, rows = target.shape[-2:]
    assert columns <= _MOST_COLUMNS, columns
    zero = scales.scale if scales.zero_point is None else scales.zero_point
    update_t = [one.contiguous() for one in (target, update, scales.scale, zero)]
    errors = torch.empty_like(update_t[0])
    assert scales.scale.shape == zero.shape == target.shape
    assert values.stride()[-2:] == (rows, 1), f"not whole columns of one memory: {values.stride()}"
    batch, difference = (len(target), values.stride(0)) if target.dim() == 3 else (1, 0)
    integer = _INTEGER if scales.zero_point is None else _INTEGER_WITH_ZERO
    grid = {"fp4": _E2M1, "fp8": _E4M3}.get(quantizer.kind, integer)
    low, high = quantizer.code_range or (0, 0)
    loaded = once("round_block")
    assert loaded is not None, "has_cpp() was called before"
    pointers = (one.data_ptr() for one in (*update_t, values, errors))
    loaded.qk_round_block(
        *pointers, grid, batch, columns, rows, difference, low, high, torch.get_num_threads()
    )
    return errors


def round_block_torch(
    target: Tensor, update: Tensor, quantizer: Quantizer, scales: Scales, values: Tensor
) -> Tensor:
    """As `round_block_cpp`, but target is overwritten."""
    errors = torch.empty_like(target)
    width = target.shape[-2]
    sizes, zeros = (
        scales.scale.unbind(-2),
        [None] * width if scales.zero_point is None else scales.zero_point.unbind(-2),
    )
    for strip in range(0, width, STRIP):
        after = min(strip + STRIP, width)
        _update_columns(target, update, errors, strip, after, 0, strip)
        for i in range(strip, after):
            _update_columns(target, update, errors, i, i + 1, strip, i)
            column = target[..., i, :]
            value = quantizer.quantize(column, Scales(sizes[i], zeros[i]))
            values[..., i, :] = value
            torch.sub(column, value, out=errors[..., i, :])
    return errors


def _update_columns(
    target: Tensor, update: Tensor, errors: Tensor, start: int, stop: int, first: int, last: int
) -> None:
    """Update columns start..stop for the errors of columns first..last."""
    if first == last:
        return
    rows, coefficients, known = (
        target[..., start:stop, :],
        update[..., start:stop, first:last],
        errors[..., first:last, :],
    )
    if target.dim() == 2:
        rows.addmm_(coefficients, known)
    else:
        rows.baddbmm_(coefficients, known)
