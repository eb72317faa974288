"""Rotation of inputs by block Hadamard matrices, against float64."""

import pytest
import torch
from quantkit_kernels import block_hadamard
from quantkit_kernels.hadamard import hadamard_matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 16, 128])
def test_blocks_are_multiplied_as_in_float64(block, dtype):
    x = torch.randn(3, 5, 384, generator=torch.Generator().manual_seed(1)).to(dtype)
    matrix = torch.block_diag(*[hadamard_matrix(block)] * (384 // block))
    torch.testing.assert_close(matrix @ matrix, torch.eye(384, dtype=torch.float64))
    exact = x.double() @ matrix
    torch.testing.assert_close(block_hadamard(x, block), exact.to(dtype))
    again = block_hadamard(exact, block)
    torch.testing.assert_close(again, x.double())


def test_what_is_no_block_is_refused():
    with pytest.raises(ValueError, match="does not divide 48"):
        block_hadamard(torch.zeros(2, 48), 32)
    with pytest.raises(ValueError, match="power of two"):
        block_hadamard(torch.zeros(2, 48), 24)
