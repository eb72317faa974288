"""GPTQ, two-sided rounding and descent minimise what they say, on every grid, batched or not: by their
formulas, never worse than plain rounding, and until no column and no step could be better."""

import pytest
import torch
from rounding_problem import (
    QUANTIZERS,
    K,
    N,
    cost_of_outputs,
    loss,
    problem,
    spread,
    two_sided_loss,
)

from quantkit.grids.base import Scales, dequantize, fit_scales, round_to_nearest
from quantkit.grids.int_groups import IntGrid, IntQuantizer
from quantkit.quant import compensation
from quantkit.quant.block_rounding import GroupScales
from quantkit.quant.compensation import compensate, compensate_both, sample_output_directions
from quantkit.quant.gptq import Curvature, Descent, damp_, gptq, reverse_, scaled_losses


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


def test_a_factor_takes_the_memory_of_its_hessian():
    """And is the same to the bit, though sums of x x^T are symmetric but for their last bits."""
    hessian = torch.randn(1300, 1300, generator=torch.Generator().manual_seed(0))
    hessian = hessian @ hessian.t() / 1300
    hessian += hessian.triu(1) * 1e-7 + torch.eye(1300)
    expected, place = Curvature.of(hessian, 0.01), hessian.data_ptr()
    found = Curvature.of_(hessian, 0.01)
    assert found.factor.data_ptr() == place
    for one, other in (
        (found.factor, expected.factor),
        (found.energy, expected.energy),
        (found.order, expected.order),
    ):
        assert torch.equal(one, other)


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


@pytest.mark.parametrize("name", QUANTIZERS)
def test_losses_of_candidates_are_those_of_compensated_scaled_weights(name):
    """Of a batch, each member's are those that it has alone."""
    quantizer = QUANTIZERS[name]
    w, hessian = problem(batch=(2,))
    scale = torch.stack([torch.ones(2, K), torch.linspace(0.5, 2, K).expand(2, K)])
    losses = scaled_losses(w, scale, Curvature.of(hessian, 0.01), quantizer)
    for s, found in zip(scale, losses):
        for i, one in enumerate(s):
            scaled = Curvature.of(hessian[i], 0.01).scaled(one)
            alone = compensate(w[i] * one, scaled, quantizer).loss.sum()
            torch.testing.assert_close(found[i].sum(), alone, rtol=0.01, atol=0)


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


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_two_sided_loss_falls(name):
    w, hessian = problem()
    cost = cost_of_outputs()
    inputs, outputs = Curvature.of(hessian, 0.01), Curvature.of(cost, 0.01)
    values, scales = compensate_both(w, inputs, outputs, QUANTIZERS[name])
    plain = compensate(w, inputs, QUANTIZERS[name])
    assert torch.equal(scales.scale, plain.scales.scale)
    assert two_sided_loss(w, values, hessian, cost) < 0.6 * two_sided_loss(
        w, plain.values, hessian, cost
    )
    torch.testing.assert_close(
        QUANTIZERS[name].quantize(values, spread(scales)), values
    )  # they are on the grid


def test_rows_one_by_one_follow_the_formula(monkeypatch):
    """Row i, in the order of the outputs, is W_i + inv(M_LL) M_LP E_P rounded, L the rows from i on
    and P those before."""
    monkeypatch.setattr(compensation, "ROW_BLOCKS", N)
    w, hessian = problem(2)
    quantizer = QUANTIZERS["int4"]
    inputs, outputs = Curvature.of(hessian, 0.01), Curvature.of(cost_of_outputs(2), 0.01)
    cost = torch.empty(N, N).double()
    upper = outputs.factor.double()
    cost[outputs.order[:, None], outputs.order] = upper @ upper.t()
    values, scales = compensate_both(w, inputs, outputs, quantizer)
    for place in (1, N // 2, N - 1):
        before, later = outputs.order[:place], outputs.order[place:]
        error = (w[before] - values[before]).double()
        best = (
            w[later].double()
            + torch.linalg.solve(cost[later][:, later], cost[later][:, before]) @ error
        )
        row = outputs.order[place]
        own = Scales(
            scales.scale[row], None if scales.zero_point is None else scales.zero_point[row]
        )
        assert torch.equal(round_row(best[0].float(), inputs, own), values[row])


def round_row(target, inputs, scales):
    """GPTQ of one row [K], column by column, in float64."""
    upper, values = inputs.factor.double(), torch.empty(K)
    errors = torch.zeros(K, dtype=torch.float64)
    for place, channel in enumerate(inputs.order.tolist()):
        best = (
            target[channel].double() + errors[:place] @ upper[:place, place] / upper[place, place]
        )
        group = channel // 128
        own = Scales(
            scales.scale[group], None if scales.zero_point is None else scales.zero_point[group]
        )
        values[channel] = QUANTIZERS["int4"].quantize(best.float(), own)
        errors[place] = target[channel].double() - values[channel].double()
    return values


def test_a_batch_is_its_members():
    w, hessian = problem(4, (3,))
    outputs = Curvature.of(cost_of_outputs(4), 0.01)
    values, _ = compensate_both(w, Curvature.of(hessian, 0.01), outputs, QUANTIZERS["int4"])
    for i in range(3):
        alone, _ = compensate_both(
            w[i], Curvature.of(hessian[i], 0.01), outputs, QUANTIZERS["int4"]
        )
        assert (
            values[i] == alone
        ).float().mean() > 0.99  # sums in another order may round a tie the other way


def test_judged_outputs_are_the_cost():
    cost = cost_of_outputs(5)
    outputs = Curvature.of(cost, 1e-6)
    judge = sample_output_directions(outputs, N)
    torch.testing.assert_close(judge @ judge.t(), cost, rtol=1e-3, atol=1e-3)
    assert sample_output_directions(outputs, N // 4).shape == (N, N // 4)


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
