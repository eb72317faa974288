"""From a linear and the statistics of its input to a stored weight, by the methods of a scheme.

Linears that read the same input are solved as one stack of rows: their curvature is factored once,
however many experts there are. Linears with inputs of their own (the experts' down projections) are
solved as one batch. With a known output cost, rows compensate for rows as well, and
round-to-nearest is compared by that cost.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from quantkit.calibrate.hidden_states import PIECE_VALUES
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.recipe import ROUNDINGS, Recipe
from quantkit.checkpoint.formats.base import Format
from quantkit.grids.base import (
    Grid,
    QuantizedWeight,
    Quantizer,
    Scales,
    Weight,
    fit_scales,
    round_to_nearest,
)
from quantkit.grids.nvfp4 import Nvfp4Weight, input_divisor
from quantkit.models.activation_quant import ActivationQuant
from quantkit.quant.compensation import compensate, compensate_both, sample_output_directions
from quantkit.quant.gptq import Curvature, Descent, scaled_losses
from quantkit.quant.tensor_cores import sample_linear, tensor_core_products

NO_COSTS: Mapping[str, Curvature] = {}
NO_SOLUTIONS: Mapping[str, tuple[Tensor, Scales]] = {}
JUDGED_OUTPUTS = 512
"""Directions of a linear's outputs in which its error is evaluated if their cost is known."""


@dataclass(frozen=True)
class LinearResult:
    """What is kept of one linear. error: squared output error over squared output on held-out
    inputs (NaN without any). method: what quantized it."""

    weight: QuantizedWeight
    error: float
    method: str


@dataclass(frozen=True)
class LinearSolution:
    """One quantized linear. values float32 [N, K]: the dequantized `weight`. error, method: see
    `LinearResult`."""

    weight: QuantizedWeight
    values: Tensor
    error: float
    method: str

    @property
    def result(self) -> LinearResult:
        """The same without the values."""
        return LinearResult(self.weight, self.error, self.method)


