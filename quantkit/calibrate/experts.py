"""The routed experts of one layer, streamed a few at a time: solved, and run on the tokens that
chose them.

Gate and up of all experts read the same input, so one curvature serves them all. Each down
projection has its own Hessian, of the tokens routed to its expert weighted by the square of the
routing weight (that is what its error counts in the layer's output), blended with that of tokens of
the whole layer: a starved expert leans on what it would see if it were asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from quantkit_kernels import SILU, ExpertBiases, Gating
from torch import Tensor
from torch.nn import functional as F

from quantkit.calibrate.hidden_states import HiddenStates
from quantkit.calibrate.input_statistics import InputStatistics, best_fraction, expert_drift
from quantkit.calibrate.layer_weights import RoutedTokens
from quantkit.calibrate.linear_solver import LinearSolution, LinearSolver
from quantkit.calibrate.scales import Consumer, LinearInput, choose_scale, sample_rows
from quantkit.grids.nvfp4 import input_divisor
from quantkit.models.activation_quant import NO_ACTIVATION_QUANT, ActivationQuant
from quantkit.models.table import GatedMlp
from quantkit.quant.gptq import Curvature
from quantkit.quant.tensor_cores import tensor_core_products

LAYER_ROWS = 512
"""Rows of the layer's input that every expert is shown, for the shared part of its Hessian."""


