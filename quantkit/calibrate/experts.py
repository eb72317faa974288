"""The routed experts of one layer, streamed a few at a time: quantized, and run on the tokens
routed to them.

Gate and up of all experts read the same input, so one curvature serves them all. Each down
projection has its own Hessian, of the tokens routed to its expert weighted by the squared routing
weight (the weight of its error in the layer's output), blended with that of tokens of the whole
layer: an expert with few tokens relies on what it would compute for other tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from quantkit_kernels import SILU, ExpertBiases, Gating
from torch import Tensor
from torch.nn import functional as F

from quantkit.calibrate.hidden_states import HiddenStates, RoutedTokens
from quantkit.calibrate.input_sums import InputStatistics, best_fraction, expert_drift
from quantkit.calibrate.linear_solver import LinearSolution, LinearSolver
from quantkit.calibrate.scales import Consumer, LinearInput, choose_scale, sample_rows
from quantkit.grids.nvfp4 import input_divisor
from quantkit.models.activation_quant import NO_ACTIVATION_QUANT, ActivationQuant
from quantkit.models.table import GatedMlp
from quantkit.quant.gptq import Curvature
from quantkit.quant.tensor_cores import (
    gram,
    leading_sample_linear,
    sample_linear,
    sample_products,
    tensor_core_products,
)

LAYER_ROWS = 512
"""Rows of the layer's input used with every expert, for the shared part of its Hessian."""


