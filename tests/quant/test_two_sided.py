"""Rounding with errors weighed on both sides follows its formula, and lowers what it minimises."""

import pytest
import torch
from rounding_problem import QUANTIZERS, K, N, cost_of_outputs, problem, spread, two_sided_loss

from quantkit.grids.base import Scales
from quantkit.quant import compensation
from quantkit.quant.compensation import compensate, compensate_both, sample_output_directions
from quantkit.quant.gptq import Curvature


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
