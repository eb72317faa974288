"""What a linear lost on the way to it is made up for where held-out rows agree, and a run with it
goes on and spreads like any other."""

import make_model
import pytest
import torch
from refused import refused

from quantkit.calibrate.input_sums import (
    NO_READERS,
    DriftAccumulator,
    best_fraction,
    expert_drift,
)
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.recipe import Recipe, load_recipe
from quantkit.calibrate.scales import CORRECTED_SHARE, LinearInput
from quantkit.grids.schemes import find_scheme
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quant.gptq import Curvature
from quantkit.quantization.request import read_request

K, N, T = 24, 10, 4096
METHODS = ("awq", "gptq", "drift")


def paths(seed, rows=T):
    """x and o [rows, K]: channels of o that x lost a part of, which the others tell."""
    generator = torch.Generator().manual_seed(seed)
    o = torch.randn(rows, 6, generator=generator) @ torch.randn(
        6, K, generator=torch.Generator().manual_seed(0)
    )
    o += 0.3 * torch.randn(rows, K, generator=generator)
    return o - 0.2 * o.roll(1, 1), o


def heard(x, o, scale, held_out, lost=lambda x: None, wide=NO_READERS):
    """In two batches, the input divided by scale. lost: by the residual stream, for inputs x."""
    total = DriftAccumulator(128, Ranks(), wide)
    for part in (slice(0, T // 4), slice(T // 4, T)):
        total.add_quantized("a", x[part])
        total.add_original("a", o[part], lost(x[part]))
    total.add_held_out("a", held_out[1], lost(held_out[0]))
    drift = total.finish()["a"]
    drift = drift if wide else drift.scaled(scale)
    curvature = Curvature.of(x.t() @ x / len(x), 1e-6).scaled(scale)
    return LinearInput(curvature, held_out[0] / scale, scale, x.abs().amax(), drift)


def whole(w, aimed):
    """The weight if all of its correction were taken."""
    return w + (aimed - w) / CORRECTED_SHARE


def test_the_answer_is_that_of_the_original_path():
    """Of inputs that were lost by a linear map, the share that is corrected comes back; the scale
    only folds."""
    (x, o), (other_x, other_o) = paths(1), paths(2, 128)
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    scale = torch.linspace(0.5, 2, K)
    aimed = heard(x, o, scale, (other_x, other_o)).drift_corrected(w * scale) / scale
    lost = (other_o - other_x) @ w.t()
    left = other_o @ w.t() - other_x @ whole(w, aimed).t()
    assert left.square().sum() < 1e-3 * lost.square().sum()


def test_what_the_stream_lacks_is_made_up_for():
    """Where an input tells it, and not where held-out rows say otherwise."""
    (x, o), (other_x, other_o) = paths(1), paths(2, 128)
    w, a = torch.randn(2, N, K, generator=torch.Generator().manual_seed(0))
    a *= 0.1  # a correction is at most a quarter of a weight
    scale = torch.linspace(0.5, 2, K)
    read = heard(x, o, scale, (other_x, other_o), lambda x: x @ a.t())
    aimed = read.drift_corrected(w * scale) / scale
    left = other_o @ w.t() + other_x @ (a - whole(w, aimed)).t()
    assert left.square().sum() < 1e-3 * (other_x @ a.t()).square().sum()
    read = heard(x, x, scale, (other_x, other_x), lambda x: x @ a.t() * (1 if len(x) > 128 else -1))
    torch.testing.assert_close(read.drift_corrected(w * scale), w * scale, rtol=0, atol=1e-5)


def test_held_out_rows_decide_how_much_is_taken():
    """Nothing, where they lack the contrary, or there are none; half, where they lack half."""
    x, o = paths(1)
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    other_x, other_o = paths(2, 128)
    one = torch.ones(K)
    full = heard(x, o, one, (other_x, other_o)).drift_corrected(w.clone()) - w
    for held_out in ((other_x, 2 * other_x - other_o), (other_x[:0], other_o[:0])):
        torch.testing.assert_close(
            heard(x, o, one, held_out).drift_corrected(w.clone()), w, rtol=0, atol=1e-6
        )
    half = heard(x, o, one, (other_x, (other_x + other_o) / 2)).drift_corrected(w.clone()) - w
    assert float((half - full / 2).norm() / full.norm()) < 0.02
    assert best_fraction(torch.ones(4, 2), 0.5 * torch.ones(4, 2)) == 1, "never more than all"


def test_rows_of_the_layer_count_as_in_the_hessian():
    x, o = paths(1, 64)
    w = torch.linspace(0.1, 1, 40)
    found = expert_drift(o[:40], x[:40], w, (o[40:], x[40:]), 16)
    own = sum(w[i] ** 2 * torch.outer(o[i] - x[i], x[i]) for i in range(40))
    shared = (
        sum(torch.outer(o[i] - x[i], x[i]) for i in range(40, 64)) * w.square().mean() * 16 / 24
    )
    torch.testing.assert_close(found, (own + shared) / 56)
    torch.testing.assert_close(expert_drift(o[:0], x[:0], w[:0], (o, x), 16), (o - x).t() @ x / 64)


def test_a_wide_input_is_corrected_as_any_other():
    """Its drift is summed in the outputs of its only reader."""
    (x, o), held_out, one = paths(1), paths(2, 128), torch.ones(K)
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    expected = heard(x, o, one, held_out, lambda x: x @ w.t()).drift_corrected(w.clone())
    read = heard(x, o, one, held_out, lambda x: x @ w.t(), wide={"a": w})
    assert read.drift.inputs.shape == (N, K)
    torch.testing.assert_close(read.drift_corrected(w.clone()), expected, rtol=0, atol=1e-4)
    assert (expected - w).norm() > 0.01 * w.norm()


# --- runs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    config = make_model.tiny_config(num_hidden_layers=2, **make_model.FEW_EXPERTS)
    return make_model.write_fp8(
        tmp_path_factory.mktemp("models") / "source", config, make_model.random_tensors(config)
    )


def test_it_is_planned_and_needs_gptq(source):
    scheme, recipe = find_scheme("awq-w4a16"), load_recipe("awq-w4a16-quick")
    without = plan(source, scheme, PlanOptions(recipe=recipe))
    planned = plan(
        source, scheme, PlanOptions(recipe=recipe.model_copy(update={"methods": METHODS}))
    )
    assert planned.host_peak_bytes - without.host_peak_bytes >= 128 * 512 * 256 * 4, (
        "calibration tokens are held twice"
    )
    assert 1.2 < planned.work.operations / without.work.operations < 3, "they run more often"
    with refused("drift without gptq"):
        read_request(scheme, "auto", None, Recipe(scheme="awq-w4a16", methods=("awq", "drift")))
