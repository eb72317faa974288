"""Codes of a gated MLP are learned by true gradients, and kept where held-out rows gain by them."""

from dataclasses import replace

import pytest
import torch
from quantkit_kernels import SILU, Gating
from torch import Tensor

from quantkit.calibrate.learned_mlp import MlpLoss, MlpRows, cost_matrix, learn_mlp
from quantkit.calibrate.solver import Solved
from quantkit.models.reading import AS_IT_IS
from quantkit.quant.gptq import Curvature
from quantkit.quant.rounding import IntRounder, round_to_nearest
from quantkit.recipe import Recipe
from quantkit.schemes import IntGrid

H, INNER = 64, 96
RECIPE = Recipe(scheme="awq-w4a16", iterations=80, learn_from="weights")


def mlp() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator) / shape[1] ** 0.5 for shape in ((INNER, H), (INNER, H), (H, INNER)))  # type: ignore[return-value]


def rows(weights: tuple[Tensor, Tensor, Tensor], count: int, seed: int) -> MlpRows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, H, generator=generator)
    gate, up, down = weights
    return MlpRows(x, SILU(x @ gate.t(), x @ up.t()) @ down.t(), torch.rand(count, generator=generator))


def nearest(weights: tuple[Tensor, Tensor, Tensor]) -> list[Solved]:
    found = []
    for w in weights:
        rounder = IntRounder(IntGrid(4, 32, symmetric=False), torch.float16)
        values, step = round_to_nearest(w, rounder)
        found.append(Solved(rounder.weight(values, step), values, 0.0, "nearest"))
    return found


@pytest.mark.parametrize("gating", [SILU, Gating(alpha=1.7)])
def test_gradients_are_those_of_autograd(gating: Gating) -> None:
    weights = tuple(w.double().requires_grad_() for w in mlp())
    cost = torch.randn(H, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cost = cost @ cost.t()
    own = rows(mlp(), 50, 3)
    own = replace(own, x=own.x.double(), target=torch.zeros_like(own.target).double(), count=own.count.double())
    gate, up, down = weights
    g, u = own.x @ gate.t(), own.x @ up.t()
    error = (g * (gating.alpha * g).sigmoid() * u) @ down.t()
    ((error @ cost * error).sum(-1) * own.count).sum().backward()
    with torch.no_grad():
        found = MlpLoss(gating, AS_IT_IS, cost).gradients(weights, own)
    for w, half in zip(weights, found):
        torch.testing.assert_close(2 * half, w.grad)


def test_the_loss_of_held_out_rows_falls() -> None:
    weights, before = mlp(), nearest(mlp())
    fitted, held_out = rows(weights, 3000, 1), rows(weights, 500, 2)
    loss = MlpLoss(SILU, AS_IT_IS, None)
    after = learn_mlp(weights, before, fitted, held_out, loss, RECIPE)
    assert [one.method for one in after] == ["nearest+learned"] * 3
    assert loss([one.values for one in after], held_out) < 0.8 * loss([one.values for one in before], held_out)
    again = learn_mlp(weights, before, fitted, held_out, loss, RECIPE)
    assert all(torch.equal(a.weight.codes, b.weight.codes) for a, b in zip(after, again))


@pytest.mark.parametrize("case", ["none held out", "held-out rows lose"])
def test_codes_stay_where_nothing_shows_a_gain(case: str) -> None:
    weights, before = mlp(), nearest(mlp())
    held_out = rows(weights, 0 if case == "none held out" else 200, 2)
    if len(held_out.x):  # those that were rounded give what is wanted
        held_out = replace(
            held_out, target=MlpLoss(SILU, AS_IT_IS, None).hidden([one.values for one in before], held_out) @ before[2].values.t()
        )
    assert learn_mlp(weights, before, rows(weights, 300, 1), held_out, MlpLoss(SILU, AS_IT_IS, None), RECIPE) == before


def test_the_cost_of_outputs_is_put_back_in_order() -> None:
    cost = torch.randn(H, H, generator=torch.Generator().manual_seed(1))
    cost = cost @ cost.t() + torch.eye(H)
    torch.testing.assert_close(cost_matrix(Curvature.of(cost, 1e-9)), cost, rtol=1e-4, atol=1e-3)
    assert cost_matrix(None) is None
