"""GPTQ minimises what it says, on every grid, batched or not, and never does worse than plain
rounding on its own loss."""

import pytest
import torch
from rounding_problem import QUANTIZERS, K, N, loss, problem

from quantkit.grids.base import Scales, dequantize, fit_scales, round_to_nearest
from quantkit.grids.int_groups import IntGrid, IntQuantizer
from quantkit.quant.block_rounding import GroupScales
from quantkit.quant.compensation import compensate
from quantkit.quant.gptq import Curvature, damp_, gptq, reverse_, scaled_losses


def damped(hessian, damping):
    return damp_(hessian.clone(), damping)


def factor(hessian):
    """Upper triangular V [K, K] with V V^T = H."""
    return reverse_(torch.linalg.cholesky(hessian.flip(-1, -2)))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_loss_is_the_trace_and_below_plain_rounding(name):
    quantizer = QUANTIZERS[name]
    w, hessian = problem()
    result = compensate(w, Curvature.of(hessian, 0.01), quantizer)
    nearest, _ = round_to_nearest(w, quantizer)
    torch.testing.assert_close(
        result.loss.double(), loss(w, result.values, damped(hessian, 0.01)), rtol=1e-3, atol=1e-6
    )
    assert result.loss.sum() < 0.8 * loss(w, nearest, damped(hessian, 0.01)).sum()
    assert torch.equal(dequantize(quantizer.encode(result.values, result.scales)), result.values), (
        "values lie on the stored grid"
    )


def test_it_is_gptq():
    """Against the textbook: error over the diagonal of the inverse's Cholesky factor, spread over
    the columns to come."""
    w, hessian = problem()
    hessian = damped(hessian, 0.01).double()
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    quantizer = IntQuantizer(IntGrid(8, None, symmetric=True), torch.float32)
    scales = quantizer.fit(w)
    left, values = w.double().clone(), torch.empty(N, K)
    for i in range(K):
        values[:, i] = quantizer.quantize(left[:, i].float(), scales)
        left[:, i:] -= ((left[:, i] - values[:, i]) / upper[i, i])[:, None] * upper[i, i:]
    steps = GroupScales(fit_scales(w, quantizer), torch.zeros(K, dtype=torch.int64))
    curvature = Curvature(factor(hessian.float()), hessian.diagonal().float(), torch.arange(K))
    ours, _ = gptq(w.t().contiguous(), curvature, quantizer, steps)
    different = (ours.t() != values).float().mean()
    assert different < 0.002, "float32 against float64 may tip a few ties"


def test_a_batch_is_its_members():
    w, hessian = problem(batch=(3,))
    quantizer = QUANTIZERS["int4"]
    together = compensate(w, Curvature.of(hessian, 0.01), quantizer)
    for i in range(3):
        alone = compensate(w[i], Curvature.of(hessian[i], 0.01), quantizer)
        assert (together.values[i] != alone.values).float().mean() < 0.01
        torch.testing.assert_close(together.loss[i].sum(), alone.loss.sum(), rtol=1e-2, atol=0)


def test_scaled_curvature_is_the_curvature_of_scaled_inputs():
    _, hessian = problem()
    s = torch.linspace(0.5, 2, K)
    # The same channels must come first, so the order is fixed before scaling.
    ours = Curvature.of(hessian, 0.01).scaled(s)
    expected = damped(hessian, 0.01) / s / s[:, None]
    expected = expected[ours.order][:, ours.order]
    torch.testing.assert_close(ours.energy, expected.diagonal())
    torch.testing.assert_close(ours.factor @ ours.factor.t(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_losses_of_candidates_are_those_of_compensated_scaled_weights(name, batch):
    quantizer = QUANTIZERS[name]
    w, hessian = problem(batch=batch)
    scale = (
        torch.stack([torch.ones(K), torch.linspace(0.5, 2, K)])
        .view(2, *[1] * len(batch), K)
        .expand(2, *batch, K)
    )
    curvature = Curvature.of(hessian, 0.01)
    losses = scaled_losses(w, scale, curvature, quantizer)
    for s, found in zip(scale, losses):
        torch.testing.assert_close(
            found.sum(),
            compensate(w * s.unsqueeze(-2), curvature.scaled(s), quantizer).loss.sum(),
            rtol=0.01,
            atol=0,
        )


@pytest.mark.parametrize("size", [7, 1300])
def test_reversed_in_panels(size):
    square = torch.randn(2, size, size)
    expected = square.flip(-1, -2)
    assert torch.equal(reverse_(square), expected)


@pytest.mark.parametrize("name", ["int4", "int4-fitted", "fp4"])
def test_channels_go_by_energy_and_keep_the_step_of_their_group(name):
    """Whatever the order, and for every member of a batch its own: codes times the group's step are
    the values."""
    quantizer = QUANTIZERS[name]
    w, hessian = problem(batch=(2,))
    curvature = Curvature.of(hessian, 0.01)
    energy = hessian.diagonal(dim1=-2, dim2=-1).gather(-1, curvature.order)
    assert torch.equal(energy, energy.sort(dim=-1, descending=True).values)
    assert not torch.equal(curvature.order[0], curvature.order[1])
    result = compensate(w, curvature, quantizer)
    for i in range(2):
        stored = quantizer.encode(
            result.values[i],
            Scales(
                result.scales.scale[i],
                None if result.scales.zero_point is None else result.scales.zero_point[i],
            ),
        )
        assert torch.equal(dequantize(stored), result.values[i])


def test_a_channel_that_never_fires_is_rounded():
    w, hessian = problem()
    hessian[5], hessian[:, 5] = 0, 0
    result = compensate(w, Curvature.of(hessian, 0.01), QUANTIZERS["int4"])
    assert torch.isfinite(result.values).all()
    assert ((w - result.values)[:, 5].abs() < result.scales.scale[:, 0]).all()
