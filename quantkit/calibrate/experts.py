"""The routed experts of one layer, streamed a few at a time: solved, and run on the tokens that chose them.

Gate and up of all experts read the same input, so one curvature serves them all. Each down projection has its own Hessian, of the
tokens routed to its expert weighted by the square of the routing weight (that is what its error counts in the layer's output),
blended with that of tokens of the whole layer: a starved expert leans on what it would see if it were asked.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from quantkit.calibrate.hidden_states import HiddenStatePair
from quantkit.calibrate.scale_search import Consumer, choose_scale, sample_rows
from quantkit.calibrate.solver import Solved, Solver
from quantkit.quant.gptq import Curvature
from quantkit.quant.weights import dequantize, divide_rows, dividing_powers
from quantkit.schemes import Fp4Grid

LAYER_ROWS = 512
"""Rows of the layer's input that every expert is shown, for the shared part of its Hessian."""


def no_experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """An experts operator that adds nothing."""
    return torch.zeros_like(x)


class Recorder:
    """An experts operator that writes down what it is asked, for up to `capacity` tokens, and answers zeros."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.asked = 0
        self._kept: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        if not self._kept:
            self._kept = tuple(
                torch.empty(self.capacity, *t.shape[1:], dtype=t.dtype, device=t.device) for t in (x, topk_ids, topk_weights)
            )
        for kept, new in zip(self._kept, (x, topk_ids, topk_weights)):
            kept[self.asked : self.asked + len(x)] = new
        self.asked += len(x)
        return torch.zeros_like(x)

    def routed(self, fitted: int, quantized: int) -> "Routed":
        x, topk_ids, topk_weights = (kept[: self.asked] for kept in self._kept)
        return Routed(x, topk_ids, topk_weights, fitted, quantized)


@dataclass(frozen=True)
class Routed:
    """What one layer's experts were asked, all tokens in one order: fitted on, held out, held out on the original path.

    x float32 [T, H]; topk_ids [T, k]; topk_weights float32 [T, k]; fitted and quantized: the first tokens that are calibration,
    and that run through quantized experts; the rest runs through the original ones.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    fitted: int
    quantized: int

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Tokens [n] that chose the expert, rising, and their routing weights [n]."""
        tokens, slots = (self.topk_ids == expert).nonzero(as_tuple=True)
        return tokens, self.topk_weights[tokens, slots]

    def quantized_of(self, expert: int) -> tuple[Tensor, Tensor, int]:
        """As `of`, without the original path; and how many of the tokens are calibration, which come first."""
        tokens, w = self.of(expert)
        fitted, quantized = (int((tokens < end).sum()) for end in (self.fitted, self.quantized))
        return tokens[:quantized], w[:quantized], fitted

    def dense(self, num_experts: int) -> Tensor:
        """Routing weights [T, E], zero where an expert was not chosen."""
        empty = torch.zeros(len(self.x), num_experts, device=self.x.device)
        return empty.scatter_(1, self.topk_ids, self.topk_weights)

    def counts(self, num_experts: int) -> Tensor:
        """Calibration tokens of every expert, int64 [E]."""
        return torch.bincount(self.topk_ids[: self.fitted].flatten(), minlength=num_experts)


@dataclass(frozen=True)
class ExpertWeights:
    """float32 [I, H], [I, H], [H, I]."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def hidden(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, I], the input of down."""
        return F.silu(x @ self.gate.t(), inplace=True).mul_(x @ self.up.t())

    def __call__(self, x: Tensor) -> Tensor:
        return self.hidden(x) @ self.down.t()


