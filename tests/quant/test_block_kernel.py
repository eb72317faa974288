"""On a GPU a block of columns is rounded by a kernel: as PyTorch's own operations round it.

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
)

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