@dataclass(frozen=True)
class ExpertWeights:
    """float32 [I, H], [I, H], [H, I]. activation_quants: of the input of gate and up, and of down;
    `hidden` and `output` expect inputs to which they were applied. count: so many first rows of an
    input are calibration tokens (`leading_sample_linear`)."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gating: Gating = SILU
    biases: ExpertBiases | None = None
    activation_quants: tuple[ActivationQuant, ActivationQuant] = (
        NO_ACTIVATION_QUANT,
        NO_ACTIVATION_QUANT,
    )

    def hidden(self, x: Tensor, count: int = 0) -> Tensor:
        """[T, H] -> [T, I], the input of down."""
        up = leading_sample_linear(x, self.up, count)
        if self.scales_inside:
            return self.gated(x, count).mul_(up)
        gate = leading_sample_linear(x, self.gate, count)
        if self.biases is not None:
            gate, up = gate.add_(self.biases.gate), up.add_(self.biases.up)
        return self.gating(gate, up)

    def gated(self, x: Tensor, count: int = 0) -> Tensor:
        """[T, H] -> [T, I], the factor of up(x), if a scale can move from up to down."""
        gate = leading_sample_linear(x, self.gate, count)
        return (
            F.silu(gate, inplace=True)
            if self.gating == SILU
            else self.gating(gate, torch.ones_like(gate))
        )

    def output(self, hidden: Tensor, count: int = 0) -> Tensor:
        """[T, I] -> [T, H]."""
        out = leading_sample_linear(hidden, self.down, count)
        return out if self.biases is None else out.add_(self.biases.down)

    def __call__(self, x: Tensor, count: int = 0) -> Tensor:
        before, between = self.activation_quants
        return self.output(between(self.hidden(before(x), count)), count)

    @property
    def scales_inside(self) -> bool:
        """Whether a scale can move from up to down, as it can with SiLU and without biases."""
        return self.gating.is_linear_in_up and self.biases is None


@dataclass(eq=False)
class ExpertSolver:
    """Quantizes experts of one layer. read: their input, whose scale is folded into the layer's
    norm; importance [H] and outputs: see `Sublayer`; original: routing of the calibration tokens on
    the original path, if they run through it; counts [T, 1]: weight of an error of each token in
    addition to its routing weight, for the scales inside experts; None: uniform."""

    solver: LinearSolver
    routed: RoutedTokens
    read: LinearInput
    importance: Tensor | None
    outputs: Curvature | None
    original: RoutedTokens | None = None
    counts: Tensor | None = None

    def __post_init__(self) -> None:
        self.exact, divisor = self.solver.grid.coarse_scales, input_divisor(self.read.largest)
        self.activation_quant = replace(self.solver.activation_quant(), divisor=divisor)
        fitted = self.routed.x[: self.routed.fitted]
        self.layer_rows = self.activation_quant(_of_layer(fitted) / self.read.scale)

    @tensor_core_products()
    def solve(
        self, rows: Mapping[int, GatedMlp], experts: Mapping[int, ExpertWeights]
    ) -> tuple[dict[str, LinearSolution], dict[int, Tensor]]:
        """rows, experts: by number of the expert. Returns module -> solution, of three linears
        each, and expert -> input of its down projection [n, I], for the tokens of
        `RoutedTokens.quantized_tokens_of`.

        The scale between up and down is chosen after both readers of the layer's input are
        quantized: dividing up's rows by it changes their scales, but none of their codes.
        """
        solved = self._solve_readers(rows, experts)
        runs = [
            self._run_expert(
                number,
                replace(
                    weights,
                    gate=solved[rows[number].gate.module].values,
                    up=solved[rows[number].up.module].values,
                ),
            )
            for number, weights in experts.items()
        ]
        hessian = torch.stack([one.hessian for one in runs])
        curvature, samples_of_down = (
            self.solver.curvature(hessian),
            [one.samples_of_down for one in runs],
        )
        downs_to_solve = self._drift_corrected_downs(experts, runs, curvature)
        inner = self._inner_scales(
            [solved[rows[number].up.module] for number in experts],
            experts,
            curvature,
            hessian,
            samples_of_down,
        )
        hidden, downs, samples, largest = {}, {}, [], dict[str, Tensor]()
        for (number, weights), s in zip(experts.items(), inner):
            up = rows[number].up.module
            weight = solved[up].weight.divide_rows(s, self.solver.scale_dtype)
            solved[up] = replace(solved[up], weight=weight, values=weight.dequantize())
            one = runs.pop(0)
            of_layer, count = one.of_layer, one.fitted
            hidden[number] = (
                self._rescaled(one, solved[up].values, s) if weights.scales_inside else one.hidden
            )
            down = rows[number].down.module
            downs[down] = downs_to_solve[number] * s
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

    def _run_expert(self, expert: int, weights: ExpertWeights) -> "_ExpertRun":
        """Run gate and up, quantized, for the expert's tokens."""
        tokens, w, fitted = self.routed.quantized_tokens_of(expert)
        x = self.activation_quant(self.routed.x[tokens].div_(self.read.scale))
        of_layer = weights.hidden(self.layer_rows, len(self.layer_rows))
        if weights.scales_inside:
            gated = weights.gated(x, fitted)
            again = not self.exact and self.original is None  # `_rescaled` has the held-out rows
            seen = slice(0, fitted if again else len(x))
            hidden = gated[seen] * leading_sample_linear(x[seen], weights.up, fitted)
        else:
            gated = hidden = weights.hidden(x, fitted)
        own = hidden[:fitted], w[:fitted], of_layer
        samples_of_down = (
            self._sample(*own)
            if self.counts is None
            else self._sample(*self._with_token_weights(self.counts, tokens[:fitted], *own))
        )
        return _ExpertRun(
            x, gated, hidden, of_layer, self._down_hessian(*own), samples_of_down, fitted
        )

    def _with_token_weights(
        self, counts: Tensor, tokens: Tensor, hidden: Tensor, w: Tensor, of_layer: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of `_sample`, with token weights."""
        return hidden, w * counts[tokens, 0], of_layer * _of_layer(counts[: self.routed.fitted])

    @sample_products()
    def _drift_corrected_downs(
        self, experts: Mapping[int, ExpertWeights], runs: "list[_ExpertRun]", curvature: Curvature
    ) -> dict[int, Tensor]:
        """The down projections corrected for drift, by expert."""
        if self.original is None:
            return {number: weights.down for number, weights in experts.items()}
        drifts, lost, gained = [], [], []
        for (number, weights), one in zip(experts.items(), runs):
            tokens, w, fitted = self.routed.quantized_tokens_of(number)
            own = (
                weights.hidden(self.original.x[tokens[:fitted]], fitted),
                one.hidden[:fitted],
                w[:fitted],
            )
            of_layer = _of_layer(self.original.x)
            layer = weights.hidden(of_layer, len(of_layer)), one.of_layer
            drifts.append(expert_drift(*own, layer, self.solver.recipe.min_expert_tokens))
        correction = curvature.solved(torch.stack(drifts))
        change = [
            sample_linear(weights.down, own.t())
            for weights, own in zip(experts.values(), correction)
        ]
        for (number, weights), one, own_change in zip(experts.items(), runs, change):
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

    def _rescaled(self, runs: "_ExpertRun", up: Tensor, scale: Tensor) -> Tensor:
        """Input of the down projection after up's rows are divided by `scale`."""
        if self.exact:
            return runs.hidden.div_(scale)
        # Scales were rounded to what is stored: the weights read back later must give the same
        # bits.
        return leading_sample_linear(runs.x, up, runs.fitted).mul_(runs.gated)

    def _inner_scales(
        self,
        ups: list[LinearSolution],
        experts: Mapping[int, ExpertWeights],
        curvature: Curvature,
        hessian: Tensor,
        samples_of_down: list[Tensor],
    ) -> Tensor:
        """Scales between up and down of every expert, [B, I]. curvature, hessian and
        samples_of_down: of down's unscaled input."""
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
        sample = torch.stack(samples_of_down)
        consumers = [Consumer(rows, 1.0, self.solver, importance)]
        inputs = InputStatistics(hessian, sample.abs().amax(-2), sample, sample)
        scale = choose_scale(self.solver, consumers, curvature, inputs, self.exact)
        return torch.stack([self._clamped(s, up) for s, up in zip(scale, ups)])

    def _clamped(self, scale: Tensor, up: LinearSolution) -> Tensor:
        """The scale [I], multiplied by one power of two if needed, then clamped to what up's stored
        scales allow."""
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
        return gram(torch.cat([own, shared])).div_(max(len(own) + blend, 1))

    def _sample(self, hidden: Tensor, w: Tensor, of_layer: Tensor) -> Tensor:
        """Rows [R, I] of down's input, the expert's own and the layer's in the Hessian's
        proportion, each multiplied by its weight there."""
        count = len(of_layer)
        own = min(
            len(hidden),
            round(count * len(hidden) / max(len(hidden) + self.solver.recipe.min_expert_tokens, 1)),
        )
        picked, others = (
            _evenly_spaced(len(hidden), own, w.device),
            _evenly_spaced(count, count - own, w.device),
        )
        return torch.cat(
            [hidden[picked] * w[picked, None], of_layer[others] * _mean_square(w).sqrt()]
        )


def _of_layer(x: Tensor) -> Tensor:
    """LAYER_ROWS rows of the layer's input [T, H], evenly spaced."""
    return x[:: max(1, len(x) // LAYER_ROWS)][:LAYER_ROWS]


def _mean_square(w: Tensor) -> Tensor:
    """Weight of a row of the layer among an expert's own, whose routing weights are w [n]."""
    return w.square().mean() if len(w) else torch.ones((), device=w.device)


def _evenly_spaced(length: int, count: int, device: torch.device) -> Tensor:
    """`count` evenly spaced numbers below `length`."""
    return torch.arange(count, device=device) * length // max(count, 1)


@dataclass(frozen=True)
class _ExpertRun:
    """One expert's activations on its n tokens, the first `fitted` of which are calibration, and on
    R rows of the layer.

    x [n, H]: its input, scaled. gated [n, I]: f(gate(x)), if a scale can move inside; hidden [n,
    I]: input of down, of calibration tokens alone where no more is read. of_layer [R, I]: the same
    for the layer's rows. hessian [I, I]: of down's input. samples_of_down [R, I]: rows of it.
    """

    x: Tensor
    gated: Tensor
    hidden: Tensor
    of_layer: Tensor
    hessian: Tensor
    samples_of_down: Tensor
    fitted: int


@tensor_core_products()
def quantized_outputs(
    routed: RoutedTokens, expert: int, rounded: ExpertWeights, scale: Tensor, hidden: Tensor | None
) -> Tensor:
    """One quantized expert's outputs [n, H], unweighted, for the tokens of
    `RoutedTokens.quantized_tokens_of`.

    hidden: as returned by `ExpertSolver.solve`, for an expert solved in this run.
    """
    before, between = rounded.activation_quants
    tokens, _, fitted = routed.quantized_tokens_of(expert)
    if hidden is None:
        hidden = rounded.hidden(before(routed.x[tokens].div_(scale)), fitted)
    return rounded.output(between(hidden), fitted)


def add_weighted(states: HiddenStates, tokens: Tensor, outputs: Tensor, w: Tensor) -> None:
    """Add an expert's outputs [n, H], which are overwritten, times w [n] to the hidden states of
    tokens [n], in their first H channels."""
    states.hidden[:, : outputs.shape[1]].index_add_(0, tokens, outputs.mul_(w[:, None]))
