"""Descent ends where no column and no step could be better, on every grid, batched or not, and
tells the loss that is left."""

import pytest
import torch
from rounding_problem import QUANTIZERS, K, loss, problem, spread

from quantkit.grids.base import dequantize
from quantkit.quant.compensation import compensate
from quantkit.quant.gptq import Curvature, Descent, damp_


def settled(name):
    """W and its damped Hessian; compensated, and after many sweeps."""
    w, hessian = problem()
    hessian = damp_(hessian.clone(), 0.01)
    curvature = Curvature.of(hessian, 1e-12)
    return (
        w,
        hessian,
        compensate(w, curvature, QUANTIZERS[name]),
        compensate(w, curvature, QUANTIZERS[name], Descent(30, fits_scales=True)),
    )


@pytest.mark.parametrize("name", QUANTIZERS)
def test_no_column_could_be_better(name):
    w, hessian, compensated, descended = settled(name)
    torch.testing.assert_close(
        descended.loss.double(), loss(w, descended.values, hessian), rtol=1e-3, atol=1e-6
    )
    assert (descended.loss <= compensated.loss * (1 + 1e-5)).all()
    assert descended.loss.sum() < 0.99 * compensated.loss.sum()
    wanted = (
        descended.values
        + ((w - descended.values).double() @ hessian.double() / hessian.diagonal().double()).float()
    )
    again = QUANTIZERS[name].quantize(wanted, spread(descended.scales))
    assert (again != descended.values).float().mean() < 0.002, "but for ties within float32"


@pytest.mark.parametrize("name", QUANTIZERS)
def test_no_step_that_is_stored_could_be_better(name):
    """Ten times a row, one group's values are multiplied by what its next stored step would be to
    the step it has."""
    w, hessian, _, descended = settled(name)
    quantizer, groups = QUANTIZERS[name], descended.scales.scale.shape[-1]
    assert torch.equal(
        dequantize(quantizer.encode(descended.values, descended.scales)), descended.values
    ), "values lie on the stored grid"
    before = loss(w, descended.values, hessian)
    for group in range(0, groups, max(1, groups // 5)):
        columns = slice(group * (K // groups), (group + 1) * (K // groups))
        for factor in (1.07, 0.93) if name == "fp4" else (1.004, 0.996):
            size = descended.scales.scale[:, group]
            other = quantizer.nearest_scale(size * factor)
            values = descended.values.clone()
            values[:, columns] *= (other / size)[:, None]
            assert (loss(w, values, hessian) >= before * (1 - 1e-6)).float().mean() > 0.97


def test_a_batch_is_each_of_its_parts():
    w, hessian = (torch.stack(parts) for parts in zip(*(problem(seed) for seed in range(3))))
    together = compensate(w, Curvature.of(hessian, 0.01), QUANTIZERS["int4"], Descent(2))
    for i in range(3):
        alone = compensate(w[i], Curvature.of(hessian[i], 0.01), QUANTIZERS["int4"], Descent(2))
        assert (alone.values - together.values[i]).abs().gt(1e-3).float().mean() < 0.01
        torch.testing.assert_close(alone.loss, together.loss[i], rtol=0.02, atol=0)
