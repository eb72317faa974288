"""Rounding of one block of GPTQ's columns on a CPU, and the scales of its columns in GPTQ's order.

PyTorch needs some ten small operations per column; the project's C++ (round_block.cpp of the
kernels) does a block in one call.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from quantkit_kernels.cpu.build import once
from quantkit_kernels.cpu.nearest import grid_number
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


STRIP = 16
_MOST_COLUMNS = 128
"""Limit of the C++."""


def has_cpp() -> bool:
    """Whether this machine has the C++ or can compile it."""
    return once("round_block") is not None


def round_block_cpp(
    target: Tensor, update: Tensor, quantizer: Quantizer, steps: ColumnScales, parts: BlockParts
) -> None:
    """A `RoundBlock` of at most 128 columns and one leading dimension. Target is not changed."""
    columns, rows = target.shape[-2:]
    assert columns <= _MOST_COLUMNS, columns
    target, update, groups = target.contiguous(), update.contiguous(), steps.groups.contiguous()
    size, zero = steps.scales.scale.contiguous(), steps.scales.zero_point
    assert size.shape[-1] == rows, size.shape
    assert groups.shape[-1] == columns, groups.shape
    factored, pivot = parts.factored_error, parts.pivot
    in_all = parts.before, parts.values, parts.difference, parts.values
    if factored is not None and pivot is not None:
        in_all, pivot = (*in_all[:3], factored), pivot.contiguous()
    assert all(one.stride()[-2:] == (rows, 1) for one in in_all), (
        f"not whole columns: {[one.stride() for one in in_all]}"
    )
    zero = None if zero is None else zero.contiguous()
    loaded = once("round_block")
    assert loaded is not None, "has_cpp() was called before"
    own = target, update, size, size if zero is None else zero, groups
    *known, last = (one.data_ptr() for one in in_all)
    loaded.qk_round_block(
        *(one.data_ptr() for one in own),
        None if pivot is None else pivot.data_ptr(),
        *known,
        None if pivot is None else last,
        grid_number(quantizer.kind, zero),
        len(target) if target.dim() == 3 else 1,
        columns,
        rows,
        batch_stride(size),
        groups.stride(0) if groups.dim() == 2 else 0,
        *map(batch_stride, in_all),
        *(quantizer.code_range or (0, 0)),
        torch.get_num_threads(),
    )


def batch_stride(t: Tensor) -> int:
    """From one of a batch to the next."""
    return t.stride(0) if t.dim() == 3 else 0


def round_block_torch(
    target: Tensor, update: Tensor, quantizer: Quantizer, scales: Scales, values: Tensor
) -> Tensor:
    """Rounds target [..., C, N], which is overwritten, into `values`, and returns the rounding
    errors [..., C, N]. scales: of every column, [..., C, N]."""
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
