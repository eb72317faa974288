"""A group of weights, or a row, that is far larger than those of its row and those of its column:
its scale is another number.

A row of a model may be large, and so may an input, in all groups alike. One large weight makes a
group's scale large, and its other codes small. A group of which all weights are large, among small
ones on every side, was not trained: a bit of its scale is another one.
"""

import torch
from torch import Tensor

from quantkit.diagnosis.stored_rows import Rows

_LONE = 60.0
"""Times the usual size of its row and of its column."""
_FULL = 0.5
"""Times the usual size of codes that those of a group have at least whose scale is not one large
weight's."""


def lone_group(rows: Rows) -> str:
    """What is wrong in the sampled rows, in words; empty if nothing is."""
    if rows.scale is None or rows.codes is None or rows.of_group is None:
        return ""
    # Scales first, which are few: codes of one linear are of about the same size in all groups.
    if not _told(rows.scale.abs(), _LONE / 2):
        return ""
    centred = rows.codes if rows.zero_point is None else rows.codes - rows.by_input(rows.zero_point)
    full = rows.group_means(centred.square()).sqrt()
    size = full * rows.scale.abs()
    return _told(
        torch.where(full >= _FULL * full.median(), size, size.clamp(max=float(size.median()))),
        _LONE,
    )


def lone_block(scales: Tensor) -> str:
    """The same of scales [rows, columns] of whole blocks, whose codes reach the end of their range
    in every block."""
    return _told(scales.float().abs(), _LONE)


def _told(size: Tensor, times: float) -> str:
    """size: [rows, groups]."""
    if size.shape[0] < 4:
        return ""
    if size.shape[1] == 1:
        first, second = size.flatten().topk(2).values.tolist()
        return (
            f"a row is {first / second:.0f} times as large as the next, in all of its codes"
            if 0 < times * second < first
            else ""
        )
    usual = torch.maximum(size.median(1, keepdim=True).values, size.median(0, keepdim=True).values)
    found = (size > times * usual) & (usual > 0)
    if not bool(found.any()):
        return ""
    largest = float((size / usual.clamp(min=1e-30))[found].max())
    return (
        f"all weights of a group are {largest:.0f} times the usual size in its row and in its "
        "column"
    )