@dataclass(frozen=True)
class ExpertWeights:
    """float32 [I, H], [I, H], [H, I]. readings: how gate and up read, and how down does; `hidden`
    and `output` are given what is read."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gating: Gating = SILU
    biases: ExpertBiases | None = None
    activation_quants: tuple[ActivationQuant, ActivationQuant] = (
        NO_ACTIVATION_QUANT,
        NO_ACTIVATION_QUANT,
    )

    def hidden(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, I], the input of down."""
        if self.scales_inside:
            return self.gated(x).mul_(x @ self.up.t())
        gate, up = x @ self.gate.t(), x @ self.up.t()
        if self.biases is not None:
            gate, up = gate.add_(self.biases.gate), up.add_(self.biases.up)
        return self.gating(gate, up)

    def gated(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, I], what up(x) is multiplied by, where a scale can move from up to down."""
        gate = x @ self.gate.t()
        return (
            F.silu(gate, inplace=True)
            if self.gating == SILU
            else self.gating(gate, torch.ones_like(gate))
        )

    def output(self, hidden: Tensor) -> Tensor:
        """[T, I] -> [T, H]."""
        out = hidden @ self.down.t()
        return out if self.biases is None else out.add_(self.biases.down)

    def __call__(self, x: Tensor) -> Tensor:
        before, between = self.activation_quants
        return self.output(between(self.hidden(before(x))))

    @property
    def scales_inside(self) -> bool:
        """Whether a scale can move from up to down, as it can with SiLU and without biases."""
        return self.gating.is_linear_in_up and self.biases is None


class ExpertSolver:
    """Solves experts of one layer. read: their input, whose scale is folded into the layer's norm;
    importance [H] and outputs: see `Sublayer`; original: what experts are asked by the calibration
    tokens on the original path, where these run through it; counts [T, 1]: what an error of each
    token counts beside its routing weight where the scales inside experts are chosen; None:
    alike."""

    def __init__(
        self,
        solver: LinearSolver,
        routed: RoutedTokens,
        read: LinearInput,
        importance: Tensor | None,
        outputs: Curvature | None,
        original: RoutedTokens | None = None,
        counts: Tensor | None = None,
    ) -> None:
        self.original, self.counts = original, counts
        self.solver, self.routed, self.read, self.importance, self.outputs = (
            solver,
            routed,
            read,
            importance,
            outputs,
        )
        self.exact = solver.grid.coarse_scales
        fitted = routed.x[: routed.fitted]
        self.activation_quant = ActivationQuant(solver.activation_bits, input_divisor(read.largest))
        self.layer_rows = self.activation_quant(_of_layer(fitted) / read.scale)

    @tensor_core_products()
    def solve(
        self, rows: Mapping[int, GatedMlp], experts: Mapping[int, ExpertWeights]
    ) -> tuple[dict[str, LinearSolution], dict[int, Tensor]]:
        """rows, experts: by number of the expert. Returns module -> solved, of three linears each,
        and expert -> what its down projection then reads [n, I], for the tokens of
        `RoutedTokens.quantized_tokens_of`.

        The scale between up and down is chosen when both readers of the layer's input are rounded:
        dividing up's rows by it changes their steps and not one code.
        """
        solved = self._solve_readers(rows, experts)
        asked = [
            self._ask(
                number,
                replace(
                    weights,
                    gate=solved[rows[number].gate.module].values,
                    up=solved[rows[number].up.module].values,
                ),
            )
            for number, weights in experts.items()
        ]
        hessian = torch.stack([one.hessian for one in asked])
        curvature, shown = self.solver.curvature(hessian), [one.shown for one in asked]
        aimed = self._aimed_downs(experts, asked, curvature)
        inner = self._inner_scales(
            [solved[rows[number].up.module] for number in experts],
            experts,
            curvature,
            hessian,
            shown,
        )
        hidden, downs, samples, largest = {}, {}, [], dict[str, Tensor]()
        for (number, weights), s in zip(experts.items(), inner):
            up = rows[number].up.module
            weight = solved[up].weight.divide_rows(s, self.solver.scale_dtype)
            solved[up] = replace(solved[up], weight=weight, values=weight.dequantize())
            one = asked.pop(0)
            of_layer, count = one.of_layer, one.fitted
            hidden[number] = (
                self._divided(one, solved[up].values, s) if weights.scales_inside else one.hidden
            )
            down = rows[number].down.module
            downs[down] = aimed[number] * s
            largest[down] = torch.cat([hidden[number][:count], of_layer / s]).abs().amax()
            samples.append(hidden[number][count:] if len(hidden[number]) > count else of_layer / s)
        solved_downs = self.solver.solve_batch(
            downs, curvature.scaled(inner), samples, self.outputs
        )
        return solved | {
            module: self.solver.with_input_divisor(one, largest[module])
            for module, one in solved_downs.items()
        }, hidden

    def _solve_readers(
        self, rows: Mapping[int, GatedMlp], experts: Mapping[int, ExpertWeights]
    ) -> dict[str, LinearSolution]:
        """gate and up of every expert, which read the layer's input."""
        stack: dict[str, Tensor] = {}
        fused: dict[str, str] = {}
        for number, weights in experts.items():
            for row, w in ((rows[number].gate, weights.gate), (rows[number].up, weights.up)):
                stack[row.module] = self.read.drift_corrected(w * self.read.scale)
                fused[row.module] = row.fused or row.module
        solved = self.solver.solve_stack(stack, fused, self.read.curvature, self.read.sample)
        return {
            module: self.solver.with_input_divisor(one, self.read.largest)
            for module, one in solved.items()
        }

    def _ask(self, expert: int, weights: ExpertWeights) -> "_Asked":
        """Run gate and up, rounded, for the expert's tokens."""
        tokens, w, fitted = self.routed.quantized_tokens_of(expert)
        x = self.activation_quant(self.routed.x[tokens].div_(self.read.scale))
        of_layer = weights.hidden(self.layer_rows)
        if weights.scales_inside:
            gated = weights.gated(x)
            hidden = gated * (x @ weights.up.t())
        else:
            gated = hidden = weights.hidden(x)
        own = hidden[:fitted], w[:fitted], of_layer
        shown = (
            self._shown(*own)
            if self.counts is None
            else self._shown(*self._counted(self.counts, tokens[:fitted], *own))
        )
        return _Asked(x, gated, hidden, of_layer, self._down_hessian(*own), shown, fitted)

    def _counted(
        self, counts: Tensor, tokens: Tensor, hidden: Tensor, w: Tensor, of_layer: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `_shown` is given, each token as it counts."""
        return hidden, w * counts[tokens, 0], of_layer * _of_layer(counts[: self.routed.fitted])

    def _aimed_downs(
        self, experts: Mapping[int, ExpertWeights], asked: "list[_Asked]", curvature: Curvature
    ) -> dict[int, Tensor]:
        """What is rounded in place of the down projections, by expert: see drift.py."""
        if self.original is None:
            return {number: weights.down for number, weights in experts.items()}
        changes, lost, gained = [], [], []
        for (number, weights), one in zip(experts.items(), asked):
            tokens, w, fitted = self.routed.quantized_tokens_of(number)
            own = weights.hidden(self.original.x[tokens[:fitted]]), one.hidden[:fitted], w[:fitted]
            layer = weights.hidden(_of_layer(self.original.x)), one.of_layer
            changes.append(
                weights.down @ expert_drift(*own, layer, self.solver.recipe.min_expert_tokens)
            )
        change = curvature.solved(torch.stack(changes))
        for (number, weights), one, own_change in zip(experts.items(), asked, change):
            tokens, w, fitted = self.routed.quantized_tokens_of(number)
            o = weights.hidden(
                self.routed.x[tokens[fitted:] - self.routed.fitted + self.routed.quantized]
            )
            lost.append((o - one.hidden[fitted:]) * w[fitted:, None] @ weights.down.t())
            gained.append(one.hidden[fitted:] * w[fitted:, None] @ own_change.t())
        share = best_fraction(torch.cat(lost), torch.cat(gained))
        return {
            number: torch.addcmul(weights.down, own, share)
            for (number, weights), own in zip(experts.items(), change)
        }

    def _divided(self, asked: "_Asked", up: Tensor, scale: Tensor) -> Tensor:
        """What the down projection reads when up's rows are divided by `scale`, in the memory of
        what it read before."""
        if self.exact:
            return asked.hidden.div_(scale)
        # Steps were rounded to what is stored: what is read back later must give the same to the
        # last bit.
        return torch.mul(asked.gated, asked.x @ up.t(), out=asked.hidden)

    def _inner_scales(
        self,
        ups: list[LinearSolution],
        experts: Mapping[int, ExpertWeights],
        curvature: Curvature,
        hessian: Tensor,
        shown: list[Tensor],
    ) -> Tensor:
        """Scales between up and down of every expert, [B, I]. curvature, hessian and shown: of what
        down reads, unscaled."""
        scaled = {"awq", "smooth"} & set(self.solver.methods) and all(
            weights.scales_inside for weights in experts.values()
        )
        if not scaled:
            return torch.ones(hessian.shape[:-1], device=hessian.device)
        count = self.solver.recipe.search_rows
        rows = torch.stack([sample_rows(weights.down, count) for weights in experts.values()])
        importance = (
            None if self.importance is None else sample_rows(self.importance[:, None], count)[:, 0]
        )
        sample = torch.stack(shown)
        consumers = [Consumer(rows, 1.0, self.solver, importance)]
        inputs = InputStatistics(hessian, sample.abs().amax(-2), sample, sample)
        scale = choose_scale(self.solver, consumers, curvature, inputs, self.exact)
        return torch.stack([self._within_reach(s, up) for s, up in zip(scale, ups)])

    def _within_reach(self, scale: Tensor, up: LinearSolution) -> Tensor:
        """The scale [I], times one power of two where that is needed, and then limited to what up's
        stored steps can take."""
        least, largest = up.weight.divisor_range(self.solver.scale_dtype)
        raised = scale * (least / scale).amax().clamp(min=1).log2().ceil().exp2()
        return torch.minimum(torch.maximum(raised, least), largest)

    def _down_hessian(self, hidden: Tensor, w: Tensor, of_layer: Tensor) -> Tensor:
        """Mean over tokens of w^2 h h^T, [I, I]: of the expert's own [n, I], blended with those of
        the layer [R, I]."""
        blend = self.solver.recipe.min_expert_tokens
        own, shared = (
            hidden * w[:, None],
            of_layer * (blend / len(of_layer) * _mean_square(w)).sqrt(),
        )
        return (own.t() @ own).addmm_(shared.t(), shared).div_(max(len(own) + blend, 1))

    def _shown(self, hidden: Tensor, w: Tensor, of_layer: Tensor) -> Tensor:
        """Rows [R, I] of what down reads, the expert's own and the layer's in the Hessian's
        proportion, each times what it counts there."""
        count = len(of_layer)
        own = min(
            len(hidden),
            round(count * len(hidden) / max(len(hidden) + self.solver.recipe.min_expert_tokens, 1)),
        )
        picked, others = _evenly(len(hidden), own, w.device), _evenly(count, count - own, w.device)
        return torch.cat(
            [hidden[picked] * w[picked, None], of_layer[others] * _mean_square(w).sqrt()]
        )


def _of_layer(x: Tensor) -> Tensor:
    """LAYER_ROWS rows of the layer's input [T, H], evenly spaced."""
    return x[:: max(1, len(x) // LAYER_ROWS)][:LAYER_ROWS]


def _mean_square(w: Tensor) -> Tensor:
    """What a row of the layer counts among an expert's own, whose routing weights are w [n]."""
    return w.square().mean() if len(w) else torch.ones((), device=w.device)


def _evenly(length: int, count: int, device: torch.device) -> Tensor:
    """`count` numbers below `length`, evenly spaced."""
    return torch.arange(count, device=device) * length // max(count, 1)


@dataclass(frozen=True)
class _Asked:
    """One expert on its n tokens, of which the first `fitted` are calibration, and on R rows of the
    layer.

    x [n, H]: its input, scaled. gated [n, I]: f(gate(x)), where a scale can move inside; hidden [n,
    I]: what down reads. of_layer [R, I]: that of the rows. hessian [I, I]: of what down reads.
    shown [R, I]: rows that stand for it.
    """

    x: Tensor
    gated: Tensor
    hidden: Tensor
    of_layer: Tensor
    hessian: Tensor
    shown: Tensor
    fitted: int


@tensor_core_products()
def quantized_outputs(
    routed: RoutedTokens, expert: int, rounded: ExpertWeights, scale: Tensor, hidden: Tensor | None
) -> Tensor:
    """One rounded expert's outputs [n, H], unweighted, for the tokens of `RoutedTokens.quantized_tokens_of`.

    hidden: what `ExpertSolver.solve` returned, for an expert that was solved in this run.
    """
    before, between = rounded.activation_quants
    if hidden is None:
        tokens, _, _ = routed.quantized_tokens_of(expert)
        hidden = rounded.hidden(before(routed.x[tokens].div_(scale)))
    return rounded.output(between(hidden))


def add_weighted(states: HiddenStates, tokens: Tensor, outputs: Tensor, w: Tensor) -> None:
    """Add an expert's outputs [n, H], which are used up, times w [n] to the hidden states of tokens
    [n], in their first H channels."""
    states.hidden[:, : outputs.shape[1]].index_add_(0, tokens, outputs.mul_(w[:, None]))