@dataclass(eq=False)
class LinearSolver:
    """Quantizes linears to one grid by one recipe. `methods` decides whether weights are
    compensated or rounded to nearest. activation_bits: of the inputs of quantized linears."""

    grid: Grid
    scale_dtype: torch.dtype
    recipe: Recipe
    methods: tuple[str, ...]
    activation_bits: int
    piece_values: int = PIECE_VALUES

    @property
    def group_size(self) -> int | None:
        return self.grid.group_size

    @property
    def compensates(self) -> bool:
        return "gptq" in self.methods

    @property
    def descent(self) -> Descent | None:
        return (
            Descent(self.recipe.sweeps, "steps" in self.methods)
            if "descent" in self.methods
            else None
        )

    def quantizer(self, amax: Tensor, fit: bool = True) -> Quantizer:
        """amax float32 [] or [..., N]: the largest weight of the tensor, fused siblings included.
        `fit` off: scales from the groups' extremes alone."""
        points = self.recipe.fit_points if fit else 0
        return self.grid.quantizer(amax, self.scale_dtype, points)

    def activation_quants(
        self, inside: Weight | None = None, after: Weight | None = None
    ) -> "tuple[ActivationQuant, ActivationQuant]":
        """Activation quantization of an expert's input and of its down projection's; the quantized
        linears hold the input divisors."""
        return self.activation_quant(inside), self.activation_quant(after)

    def activation_quant(self, weight: Weight | None = None) -> ActivationQuant:
        """Of a linear's input; `weight`, quantized, holds the input divisor."""
        return ActivationQuant.of(weight, self.activation_bits, self.grid)

    def with_input_divisor(self, solved: LinearSolution, largest: Tensor) -> LinearSolution:
        """With the divisor of its inputs if they are quantized to NVFP4. largest: their largest
        magnitude, float32 []."""
        if not self.grid.has_input_scales:
            return solved
        weight = replace(Nvfp4Weight.of(solved.weight), input_divisor=input_divisor(largest))
        return replace(solved, weight=weight)

    def curvature(self, mean_hessian: Tensor) -> Curvature:
        """As `input_curvature`, by this recipe."""
        return input_curvature(mean_hessian, self.recipe)

    def losses(self, w: Tensor, scale: Tensor, amax: Tensor, curvature: Curvature) -> Tensor:
        """Loss of every row [C, ..., N] if W s were quantized by this recipe with unfitted scales,
        for inputs divided by s: what a scale search compares. W [..., N, K], scale [C, ..., K],
        amax [C, ..., N]."""
        quantizer = self.quantizer(amax, fit=False)
        if self.compensates:
            return scaled_losses(w, scale, curvature, quantizer)
        scale = scale.unsqueeze(-2)
        values, _ = round_to_nearest(w * scale, quantizer)
        error = w - values / scale
        return (
            (error.gather(-1, curvature.order.unsqueeze(-2).expand_as(error)) @ curvature.factor)
            .square()
            .sum(-1)
        )

    @tensor_core_products()
    def solve_stack(
        self,
        weights: dict[str, Tensor],
        fused: dict[str, str],
        curvature: Curvature,
        sample: Tensor,
        outputs: Mapping[str, Curvature] = NO_COSTS,
        ranks: Ranks | None = None,
    ) -> dict[str, LinearSolution]:
        """Linears [N_i, K] that read one input. fused: module -> name shared by siblings with one
        FP4 global scale; sample [S, K]; outputs: cost of an error in a linear's outputs, see
        `compensate_both`, if known and the recipe compensates; ranks: divide these linears, and all
        get the same result."""
        amax = self._amax(weights, fused)
        weighted = {module: w for module, w in weights.items() if module in outputs}
        others = {module: w for module, w in weights.items() if module not in outputs}
        both = self._solve_weighted(weighted, amax, curvature, outputs, ranks or Ranks())
        solved: dict[str, LinearSolution] = {}
        for module, w in weighted.items():
            solved |= self._solve_rows(
                {module: w}, amax, curvature, sample, outputs[module], {module: both.pop(module)}
            )
        return solved | (self._solve_rows(others, amax, curvature, sample) if others else {})

    def _solve_weighted(
        self,
        linears: dict[str, Tensor],
        amax: dict[str, Tensor],
        curvature: Curvature,
        outputs: Mapping[str, Curvature],
        ranks: Ranks,
    ) -> dict[str, tuple[Tensor, Scales]]:
        """Values and scales of linears with an output cost, each solved by one rank."""
        found: dict[str, tuple[Tensor, Scales]] = {}
        for number, (module, w) in enumerate(linears.items()):
            quantizer = self.quantizer(amax[module])
            if ranks.owns(number):
                most = _most_rows(w, self.piece_values, self.grid)
                found[module] = compensate_both(
                    w, curvature, outputs[module], quantizer, most, self.descent
                )
            else:  # receives the result
                found[module] = (
                    w.new_empty(w.shape),
                    fit_scales(w, quantizer, curvature.conditional),
                )
        for number, (module, (values, scales)) in enumerate(found.items()):
            send = partial(ranks.broadcast, source=ranks.owner(number))
            found[module] = (
                send(values),
                scales.map(send),
            )
        return found

    def _solve_rows(
        self,
        weights: dict[str, Tensor],
        amax: dict[str, Tensor],
        curvature: Curvature,
        sample: Tensor,
        outputs: Curvature | None = None,
        both: Mapping[str, tuple[Tensor, Scales]] = NO_SOLUTIONS,
    ) -> dict[str, LinearSolution]:
        """Some linears of a stack, given their largest weights. both: values and scales, if
        `outputs` is given."""
        judge = None if outputs is None else sample_output_directions(outputs, JUDGED_OUTPUTS)
        parts: dict[str, list[_Part]] = {module: [] for module in weights}
        for piece in _pieces(weights, self.piece_values, self.grid):
            stacked = [weights[module][rows] for module, rows in piece]
            per_row = torch.cat(
                [amax[module].expand(len(w)) for (module, _), w in zip(piece, stacked)]
            )
            every = torch.cat(stacked)
            if both:
                values = _cat([both[module][0][rows] for module, rows in piece])
                scales = _cat_scales([_rows(both[module][1], rows) for module, rows in piece])
            else:
                values, scales = self._round(every, per_row, curvature)
            nearest, _ = round_to_nearest(every, self.quantizer(per_row, fit=False))
            start = 0
            for (module, rows), w in zip(piece, stacked):
                own = slice(start, start + len(w))
                start += len(w)
                errors = _errors(
                    w, (values[own], nearest[own]), sample, None if judge is None else judge[rows]
                )
                parts[module].append(_Part(values[own], _rows(scales, own), *errors))
        return {
            module: self._finish(w, parts.pop(module), amax[module])
            for module, w in weights.items()
        }

    @tensor_core_products()
    def solve_batch(
        self,
        weights: dict[str, Tensor],
        curvature: Curvature,
        samples: list[Tensor],
        outputs: Curvature | None = None,
    ) -> dict[str, LinearSolution]:
        """Linears [N, K] of one shape, each with its own curvature (a leading dimension) and sample
        [S_i, K]; outputs: as for a stack."""
        batch = torch.stack(list(weights.values()))
        amax = batch.abs().amax((-1, -2))
        per_row, judge = amax[:, None].expand(batch.shape[:2]), None
        if outputs is None:
            values, scales = self._round(batch, per_row, curvature)
        else:
            judge = sample_output_directions(outputs, JUDGED_OUTPUTS)
            values, scales = compensate_both(
                batch, curvature, outputs, self.quantizer(amax[:, None]), descent=self.descent
            )
        nearest, _ = round_to_nearest(batch, self.quantizer(per_row, fit=False))
        return {
            module: self._finish(
                w,
                [
                    _Part(
                        values[i],
                        _rows(scales, i),
                        *_errors(w, (values[i], nearest[i]), samples[i], judge),
                    )
                ],
                amax[i],
            )
            for i, (module, w) in enumerate(weights.items())
        }

    def solve_rtn(
        self, weights: dict[str, Tensor], fused: dict[str, str]
    ) -> dict[str, LinearSolution]:
        """Linears rounded to nearest without statistics; their errors are those of the weights
        themselves."""
        amax = self._amax(weights, fused)
        solved = {}
        for module, w in weights.items():
            quantizer = self.quantizer(amax[module])
            values, scales = round_to_nearest(w, quantizer)
            error = float((w - values).square().sum() / w.square().sum().clamp(min=1e-30))
            solved[module] = LinearSolution(
                quantizer.encode(values, scales), values, error, "nearest"
            )
        return solved

    def rtn_values(self, weights: dict[str, Tensor], fused: dict[str, str]) -> dict[str, Tensor]:
        """Linears rounded to nearest with unfitted scales, as values only."""
        amax = self._amax(weights, fused)
        return {
            module: round_to_nearest(w, self.quantizer(amax[module], fit=False))[0]
            for module, w in weights.items()
        }

    def _amax(self, weights: dict[str, Tensor], fused: dict[str, str]) -> dict[str, Tensor]:
        own = {module: w.abs().amax() for module, w in weights.items()}
        shared: dict[str, Tensor] = {}
        for module, value in own.items():
            key = fused.get(module, module)
            shared[key] = torch.maximum(shared[key], value) if key in shared else value
        return {module: shared[fused.get(module, module)] for module in weights}

    def _round(self, w: Tensor, amax: Tensor, curvature: Curvature) -> tuple[Tensor, Scales]:
        """Values and scales by this recipe."""
        for method in self.methods:
            if method in ROUNDINGS:
                return ROUNDINGS[method](w, self.quantizer(amax), curvature)
        if self.compensates:
            result = compensate(w, curvature, self.quantizer(amax), self.descent)
            return result.values, result.scales
        return round_to_nearest(w, self.quantizer(amax), curvature.diagonal)

    def _finish(self, w: Tensor, parts: "list[_Part]", amax: Tensor) -> LinearSolution:
        """One linear from its rows; round-to-nearest if the method clearly loses to it on held-out
        inputs."""
        method = "+".join(self.methods) or "nearest"
        whole, own, rtn = torch.stack([part.squares for part in parts]).sum(0)
        costs = [part.judged for part in parts if part.judged is not None]
        kept = own
        if _exceeds(*(torch.stack(costs).sum(0).square_().sum(1) if costs else (own, rtn))):
            values, scales = round_to_nearest(w, self.quantizer(amax, fit=False))
            kept, method = rtn, "nearest"
        else:
            values, scales = (
                _cat([part.values for part in parts]),
                _cat_scales([part.scales for part in parts]),
            )
        error = float(kept.sum() / whole.sum().clamp(min=1e-30)) if len(whole) else float("nan")
        return LinearSolution(self.quantizer(amax).encode(values, scales), values, error, method)


