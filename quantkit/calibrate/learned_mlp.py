"""Gated MLPs whose codes are learned together, against what the whole MLP gives: routed experts, shared ones and dense ones.

GPTQ rounds one linear at a time, for its own output. Here gate, up and down move at once (`quantkit.quant.learned`), and the loss is the
MLP's output beside the source's on the same inputs, in what an error there costs the residual stream. Gradients are written out: an MLP is
three products, and nothing of a model has to be kept for a backward pass. Inputs that the quantized model rounds are rounded here, and the
gradient goes through.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from quantkit_kernels import Gating
from torch import Tensor

from quantkit.calibrate.solver import Solved
from quantkit.models.reading import Reading
from quantkit.quant.gptq import Curvature
from quantkit.quant.learned import LearnedRounding, ways
from quantkit.quant.weights import RoundedWeight, dequantize
from quantkit.recipe import Recipe

ROWS = 2048
"""Tokens of one step."""
JUDGED_ROWS = 1024
"""Of held-out tokens that say whether what was learned is kept."""


@dataclass(frozen=True)
class MlpRows:
    """Inputs and wanted outputs of one MLP. x [n, H]: as gate and up read it; target [n, H]: what the source's MLP gives; count [n]: what
    a squared error of the row counts."""

    x: Tensor
    target: Tensor
    count: Tensor

    def some(self, index: Tensor | slice) -> "MlpRows":
        return MlpRows(self.x[index], self.target[index], self.count[index])


@dataclass(frozen=True)
class MlpLoss:
    """What an error in an MLP's output costs. cost: M [H, H], or None where all channels count alike; between: how down reads."""

    gating: Gating
    between: Reading
    cost: Tensor | None

    def __call__(self, weights: Sequence[Tensor], rows: MlpRows) -> float:
        """The sum over rows; weights: gate and up [I, H], down [H, I]."""
        error = self.hidden(weights, rows) @ weights[2].t() - rows.target
        return float((self._pull(error, rows) * error).double().sum())

    def hidden(self, weights: Sequence[Tensor], rows: MlpRows) -> Tensor:
        """What down reads, [n, I]."""
        return self.between(self.gating(rows.x @ weights[0].t(), rows.x @ weights[1].t()))

    def gradients(self, weights: Sequence[Tensor], rows: MlpRows) -> tuple[Tensor, Tensor, Tensor]:
        """Half of those by gate, up and down, for a gating without limit and shift: f(g) u with f(g) = g sigmoid(a g)."""
        gate, up, down = weights
        g, u = rows.x @ gate.t(), rows.x @ up.t()
        share = (self.gating.alpha * g).sigmoid_()
        gated = g * share
        hidden = self.between(gated * u)
        pull = self._pull(hidden @ down.t() - rows.target, rows)
        by_hidden = pull @ down
        slope = share * (1 + self.gating.alpha * (g - gated))
        return (by_hidden * u * slope).t() @ rows.x, (by_hidden * gated).t() @ rows.x, pull.t() @ hidden

    def _pull(self, error: Tensor, rows: MlpRows) -> Tensor:
        counted = error * rows.count[:, None]
        return counted if self.cost is None else counted @ self.cost


def learn_mlp(
    sources: Sequence[Tensor], solved: Sequence[Solved], rows: MlpRows, held_out: MlpRows, loss: MlpLoss, recipe: Recipe
) -> list[Solved]:
    """Gate, up and down with codes learned from those they have. sources: what they were rounded from. Where held-out rows lose by it, or
    there are none, they stay as they are."""
    if not len(rows.x) or not len(held_out.x):
        return list(solved)
    learned = [LearnedRounding(w, one.weight, from_codes=recipe.learn_from == "codes") for w, one in zip(sources, solved)]
    generator = torch.Generator().manual_seed(0)
    for way in ways(recipe.iterations, recipe.reach).tolist():
        drawn = torch.randint(len(rows.x), (ROWS,), generator=generator).to(rows.x.device) if len(rows.x) > ROWS else slice(None)
        gradients = loss.gradients([one.values() for one in learned], rows.some(drawn))
        for one, gradient in zip(learned, gradients):
            one.move(gradient, way)
    step = max(1, len(held_out.x) // JUDGED_ROWS)
    judged = held_out.some(slice(None, None, step))
    after = [one.values() for one in learned]
    if not loss(after, judged) < loss([one.values for one in solved], judged):
        return list(solved)
    read = (judged.x, judged.x, loss.hidden(after, judged))
    return [_learned(before, w, one.rounded(), x) for before, w, one, x in zip(solved, sources, learned, read)]


def _learned(before: Solved, w: Tensor, weight: RoundedWeight, x: Tensor) -> Solved:
    """x [n, K]: held-out rows that the linear reads."""
    values, whole = dequantize(weight), (x @ w.t()).square().sum()
    error = float((x @ (w - values).t()).square().sum() / whole.clamp(min=1e-30))
    return replace(before, weight=weight, values=values, error=error, method=f"{before.method}+learned")


def cost_matrix(outputs: Curvature | None) -> Tensor | None:
    """M [H, H] of its factors, the channels as they lie in memory."""
    if outputs is None:
        return None
    square = outputs.factor @ outputs.factor.t()
    place = outputs.order.argsort()
    return square[place][:, place]