class ExpertSolver:
    """Solves experts of one layer. scale [H]: folded into the layer's norm; curvature: of the layer's input, unscaled;
    importance [H] and outputs: see `SublayerSpec`."""

    def __init__(
        self,
        solver: Solver,
        routed: Routed,
        scale: Tensor,
        curvature: Curvature,
        held_out: Tensor,
        importance: Tensor | None,
        outputs: Curvature | None,
    ) -> None:
        self.solver, self.routed, self.scale, self.importance, self.outputs = solver, routed, scale, importance, outputs
        self.curvature = curvature.scaled(scale)
        self.held_out = held_out / scale
        self.exact = isinstance(solver.grid, Fp4Grid)  # e4m3 steps are too coarse for any divisor but a power of two
        fitted = routed.x[: routed.fitted]
        self.layer_rows = fitted[:: max(1, len(fitted) // LAYER_ROWS)][:LAYER_ROWS] / scale

    def solve(self, names: dict[int, str], experts: dict[int, ExpertWeights]) -> tuple[dict[str, Solved], dict[int, Tensor]]:
        """names: expert -> prefix such as model.layers.3.mlp.experts.17. Returns module -> solved, of three linears each, and
        expert -> what its down_proj then reads [n, I], for the tokens of `Routed.quantized_of`.

        The scale between up and down is chosen when both readers of the layer's input are rounded: dividing up's rows by it changes
        their steps and not one code.
        """
        stack: dict[str, Tensor] = {}
        fused: dict[str, str] = {}
        for expert, weights in experts.items():
            for side, w in (("gate", weights.gate), ("up", weights.up)):
                stack[f"{names[expert]}.{side}_proj"] = w * self.scale
                fused[f"{names[expert]}.{side}_proj"] = names[expert]
        solved = self.solver.solve_stack(stack, fused, self.curvature, self.held_out)
        del stack
        read, gated, hidden, hessians, shown = {}, {}, {}, [], []
        for expert in experts:
            gate, up = (solved[f"{names[expert]}.{side}_proj"].values for side in ("gate", "up"))
            tokens, w, fitted = self.routed.quantized_of(expert)
            x = read[expert] = self.routed.x[tokens].div_(self.scale)
            gated[expert] = F.silu(x @ gate.t(), inplace=True)
            hidden[expert] = gated[expert] * (x @ up.t())
            shown.append(F.silu(self.layer_rows @ gate.t(), inplace=True).mul_(self.layer_rows @ up.t()))
            hessians.append(self._down_hessian(hidden[expert][:fitted], w[:fitted], shown[-1]))
        hessian = torch.stack(hessians)
        curvature = self.solver.curvature(hessian)
        inner = self._inner_scales([solved[f"{names[expert]}.up_proj"] for expert in experts], experts, curvature, hessian, shown)
        downs, samples = {}, []
        for (expert, weights), s, of_layer in zip(experts.items(), inner, shown):
            of_up = f"{names[expert]}.up_proj"
            weight = divide_rows(solved[of_up].weight, s, self.solver.scale_dtype)
            solved[of_up] = replace(solved[of_up], weight=weight, values=dequantize(weight))
            if self.exact:
                hidden[expert].div_(s)
            else:  # steps were rounded to what is stored: what is read back later must give the same to the last bit
                torch.mul(gated.pop(expert), read.pop(expert) @ solved[of_up].values.t(), out=hidden[expert])
            downs[f"{names[expert]}.down_proj"] = weights.down * s
            _, _, fitted = self.routed.quantized_of(expert)
            samples.append(hidden[expert][fitted:] if len(hidden[expert]) > fitted else of_layer / s)
        return solved | self.solver.solve_batch(downs, curvature.scaled(inner), samples, self.outputs), hidden

    def _inner_scales(
        self, ups: list[Solved], experts: dict[int, ExpertWeights], curvature: Curvature, hessian: Tensor, shown: list[Tensor]
    ) -> Tensor:
        """Scales between up and down of every expert, [B, I]. curvature and hessian: of what down reads, unscaled."""
        if not {"awq", "smooth"} & set(self.solver.methods):
            return torch.ones(hessian.shape[:-1], device=hessian.device)
        count = self.solver.recipe.search_rows
        rows = torch.stack([sample_rows(weights.down, count) for weights in experts.values()])
        importance = None if self.importance is None else sample_rows(self.importance[:, None], count)[:, 0]
        sample = torch.stack(shown)
        consumers = [Consumer(rows, 1.0, self.solver, importance)]
        scale = choose_scale(self.solver, consumers, curvature, hessian, sample.abs().amax(-2), sample, self.exact)
        return torch.stack([self._within_reach(s, up) for s, up in zip(scale, ups)])

    def _within_reach(self, scale: Tensor, up: Solved) -> Tensor:
        """The scale [I], times one power of two where that is needed, and then limited to what up's stored steps can take."""
        least, largest = dividing_powers(up.weight, self.solver.scale_dtype)
        raised = scale * (least / scale).amax().clamp(min=1).log2().ceil().exp2()
        return torch.minimum(torch.maximum(raised, least), largest)

    def _down_hessian(self, hidden: Tensor, w: Tensor, of_layer: Tensor) -> Tensor:
        """Mean over tokens of w^2 h h^T, [I, I]: of the expert's own [n, I], blended with those of the layer [R, I]."""
        mean_square = w.square().mean() if len(w) else torch.ones((), device=w.device)
        blend = self.solver.recipe.min_expert_tokens
        own, shared = hidden * w[:, None], of_layer * (blend / len(of_layer) * mean_square).sqrt()
        return (own.t() @ own).addmm_(shared.t(), shared).div_(max(len(own) + blend, 1))


def add_outputs(
    streams: HiddenStatePair,
    routed: Routed,
    expert: int,
    original: ExpertWeights,
    rounded: ExpertWeights,
    scale: Tensor,
    hidden: Tensor | None,
) -> None:
    """Add one expert's weighted outputs to the hidden states of both paths: the rounded expert's, and the original's.

    hidden: what `ExpertSolver.solve` returned, for an expert that was solved in this run.
    """
    tokens, w, _ = routed.quantized_of(expert)
    if hidden is None:
        hidden = rounded.hidden(routed.x[tokens].div_(scale))
    streams.quantized.hidden.index_add_(0, tokens, (hidden @ rounded.down.t()).mul_(w[:, None]))
    tokens, w = (part[len(tokens) :] for part in routed.of(expert))
    streams.original.hidden.index_add_(0, tokens - routed.quantized, original(routed.x[tokens]).mul_(w[:, None]))
