"""From a linear and the statistics of its input to a stored weight, by the methods of a scheme.

Linears that read the same input are solved as one stack of rows: their curvature is factored once, however many experts there
are. Linears with inputs of their own (the experts' down projections) are solved as one batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.quant.fp4 import global_scale
from quantkit.quant.gptq import Curvature, compensate
from quantkit.quant.rounding import Fp4Rounder, IntRounder, Rounder, Step, round_to_nearest
from quantkit.quant.weights import Fp4Weight, IntWeight
from quantkit.recipe import Recipe
from quantkit.schemes import Fp4Grid, Grid, Method

STACK_VALUES = 2**27
"""Weights solved together on a CPU, at least one linear's."""
FP4_NEIGHBOURS = (0, -1, 1, -2, 2, 3, 4)
"""e4m3 codes around amax / 6: from a quarter below to a half above, which is amax / 4."""


@dataclass(frozen=True)
class Solved:
    """One linear, rounded.

    values float32 [N, K]: what `weight` decodes to. error: squared output error over squared output, on held-out inputs
    (NaN where there were none). method: what made it.
    """

    weight: IntWeight | Fp4Weight
    values: Tensor
    error: float
    method: str


class Solver:
    """Applies one recipe. `methods` decides whether weights are compensated or rounded to nearest."""

    def __init__(self, grid: Grid, scale_dtype: torch.dtype, recipe: Recipe, methods: tuple[Method, ...]) -> None:
        self.grid, self.scale_dtype, self.recipe, self.methods = grid, scale_dtype, recipe, methods

    def on(self, grid: Grid) -> "Solver":
        """The same recipe on another grid."""
        return self if grid == self.grid else Solver(grid, self.scale_dtype, self.recipe, self.methods)

    @property
    def group_size(self) -> int | None:
        return self.grid.group_size

    @property
    def compensates(self) -> bool:
        return "gptq" in self.methods

    def rounder(self, amax: Tensor, fit: bool = True) -> Rounder:
        """amax float32 [] or [..., N]: the largest weight of the tensor, fused siblings included. `fit` off: plain extremes."""
        if isinstance(self.grid, Fp4Grid):
            return Fp4Rounder(global_scale(amax), FP4_NEIGHBOURS[: self.recipe.fit_points] if fit else (0,))
        finer = 0.02 if self.grid.bits == 8 else 0.05
        shrink = tuple(1 - finer * i for i in range(self.recipe.fit_points)) if fit else (1.0,)
        return IntRounder(self.grid, self.scale_dtype, shrink)

    def curvature(self, mean_hessian: Tensor) -> Curvature:
        """mean_hessian float32 [..., K, K], per token."""
        return Curvature.of(mean_hessian, self.recipe.damping, self.group_size)

    def losses(self, w: Tensor, amax: Tensor, curvature: Curvature) -> Tensor:
        """Loss of every row [..., N] if W [..., N, K] were rounded by this recipe, with plain steps: what a scale search compares."""
        rounder = self.rounder(amax, fit=False)
        if self.compensates:
            return compensate(w, curvature, rounder, sweeps=0).loss
        values, _ = round_to_nearest(w, rounder, _diagonal(curvature))
        error = (w - values).gather(-1, curvature.order.unsqueeze(-2).expand_as(w))
        return (error @ curvature.factor).square().sum(-1)

    def solve_stack(self, weights: dict[str, Tensor], fused: dict[str, str], curvature: Curvature, sample: Tensor) -> dict[str, Solved]:
        """Linears [N_i, K] that read one input. fused: module -> name shared by siblings with one FP4 global scale; sample [S, K]."""
        amax = self._amax(weights, fused)
        solved: dict[str, Solved] = {}
        for stack in _stacks(weights):
            stacked = torch.cat(list(stack.values()))
            per_row = torch.cat([amax[module].expand(len(w)) for module, w in stack.items()])
            values, step, nearest = self._round(stacked, per_row, curvature)
            start = 0
            for module, w in stack.items():
                rows = slice(start, start + len(w))
                start += len(w)
                solved[module] = self._finish(w, values[rows], _rows(step, rows), nearest[rows], amax[module], sample)
        return solved

    def solve_batch(self, weights: dict[str, Tensor], curvature: Curvature, samples: list[Tensor]) -> dict[str, Solved]:
        """Linears [N, K] of one shape, each with its own curvature (a leading dimension) and sample [S_i, K]."""
        batch = torch.stack(list(weights.values()))
        amax = batch.abs().amax((-1, -2))
        values, step, nearest = self._round(batch, amax[:, None].expand(batch.shape[:2]), curvature)
        return {
            module: self._finish(w, values[i], _rows(step, i), nearest[i], amax[i], samples[i])
            for i, (module, w) in enumerate(weights.items())
        }

    def nearest(self, weights: dict[str, Tensor], fused: dict[str, str]) -> dict[str, Solved]:
        """Linears rounded one by one without any statistics; their errors are those of the weights themselves."""
        amax = self._amax(weights, fused)
        solved = {}
        for module, w in weights.items():
            rounder = self.rounder(amax[module])
            values, step = round_to_nearest(w, rounder)
            error = float((w - values).square().sum() / w.square().sum().clamp(min=1e-30))
            solved[module] = Solved(rounder.weight(values, step), values, error, "nearest")
        return solved

    def _amax(self, weights: dict[str, Tensor], fused: dict[str, str]) -> dict[str, Tensor]:
        own = {module: w.abs().amax() for module, w in weights.items()}
        shared: dict[str, Tensor] = {}
        for module, value in own.items():
            key = fused.get(module, module)
            shared[key] = torch.maximum(shared[key], value) if key in shared else value
        return {module: shared[fused.get(module, module)] for module in weights}

    def _round(self, w: Tensor, amax: Tensor, curvature: Curvature) -> tuple[Tensor, Step, Tensor]:
        """Values and steps by this recipe, and the values of plain rounding to fall back on."""
        nearest, _ = round_to_nearest(w, self.rounder(amax, fit=False))
        if self.compensates:
            result = compensate(w, curvature, self.rounder(amax), self.recipe.sweeps)
            return result.values, result.step, nearest
        values, step = round_to_nearest(w, self.rounder(amax), _diagonal(curvature))
        return values, step, nearest

    def _finish(self, w: Tensor, values: Tensor, step: Step, nearest: Tensor, amax: Tensor, sample: Tensor) -> Solved:
        """Keep plain rounding where the method loses to it on held-out inputs."""
        method = "+".join(self.methods) or "nearest"
        error, error_nearest = relative_error(w, values, sample), relative_error(w, nearest, sample)
        rounder = self.rounder(amax)
        if error > error_nearest:
            nearest, step = round_to_nearest(w, self.rounder(amax, fit=False))
            values, error, method = nearest, error_nearest, "nearest"
        return Solved(rounder.weight(values, step), values, error, method)


def relative_error(w: Tensor, values: Tensor, sample: Tensor) -> float:
    """||(W - Q) X^T||^2 / ||W X^T||^2 over rows X of `sample` [S, K]; NaN without rows."""
    if not len(sample):
        return float("nan")
    return float(((w - values) @ sample.t()).square().sum() / (w @ sample.t()).square().sum().clamp(min=1e-30))


def _stacks(weights: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """All at once; on a CPU, where memory is short and nothing is gained, as many as STACK_VALUES hold."""
    if next(iter(weights.values())).device.type != "cpu":
        yield weights
        return
    stack: dict[str, Tensor] = {}
    for module, w in weights.items():
        if stack and sum(one.numel() for one in stack.values()) + w.numel() > STACK_VALUES:
            yield stack
            stack = {}
        stack[module] = w
    yield stack


def _rows(step: Step, rows: slice | int) -> Step:
    return Step(step.step[rows], None if step.zero is None else step.zero[rows])


def _diagonal(curvature: Curvature) -> Tensor:
    """Diagonal of the Hessian in the order of the channels, [..., K]."""
    permuted = curvature.diagonal
    return torch.empty_like(permuted).scatter_(-1, curvature.order.expand_as(permuted), permuted)