def input_curvature(mean_hessian: Tensor, recipe: Recipe) -> Curvature:
    """mean_hessian float32 [..., K, K], per token; a leading dimension is of routed experts."""
    return Curvature.of(mean_hessian, recipe.damping, recipe.shrinkage)


@dataclass(frozen=True)
class _Part:
    """Some rows of a linear, rounded. squares, judged: see `_errors`."""

    values: Tensor
    scales: Scales
    squares: Tensor
    judged: Tensor | None


def _errors(
    w: Tensor, candidates: tuple[Tensor, ...], sample: Tensor, judge: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Errors of candidates Q for some rows of W. For each row x of `sample` [S, K]: ||W x||^2, then
    ||(W - Q) x||^2 of every candidate, float32 [1 + n, S]; and these rows' share in J^T (W - Q) x,
    [n, C, S], J the same rows of a whole `sample_output_directions`."""
    outputs = [sample_linear(x, sample) for x in (w, *(w - values for values in candidates))]
    judged = None if judge is None else torch.stack([judge.t() @ output for output in outputs[1:]])
    return torch.stack([output.square_().sum(0) for output in outputs]), judged


def _exceeds(a: Tensor, b: Tensor) -> bool:
    """Whether a [S] is significantly larger than b on average: by two standard errors of the mean
    difference."""
    difference = a - b
    return len(a) > 1 and float(difference.mean()) > 2 * float(difference.std()) / len(a) ** 0.5


def _most_rows(w: Tensor, values: int, grid: Grid) -> int:
    """Rows of W to be solved together: all; on a CPU, where memory is short, a few, with all that
    share a scale."""
    shared = grid.scale_rows
    most = max(1, values // w.shape[1] // shared) * shared
    return most if w.device.type == "cpu" else len(w)


def _pieces(
    weights: dict[str, Tensor], values: int, grid: Grid
) -> Iterator[list[tuple[str, slice]]]:
    """(module, rows) to be solved together."""
    if grid.scale_rows == 1 and next(iter(weights.values())).device.type != "cpu":
        yield [(module, slice(0, len(w))) for module, w in weights.items()]
        return
    for module, w in weights.items():
        count = _most_rows(w, values, grid)
        for start in range(0, len(w), count):
            yield [(module, slice(start, min(start + count, len(w))))]


def _cat(parts: list[Tensor]) -> Tensor:
    """Concatenated rows; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cat_scales(parts: list[Scales]) -> Scales:
    zero_points = [part.zero_point for part in parts if part.zero_point is not None]
    return Scales(_cat([part.scale for part in parts]), _cat(zero_points) if zero_points else None)


def _rows(scales: Scales, rows: slice | int) -> Scales:
    return scales.map(lambda t: t[rows])


@dataclass
class SolverTable:
    """The solver of every linear of one output, whose linears may be on several grids. grid_of: of
    a module to quantize. format: determines the dtype of scales and the activation bits."""

    format: Format
    grid_of: Callable[[str], Grid]
    recipe: Recipe
    methods: tuple[str, ...]
    piece_values: int = PIECE_VALUES
    _by_grid: dict[Grid, LinearSolver] = field(default_factory=dict, init=False)

    @property
    def compensates(self) -> bool:
        return "gptq" in self.methods

    def of(self, module: str) -> LinearSolver:
        """The solver of this linear."""
        return self.on(self.grid_of(module))

    def on(self, grid: Grid) -> LinearSolver:
        """The solver of this grid; the same object for all linears on it."""
        if grid not in self._by_grid:
            self._by_grid[grid] = LinearSolver(
                grid,
                self.format.scale_dtype_of(grid),
                self.recipe,
                self.methods,
                min(self.format.activation_bits_of(grid), grid.activation_bits),
                self.piece_values,
            )
        return self._by_grid[grid]

    def by_solver(self, modules: Collection[str]) -> dict[LinearSolver, list[str]]:
        """The modules by their solver, in their order."""
        found: dict[LinearSolver, list[str]] = {}
        for module in modules:
            found.setdefault(self.of(module), []).append(module)
        return found

    def activation_quants(
        self, modules: Collection[str], weights: Mapping[str, Weight] | None = None
    ) -> dict[str, ActivationQuant]:
        """Activation quantization of those modules that have it. weights: quantized ones, by
        module."""
        solvers = {module: self.of(module) for module in modules}
        return {
            module: own.activation_quant((weights or {}).get(module))
            for module, own in solvers.items()
            if own.activation_bits < 16
        }
