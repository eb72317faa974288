"""Learned rounding begins with the codes it is given, stays on the grid, and moves against the gradient."""

import pytest
import torch
from rounding_problem import ROUNDERS, K, problem

from quantkit.quant.compensation import compensate
from quantkit.quant.gptq import Curvature
from quantkit.quant.learned import LearnedRounding, ways
from quantkit.quant.rounding import Mxfp4Rounder, Rounder
from quantkit.quant.weights import RoundedWeight, dequantize

GRIDS: dict[str, Rounder] = ROUNDERS | {"mxfp4": Mxfp4Rounder((0, 1))}


def compensated(name: str) -> tuple[torch.Tensor, RoundedWeight]:
    w, hessian = problem()
    found = compensate(w, Curvature.of(hessian, 0.01), GRIDS[name])
    return w, GRIDS[name].weight(found.values, found.step)


@pytest.mark.parametrize("name", GRIDS)
def test_codes_are_what_it_begins_with(name: str) -> None:
    w, weight = compensated(name)
    learned = LearnedRounding(w, weight, from_codes=True)
    assert torch.equal(learned.values(), dequantize(weight))
    assert torch.equal(learned.rounded().codes, weight.codes)
    assert not torch.equal(LearnedRounding(w, weight, from_codes=False).values(), dequantize(weight)), "GPTQ moved some codes"


@pytest.mark.parametrize("name", GRIDS)
def test_weights_move_against_the_gradient_and_stay_on_the_grid(name: str) -> None:
    w, weight = compensated(name)
    learned = LearnedRounding(w, weight, from_codes=True)
    gradient = torch.ones_like(w)
    gradient[:, ::2] = -1
    for way in ways(10, 1.2).tolist():
        learned.move(gradient, way)
    before, after = dequantize(weight), learned.values()
    assert (after[:, ::2] >= before[:, ::2]).all()
    assert (after[:, 1::2] <= before[:, 1::2]).all()
    assert (after != before).float().mean() > 0.6, "but for those at the ends of the grid"
    assert torch.equal(dequantize(learned.rounded()), after)
    assert after.shape == (len(w), K)


def test_ways_fall_to_nothing_and_are_the_reach_together() -> None:
    found = ways(8, 0.5)
    assert float(found.sum()) == pytest.approx(0.5)
    assert (found.diff() < 0).all()
    assert float(found[-1]) == pytest.approx(0.5 / 36)
