"""The method is kept unless held-out inputs clearly speak against it; errors where the next norm
does not look cost nothing."""

import pytest
import torch

from quantkit.calibrate.hidden_states import mean_row_distance
from quantkit.calibrate.input_statistics import HELD_OUT_ROWS, OutputInputs, PartialRun
from quantkit.calibrate.input_sums import (
    LARGEST_SHARE,
    InputStatistics,
    Observer,
    row_weights,
)
from quantkit.calibrate.linear_solver import LinearSolver
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.scales import Consumer, choose_scale
from quantkit.grids.int_groups import IntGrid
from quantkit.quant.gptq import Curvature

K, N = 128, 48


def inputs(seed, rows):
    """Correlated channels of very different size; another seed correlates others."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(K, K, generator=generator) * torch.logspace(0, -2, K)[:, None]
    return torch.randn(rows, K, generator=generator) @ mix * torch.linspace(0.2, 3, K)


def solver(*methods):
    grid, recipe = IntGrid(4, K, symmetric=False), Recipe(scheme="awq-w4a16")
    return LinearSolver(grid, torch.float16, recipe, methods, activation_bits=16)


def coded_solver(*methods):
    """Activations have 8 bits, too."""
    grid, recipe = IntGrid(8, None, symmetric=True), Recipe(scheme="int8-a8w8c16")
    return LinearSolver(grid, torch.float32, recipe, methods, activation_bits=8)


def chosen(own, x, weight, sample, samples, importance=None):
    """The scale of x before weight; of `sample` rows, and of all that are judged."""
    consumers = [Consumer(weight, 1.0, own, *[] if importance is None else [importance])]
    hessian = x.t() @ x / len(x)
    statistics = InputStatistics(hessian, x.abs().amax(0), x[:sample], samples)
    return choose_scale(own, consumers, own.curvature(hessian), statistics, exact=False)


@pytest.mark.parametrize(
    ("judged_on", "rows", "method"),
    [(1, 64, "gptq"), (2, 64, "nearest"), (2, 1, "gptq"), (2, 0, "gptq")],
)
def test_plain_rounding_is_kept_where_the_method_clearly_loses(judged_on, rows, method):
    """Compensation for inputs of one kind costs dearly on another; one row, or none, is not enough
    to say so."""
    own = solver("gptq")
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    x = inputs(1, 1024)
    curvature = own.curvature(x.t() @ x / len(x))
    solved = own.solve_stack({"a": w}, {}, curvature, inputs(judged_on, 1088)[1024 : 1024 + rows])[
        "a"
    ]
    assert solved.method == method
    assert (solved.error == solved.error) == bool(rows), "no rows, no error"


def test_rows_without_importance_do_not_choose_the_scale():
    own = solver("awq")
    x = inputs(1, 1024)
    curvature = own.curvature(x.t() @ x / len(x))
    rows = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    ignored = 50 * rows[:4] * torch.linspace(3, 0.01, K)
    importance = torch.cat([torch.ones(N), torch.zeros(4)])

    def loss(scale):
        """Of the rows that count."""
        largest = (rows * scale).abs().amax().expand(1, N)
        return float(own.losses(rows, scale[None], largest, curvature).sum())

    every = torch.cat([rows, ignored])
    heeding, alike = (chosen(own, x, every, 64, x, counts) for counts in (importance, None))
    assert loss(heeding) < loss(alike)


def test_both_families_of_scales_are_tried_where_both_are_asked_for():
    """The best of awq's and smooth's candidates together, with activations of 8 bits."""
    x = inputs(1, 1024)
    x[:, 5] *= (
        torch.arange(1024) % 97 == 0
    ) * 30.0  # large now and then: largest magnitudes and mean sizes differ
    rows = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    smooth, awq, both = (
        chosen(coded_solver(*methods, "gptq"), x, rows, 256, x)
        for methods in (("smooth",), ("awq",), ("smooth", "awq"))
    )
    assert not torch.equal(smooth, awq)
    assert torch.equal(both, smooth) or torch.equal(both, awq)


def test_scales_of_rounded_activations_are_judged_by_the_rows_as_they_count():
    """Rows of one channel's outliers make the scale where they count, and another one where they
    count next to nothing."""
    x, rows = torch.randn(2048, K), torch.randn(N, K)
    outliers = x[::64].clone()
    outliers[:, 5] = 400.0
    heeded, ignored = (
        chosen(coded_solver("smooth", "awq"), x, rows, 128, torch.cat([x, outliers * counts]))
        for counts in (1.0, 1e-3)
    )
    assert heeded[5] / heeded.median() > 4
    assert ignored[5] / ignored.median() < 1.5


@pytest.mark.parametrize("leaves", [False, True])
def test_a_massive_activation_does_not_own_the_fit(leaves):
    """One token of 512 has an input 500 times as large, and, unless it leaves there, a stream to
    match: the error of the others stays as without it. Counted like them it would be larger."""
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    x = inputs(1, 1536)
    x[::512] = 500 * inputs(3, 1)
    after = torch.randn(1536, 32, generator=torch.Generator().manual_seed(4))
    after[::512] *= 1 if leaves else 160
    own, others = solver("gptq"), torch.arange(1536) % 512 > 0

    def error(hessian):
        values = own.solve_stack({"a": w}, {}, own.curvature(hessian), x[:0])["a"].values
        return float(((w - values) @ x[others].t()).square().sum())

    observer = Observer(HELD_OUT_ROWS, Ranks())
    outputs = OutputInputs(observer)
    outputs.add("a", x)
    outputs.finish_batch(after)
    without = error(x[others].t() @ x[others] / 1533)
    assert error(x.t() @ x / 1536) > 1.3 * without
    assert error(observer.finish()["a"].mean_hessian) < 1.2 * without
    energy = (x * row_weights(x, after)).square().sum(-1)
    assert energy.max() <= 1.01 * LARGEST_SHARE * energy.median()
    assert mean_row_distance(1.1 * x, x) == pytest.approx(0.01, rel=1e-3)


def test_a_run_ends_after_the_last_input_that_is_wanted():
    """Of all tokens of a batch, which may come sequence by sequence."""
    seen, run = [], PartialRun()
    hook = run.hook(lambda module, x: seen.append(module))

    def sublayer():
        for _ in range(2):
            for module in "abc":
                hook(module, torch.ones(4, K))

    run(sublayer, "ab", 8)
    assert "".join(seen) == "abcab"
    run(sublayer, (), 8)
    assert "".join(seen) == "abcab" + 2 * "abc"


@pytest.mark.parametrize("outputs", [False, True])
def test_descent_lowers_the_error_of_held_out_inputs(outputs):
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    x, held_out = inputs(1, 2048).split(1024)
    cost = torch.randn(N, N, generator=torch.Generator().manual_seed(2)) + 3 * torch.eye(N)
    found = []
    for methods in (("gptq",), ("gptq", "descent")):
        own = solver(*methods)
        judged = Curvature.of(cost @ cost.t(), 0.05) if outputs else None
        solved = own.solve_stack(
            {"a": w},
            {},
            own.curvature(x.t() @ x / len(x)),
            held_out,
            {} if judged is None else {"a": judged},
        )["a"]
        assert solved.method == "+".join(methods)
        error = (w - solved.values) @ held_out.t()
        found.append(float((error * (cost @ cost.t() @ error if outputs else error)).sum()))
    assert found[1] < 0.98 * found[0]
