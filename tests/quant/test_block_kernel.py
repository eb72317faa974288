"""On a GPU a block of columns is rounded by a kernel, and a group's scale found by another: as
PyTorch's own operations do it.

Run on a GPU, or where Triton is installed by its interpreter: TRITON_INTERPRET=1.
"""

import os

import pytest
import torch
from block_rounding import (
    GRIDS,
    SHAPES,
    assert_as_column_by_column,
    assert_ties_fall_to_even_and_ends_are_kept,
    random_scales,
)

from quantkit.grids.base import Scales

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no CUDA device here"
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("grid", GRIDS)
def test_block_is_rounded_as_column_by_column(grid, shape):
    from quantkit.quant.block_kernel import round_block

    assert_as_column_by_column(round_block, GRIDS[grid], shape, DEVICE)


@pytest.mark.parametrize("grid", GRIDS)
def test_ties_fall_to_even_and_ends_are_kept(grid):
    from quantkit.quant.block_kernel import round_block

    assert_ties_fall_to_even_and_ends_are_kept(round_block, GRIDS[grid], DEVICE)


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("shape", [(24, 96, 32), (3, 10, 80, 16), (5, 2400, 2400)], ids=str)
@pytest.mark.parametrize("grid", GRIDS)
def test_best_scale_is_pytorchs(grid, shape, weighted):
    from quantkit.grids.best_scale_kernel import best_scale

    torch.manual_seed(2)
    *lead, rows, columns, size = shape
    quantizer = GRIDS[grid]
    w = torch.randn(*lead, rows, columns, device=DEVICE).mul_(0.5)
    groups = w.unflatten(-1, (-1, size)).transpose(-2, -3)
    importance = torch.rand(columns // size, 1, size, device=DEVICE) if weighted else None
    candidates = [random_scales(quantizer, groups.shape[:-1], DEVICE) for _ in range(4)]
    errors = torch.stack([quantizer._squared_error(one, groups, importance) for one in candidates])
    scales = torch.stack([one.scale for one in candidates])
    points = [one.zero_point for one in candidates if one.zero_point is not None]
    zeros = torch.stack(points) if points else None
    found = Scales(
        *best_scale(groups, scales, zeros, importance, quantizer.kind, quantizer.code_range)
    )
    # Sums in another order: of two scales nearly as good either may be found.
    own = quantizer._squared_error(found, groups, importance)
    torch.testing.assert_close(own, errors.amin(0), rtol=1e-5, atol=1e-9)
    assert (scales == found.scale).any(0).all()
