"""Block Hadamard matrices: a rotation of inputs that spreads a few large values over their block,
before they are rounded (R4 of SpinQuant, arXiv 2405.16406)."""

from functools import cache

import torch
from torch import Tensor

from quantkit_kernels.arguments import FLOAT_DTYPES, require


def hadamard_matrix(size: int) -> Tensor:
    """Sylvester's matrix divided by the root of its size, which makes it orthogonal; it is its own
    inverse. size: a power of two. float64 [size, size]."""
    require(size > 0 and size & (size - 1) == 0, f"size: {size}, expected a power of two")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix / size**0.5


def block_hadamard(x: Tensor, block: int) -> Tensor:
    """x float [..., K] with every `block` consecutive values multiplied by `hadamard_matrix(block)`,
    summed in float32 (float64 in float64), in x's dtype. block divides K.

    A matrix product, for weights; what a step reads is rotated as it is made (`gate_and_rotate`).
    """
    require(
        x.dtype in (*FLOAT_DTYPES, torch.float64), f"x: dtype {x.dtype}, expected a float dtype"
    )
    require(x.shape[-1] % block == 0, f"x: {block} does not divide {x.shape[-1]} channels")
    wide = torch.promote_types(x.dtype, torch.float32)
    matrix = _matrix(block, wide, x.device)
    return (x.to(wide).unflatten(-1, (-1, block)) @ matrix).flatten(-2).to(x.dtype)


@cache
def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # used with and without
        return hadamard_matrix(size).to(device, dtype)
