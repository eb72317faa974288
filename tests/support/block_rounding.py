"""Blocks of GPTQ's columns, and how a kernel that rounds one is held against PyTorch's own
operations."""

import torch

from quantkit.grids.base import Scales
from quantkit.grids.fp8_block import Fp8Quantizer
from quantkit.grids.int_groups import IntGrid, IntQuantizer
from quantkit.grids.mxfp4 import Mxfp4Quantizer
from quantkit.grids.nvfp4 import Nvfp4Quantizer
from quantkit.quant import block_rounding
from quantkit.quant.block_rounding import BlockParts, ColumnScales

GRIDS = {
    "int4 with zero points": IntQuantizer(IntGrid(4, 128, False), torch.bfloat16),
    "int8": IntQuantizer(IntGrid(8, None, True), torch.float32),
    "fp4": Nvfp4Quantizer(torch.tensor(0.01)),
    "mxfp4": Mxfp4Quantizer(),
    "fp8": Fp8Quantizer(1, None),
}
SHAPES = [(128, 20), (128, 1), (3, 40, 9), (2, 48, 20), (2, 2100)]


def random_scales(quantizer, shape, device):
    zero = None
    if isinstance(quantizer, IntQuantizer) and not quantizer.grid.symmetric:
        zero = torch.randint(-8, 8, shape, device=device).float()
    width = 0.01 if isinstance(quantizer, IntQuantizer) and quantizer.grid.bits == 8 else 0.2
    return Scales((torch.rand(shape, device=device) + 0.25) * width, zero)


def random_reaction(lead, columns, device):
    triangle = torch.randn(*lead, columns, columns, device=device).triu().mul_(0.03) + torch.eye(
        columns, device=device
    )
    inverse = torch.linalg.inv(triangle)
    return -(triangle.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * inverse).mT


def assert_as_column_by_column(round_block, quantizer, shape, device):
    """Steps of groups that come in any order; a batch of them, or one for all."""
    torch.manual_seed(1)
    *lead, columns, rows = shape
    groups = torch.randint(5, (*lead, columns), device=device)
    steps = ColumnScales(random_scales(quantizer, (*lead, 5, rows), device), groups)
    target, update = (
        torch.randn(shape, device=device),
        random_reaction(tuple(lead), columns, device),
    )
    pivot = torch.rand(*lead, columns, 1, device=device) + 0.5
    expected, found, difference, factored_error = (
        torch.full((*lead, 3 * columns, rows), torch.nan, device=device) for _ in range(4)
    )
    before = torch.randn((*lead, 3 * columns, rows), device=device)
    own = slice(columns, 2 * columns)
    errors = block_rounding.round_block_torch(
        target.clone(), update, quantizer, steps.spread, expected[..., own, :]
    )
    parts = BlockParts(
        found[..., own, :],
        before[..., own, :],
        difference[..., own, :],
        factored_error[..., own, :],
        pivot,
    )
    round_block(target.clone(), update, quantizer, steps, parts)
    for written in (found, difference, factored_error):
        outside = torch.cat((written[..., :columns, :], written[..., 2 * columns :, :]), dim=-2)
        assert outside.isnan().all(), "written outside of its block"
    # Sums in another order: a value between two levels may fall on the other, and the columns after
    # it answer to that.
    changed = (found[..., own, :] != expected[..., own, :]).any(-2)
    assert changed.float().mean() <= 0.02
    same = ~changed.unsqueeze(-2).expand(shape)
    torch.testing.assert_close(
        factored_error[..., own, :][same], (errors * pivot)[same], rtol=0, atol=1.5e-4
    )
    torch.testing.assert_close(
        difference[..., own, :], (before - found)[..., own, :], rtol=0, atol=1e-6
    )
    # As descent asks: in place of what was there, whose change is told.
    again, change = before.clone(), torch.empty_like(target)
    round_block(
        target.clone(),
        update,
        quantizer,
        steps,
        BlockParts(again[..., own, :], again[..., own, :], change),
    )
    assert torch.equal(again[..., own, :], found[..., own, :])
    assert torch.equal(change, difference[..., own, :])
    assert torch.equal(again[..., :columns, :], before[..., :columns, :])
    assert torch.equal(again[..., 2 * columns :, :], before[..., 2 * columns :, :])


def assert_ties_fall_to_even_and_ends_are_kept(round_block, quantizer, device):
    w = (
        torch.tensor([0.5, 1.5, 2.5, -0.5, 100.0, -100.0, 5.0, 0.25], device=device)
        .expand(1, -1)
        .contiguous()
    )
    zero = isinstance(quantizer, IntQuantizer) and not quantizer.grid.symmetric
    scales = Scales(torch.ones_like(w), torch.zeros_like(w) if zero else None)
    values, difference = torch.empty_like(w), torch.empty_like(w)
    steps = ColumnScales(scales, torch.zeros(1, dtype=torch.int64, device=device))
    round_block(
        w.clone(),
        torch.zeros(1, 1, device=device),
        quantizer,
        steps,
        BlockParts(values, w, difference),
    )
    assert torch.equal(values, quantizer.quantize(w, scales))
    assert torch.equal(difference, w - values)
