"""Blocks of rows for launches on the cube."""

import torch
from quantkit_kernels.ascend.launch import Blocks


def in_order(experts, m, rows):
    """m rows, so many to a block but the last, each block of the expert that is named."""
    first = torch.arange(0, m, rows, dtype=torch.int32)
    assert len(first) == len(experts), (m, rows)
    return Blocks(rows, experts, first, (first + rows).clamp(max=m))
