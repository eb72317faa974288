"""Quantizers agree with the plain rounding of the grids, fit better where asked to, and their
values survive being stored."""

import pytest
import torch
from nearest import quantize_fp4, quantize_int

from quantkit.grids.base import dequantize, round_to_nearest
from quantkit.grids.int_groups import IntGrid, IntQuantizer
from quantkit.grids.nvfp4 import Nvfp4Quantizer, global_scale

INT4 = IntGrid(4, 128, symmetric=False)
GRIDS = [INT4, IntGrid(4, 32, symmetric=True), IntGrid(8, None, symmetric=True)]


def weight(rows=24, columns=256):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * torch.linspace(
        0.1, 4, columns
    )


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_plain_fit_is_round_to_nearest(grid):
    w = weight()
    values, scales = round_to_nearest(w, IntQuantizer(grid, torch.float16))
    expected = quantize_int(w, grid, scale_dtype=torch.float16)
    assert torch.equal(values, dequantize(expected))
    stored = IntQuantizer(grid, torch.float16).encode(values, scales)
    assert torch.equal(stored.codes, expected.codes)


def test_plain_fp4_fit_is_round_to_nearest():
    w = weight()
    quantizer = Nvfp4Quantizer(global_scale(w.abs().amax()))
    values, scales = round_to_nearest(w, quantizer)
    expected = quantize_fp4(w)
    assert torch.equal(values, dequantize(expected))
    stored = quantizer.encode(values, scales)
    assert torch.equal(stored.codes % 8, expected.codes % 8), "but for the sign of zero"
    assert torch.equal(dequantize(stored), values)
    assert torch.equal(stored.scale.float(), expected.scale.float())


@pytest.mark.parametrize(
    "quantizer",
    [
        IntQuantizer(INT4, torch.bfloat16, (1.0, 0.9, 0.8)),
        Nvfp4Quantizer(torch.tensor(0.01), (0, -1, 1, 4)),
    ],
    ids=["int4", "fp4"],
)
def test_fitted_values_are_stored_exactly(quantizer):
    values, scales = round_to_nearest(weight(), quantizer, torch.linspace(9, 1, 256))
    assert torch.equal(dequantize(quantizer.encode(values, scales)), values)


def test_fitting_lowers_the_weighted_error_of_every_row():
    w, importance = weight(), torch.linspace(9, 1, 256).square()
    plain, _ = round_to_nearest(w, IntQuantizer(INT4, torch.float16))
    fitted, _ = round_to_nearest(
        w, IntQuantizer(INT4, torch.float16, (1.0, 0.9, 0.8, 0.7)), importance
    )
    before, after = (((w - values).square() * importance).sum(-1) for values in (plain, fitted))
    assert (after <= before).all()
    assert after.sum() < 0.9 * before.sum()


def test_fp4_global_scale_per_row():
    """Rows of several tensors stacked: each under its own global scale, as if rounded apart."""
    w = weight()
    amax = torch.cat([w[:10].abs().amax().expand(10), w[10:].abs().amax().expand(14)])
    together, _ = round_to_nearest(w, Nvfp4Quantizer(global_scale(amax)))
    assert torch.equal(together[:10], dequantize(quantize_fp4(w[:10])))
    assert torch.equal(together[10:], dequantize(quantize_fp4(w[10:])))
