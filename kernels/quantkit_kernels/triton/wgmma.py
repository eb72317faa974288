"""A launch of wgmma_kernel.py."""

import functools

import torch
from torch import Tensor

from quantkit_kernels.triton.cards import multiprocessors, overlapped
from quantkit_kernels.triton.layout import SPAN, PackedSteps
from quantkit_kernels.triton.wgmma_plans import WgmmaPlan

_BAND_TOKENS = 2048
"""Of a band of tiles: with as many rows of the weight with them, about what the programs of 132
multiprocessors compute at once."""


def early(plan: WgmmaPlan) -> bool:
    """Whether the scales of a tile are loaded before its products: on an H200 1 to 2 % faster where
    eight warps have a multiprocessor to themselves, 2 % slower where two programs share one, and
    not measured with tiles of 256 rows."""
    return plan.programs == 1 and plan.warps == 8 and plan.rows == 128


SUMS, COUNTERS = 1 << 22, 1 << 12
"""Of programs that share K no more than two are on a multiprocessor, so that their tiles are
few."""


@functools.cache
def zeros(device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 sums and counters that every launch leaves at zero, made before a graph is captured.
    Launches are on one stream at a time."""
    return torch.zeros(SUMS, dtype=torch.int32, device=device), torch.zeros(
        COUNTERS, dtype=torch.int32, device=device
    )


def multiply(steps: PackedSteps, x: Tensor, x_scale: Tensor, out: Tensor, plan: WgmmaPlan) -> None:
    """Write the product of x int8 [m, k], k a multiple of 16, and the weight into out [m, n]."""
    from triton.experimental.gluon.language._layouts import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quantkit_kernels.triton.wgmma_kernel import multiply_int8 as kernel

    (m, _), n = x.shape, out.shape[1]
    count, rows = steps.codes.shape[-3:-1]
    token_tiles, row_tiles = -(-m // plan.tokens), -(-n // plan.rows)
    tiles, split = token_tiles * row_tiles, plan.split
    sums, arrived = zeros(x.device)
    assert split == 1 or (tiles <= len(arrived) and tiles * plan.rows * plan.tokens <= len(sums)), (
        tiles,
        plan,
    )
    most = plan.programs * multiprocessors(x.device)
    swizzled = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8)
    tokens, weights = (
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [block, SPAN], swizzled)
        for tensor, block in ((x, plan.tokens), (steps.codes.flatten(0, -2), plan.rows))
    )
    kernel[(min(tiles, most) if most and split == 1 else tiles * split,)](
        tokens, weights, x_scale, steps.row_scale, out, sums, arrived, m, n, rows, count, split,
        token_tiles, row_tiles,
        BM=plan.tokens, BN=plan.rows, SHARED=split > 1, EARLY=early(plan), STAGES=plan.stages,
        LEFT=plan.left,
        BAND=max(1, _BAND_TOKENS // plan.tokens), WARPS=plan.warps, num_warps=plan.warps,
        **overlapped(x.device),
    )  # fmt: skip
