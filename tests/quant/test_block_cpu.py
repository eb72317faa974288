"""On a CPU a block of columns is rounded by C++: as PyTorch's own operations round it, the same by
any number of threads. Scales of groups are fitted, and weights rounded to them, with their bits."""

import pytest
import torch
from block_rounding import (
    GRIDS,
    SHAPES,
    assert_as_column_by_column,
    assert_ties_fall_to_even_and_ends_are_kept,
    random_reaction,
    random_scales,
)
from quantkit_kernels.cpu.nearest import has_nearest, nearest

from quantkit.grids import base
from quantkit.grids.base import Scales, extremes_of
from quantkit.grids.int_groups import IntGrid, IntQuantizer
from quantkit.quant import block_rounding, gptq
from quantkit.quant.block_rounding import BlockParts, ColumnScales

MORE = {"int4": IntQuantizer(IntGrid(4, 128, True), torch.bfloat16)}
EVERY = GRIDS | MORE

pytestmark = pytest.mark.skipif(not block_rounding.has_cpp(), reason="no C++ compiler here")


@pytest.mark.parametrize(
    "shape", [*SHAPES, (128, 100), (3, 128, 100), (128, 64), (7, 65), (1, 1)], ids=str
)
@pytest.mark.parametrize("grid", EVERY)
def test_block_is_rounded_as_column_by_column(grid, shape):
    assert_as_column_by_column(gptq.block_rounder(torch.device("cpu")), EVERY[grid], shape, "cpu")


@pytest.mark.parametrize("grid", EVERY)
def test_ties_fall_to_even_and_ends_are_kept(grid):
    assert_ties_fall_to_even_and_ends_are_kept(
        gptq.block_rounder(torch.device("cpu")), EVERY[grid], "cpu"
    )


def test_bits_are_those_of_any_number_of_threads():
    torch.manual_seed(2)
    quantizer, shape = EVERY["int4 with zero points"], (2, 128, 300)
    target, update = torch.randn(shape), random_reaction((2,), 128, "cpu")
    scales, groups = random_scales(quantizer, shape, "cpu"), torch.arange(128)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            values, difference = torch.empty(shape), torch.empty(shape)
            parts = BlockParts(values, target, difference)
            steps = ColumnScales(scales, groups)
            block_rounding.round_block_cpp(target, update, quantizer, steps, parts)
            found.append((values, difference))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_value_that_is_no_number_stays_one_and_no_other_row_has_it():
    target = torch.ones(2, 3)
    target[0, 1] = torch.nan
    for quantizer in EVERY.values():
        steps = ColumnScales(random_scales(quantizer, (2, 3), "cpu"), torch.arange(2))
        parts = BlockParts(torch.empty(2, 3), target, torch.empty(2, 3))
        block_rounding.round_block_cpp(target, torch.zeros(2, 2), quantizer, steps, parts)
        assert parts.values.isnan().tolist() == [[False, True, False]] * 2


def test_gptq_takes_it_and_goes_without(monkeypatch):
    assert gptq.block_rounder(torch.device("cpu")) is block_rounding.round_block_cpp
    monkeypatch.setattr(gptq, "has_cpp", lambda: False)
    assert_as_column_by_column(
        gptq.block_rounder(torch.device("cpu")), EVERY["int4"], (2, 48, 20), "cpu"
    )


@pytest.mark.parametrize("shape", [(2, 3, 70, 128), (5, 70, 16), (1, 9, 7168), (1, 9, 80)], ids=str)
@pytest.mark.parametrize("grid", EVERY)
def test_scales_and_nearest_values_have_the_bits_of_pytorchs(grid, shape, monkeypatch):
    torch.manual_seed(2)
    *lead, count, rows, size = shape
    quantizer, w = EVERY[grid], torch.randn(*lead, rows, count * size).mul_(0.5)
    groups = w.unflatten(-1, (-1, size)).transpose(-2, -3)
    one, other = (random_scales(quantizer, shape[:-1], "cpu") for _ in range(2))
    # Of scales nearly as good, only sums in the same order find the same one.
    candidates = [one, Scales(one.scale * (1 + 2e-7), one.zero_point), other]

    def found():
        yield extremes_of(groups)
        for weight in (
            None,
            torch.rand(count, 1, size, generator=torch.Generator().manual_seed(3)),
        ):
            yield quantizer.best(candidates, groups, weight).scale

    assert has_nearest(groups)
    by_cpp = [*found(), nearest(groups, *vars(one).values(), quantizer.kind, quantizer.code_range)]
    monkeypatch.setattr(base, "has_nearest", lambda groups: False)
    values = quantizer.quantize(groups, one.map(lambda t: t.unsqueeze(-1)))
    by_torch = [*found(), values.transpose(-2, -3).flatten(-2)]
    for own, expected in zip(by_cpp, by_torch, strict=True):
        assert torch.equal(own.view(torch.int32), expected.contiguous().view(torch.int32))


def test_extremes_of_a_group_that_has_nan_are_nan():
    groups = torch.ones(1, 2, 32)
    groups[0, 1, 3] = torch.nan
    assert extremes_of(groups)[0].isnan().tolist() == [[False, False], [True, True]]
