"""Operands of launches on the cube: blocks of rows, and weights far away."""

import torch
from ascend.guard import sparse
from quantkit_kernels.ascend.launch import Blocks
from quantkit_kernels.ascend.layout import PackedTiles


def in_order(experts, m, rows):
    """m rows, so many to a block but the last, each block of the expert that is named."""
    first = torch.arange(0, m, rows, dtype=torch.int32)
    assert len(first) == len(experts), (m, rows)
    return Blocks(rows, experts, first, (first + rows).clamp(max=m))


def last_of_many(packed):
    """An expert as the last of so many that its weights lie beyond 2^31 bytes, of which the others'
    memory is never touched; and its number int32 [1]."""
    count = (1 << 31) // packed.tensors[0].numel() + 3
    tensors = tuple(sparse(count, one) for one in packed.tensors)
    for room, one in zip(tensors, packed.tensors):
        room[-1].copy_(one[0])
    sizes = (packed.kind, packed.n, packed.k, count)
    many = PackedTiles(*sizes, tensors, packed.group, packed.has_zero)
    return many, torch.tensor([count - 1], dtype=torch.int32)
