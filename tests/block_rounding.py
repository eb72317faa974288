"""Blocks of GPTQ's columns, and how a kernel that rounds one is held against PyTorch's own operations."""

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.quant import gptq
from quantkit.quant.rounding import Fp4Rounder, IntRounder, Rounder, RoundingStep
from quantkit.schemes import IntGrid

GRIDS: dict[str, Rounder] = {
    "int4 with zero points": IntRounder(IntGrid(4, 128, False), torch.bfloat16),
    "int8": IntRounder(IntGrid(8, None, True), torch.float32),
    "fp4": Fp4Rounder(torch.tensor(0.01)),
}
SHAPES = [(128, 100), (128, 1), (3, 128, 100), (2, 48, 33)]
RoundBlock = Callable[[Tensor, Tensor, Rounder, RoundingStep, Tensor], Tensor]


def random_step(rounder: Rounder, shape: tuple[int, ...], device: str) -> RoundingStep:
    zero = None
    if isinstance(rounder, IntRounder) and not rounder.grid.symmetric:
        zero = torch.randint(-8, 8, shape, device=device).float()
    width = 0.01 if isinstance(rounder, IntRounder) and rounder.grid.bits == 8 else 0.2
    return RoundingStep((torch.rand(shape, device=device) + 0.25) * width, zero)


def random_reaction(lead: tuple[int, ...], columns: int, device: str) -> Tensor:
    triangle = torch.randn(*lead, columns, columns, device=device).triu().mul_(0.03) + torch.eye(columns, device=device)
    inverse = torch.linalg.inv(triangle)
    return -(triangle.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * inverse).mT


def assert_as_column_by_column(round_block: RoundBlock, rounder: Rounder, shape: tuple[int, ...], device: str) -> None:
    torch.manual_seed(1)
    *lead, columns, rows = shape
    target, step = torch.randn(shape, device=device), random_step(rounder, shape, device)
    reaction = random_reaction(tuple(lead), columns, device)
    expected, found = (torch.full((*lead, 3 * columns, rows), torch.nan, device=device) for _ in range(2))
    own = slice(columns, 2 * columns)
    missed = gptq._round_block(target.clone(), reaction, rounder, step, expected[..., own, :])
    told = round_block(target, reaction, rounder, step, found[..., own, :])
    outside = torch.cat((found[..., :columns, :], found[..., 2 * columns :, :]), dim=-2)
    assert outside.isnan().all(), "written outside of its block"
    # Sums in another order: a value between two levels may fall on the other, and the columns after it answer to that.
    changed = (found[..., own, :] != expected[..., own, :]).any(-2)
    assert changed.float().mean() <= 0.02
    same = ~changed.unsqueeze(-2).expand(shape)
    torch.testing.assert_close(told[same], missed[same], rtol=0, atol=1e-4)


def assert_ties_fall_to_even_and_ends_are_kept(round_block: RoundBlock, rounder: Rounder, device: str) -> None:
    w = torch.tensor([0.5, 1.5, 2.5, -0.5, 100.0, -100.0, 5.0, 0.25], device=device).expand(1, -1).contiguous()
    zero = isinstance(rounder, IntRounder) and not rounder.grid.symmetric
    step = RoundingStep(torch.ones_like(w), torch.zeros_like(w) if zero else None)
    values = torch.empty_like(w)
    round_block(w, torch.zeros(1, 1, device=device), rounder, step, values)
    assert torch.equal(values, rounder.snap(w, step))
