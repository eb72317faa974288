"""The scale of every group of a sublayer: candidates are compared, the best is folded, and the
folding is verified.

A candidate is evaluated by its effect: a sample of the consumers' rows is quantized, compensated if
the recipe compensates, and the losses relative to each consumer's own output are added up. With
activations of 8 or 4 bits, their quantization error is added; for 8 bits on some thousand rows, as
the few with large values make up most of it. The identity is always among the candidates, so no
group becomes worse than without scales.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from quantkit.calibrate.hidden_states import HiddenStatePair, relative_distance
from quantkit.calibrate.input_statistics import SublayerProbe, SublayerStatistics, run_probe
from quantkit.calibrate.input_sums import Drift, InputStatistics, best_fraction
from quantkit.calibrate.linear_solver import LinearSolver, SolverTable, input_curvature
from quantkit.calibrate.source_model import ParameterReader
from quantkit.calibrate.sublayer import Sublayer
from quantkit.common.errors import QuantkitError
from quantkit.grids.nvfp4 import input_divisor
from quantkit.models.activation_quant import ActivationQuant
from quantkit.models.table import ScaleGroup, ValueHeads
from quantkit.quant.awq import candidate_scales, effective_scale, power_of_two, relative_weight
from quantkit.quant.gptq import Curvature
from quantkit.quant.smooth import activation_loss, smoothing_candidates
from quantkit.quant.tensor_cores import sample_linear, tensor_core_products

BATCH_VALUES = {"cpu": 2**22}
"""Weights that the search quantizes at a time, over all candidates, by device type; accelerators
use ACCELERATOR_VALUES."""
ACCELERATOR_VALUES = 2**28


@dataclass(frozen=True)
class Consumer:
    """rows float32 [..., n, K]: a sample of a consumer's weight. share: weight of its relative
    loss. solver: quantizes it. importance [n]: weight of a squared error in each row's output;
    uniform if None."""

    rows: Tensor
    share: float
    solver: LinearSolver
    importance: Tensor | None = None

    def row_weight(self, mean_hessian: Tensor) -> Tensor:
        """[..., n]: multiplied by the loss of each row and summed, they give the loss as a share of
        the mean squared output."""
        importance = (
            torch.ones_like(self.rows[..., 0])
            if self.importance is None
            else self.importance.expand(self.rows.shape[:-1])
        )
        energy = ((self.rows @ mean_hessian) * self.rows).sum(-1)
        return (
            self.share * importance / (energy * importance).sum(-1, keepdim=True).clamp(min=1e-30)
        )


def sample_rows(w: Tensor, count: int) -> Tensor:
    """About `count` evenly spaced rows of [..., N, K], copied."""
    return w[..., :: max(1, w.shape[-2] // count), :].contiguous()


def choose_scale(
    solver: LinearSolver,
    consumers: Sequence[Consumer],
    curvature: Curvature,
    inputs: InputStatistics,
    exact: bool,
    heads: ValueHeads | None = None,
) -> Tensor:
    """The best scale [..., K] for inputs with this curvature and these statistics, which may have
    leading dimensions.

    exact: only powers of two, because a 16-bit consumer must absorb the scale without rounding.
    heads: see `ScaleGroup`.
    """
    candidates = _candidates(solver, consumers, inputs)
    if heads is not None:
        candidates = heads.tie(candidates)
    if exact:
        candidates = torch.unique_consecutive(power_of_two(candidates), dim=0)
    rows = torch.cat([consumer.rows for consumer in consumers], dim=-2)
    stacks = [
        (own, [one.rows.shape[-2] for one in alike])
        for own, alike in groupby(consumers, key=lambda consumer: consumer.solver)
    ]
    row_weight = torch.cat(
        [consumer.row_weight(inputs.mean_hessian) for consumer in consumers], dim=-1
    )
    losses, divided = [], torch.empty_like(inputs.rows)  # of every candidate, in one block
    for part in candidates.split(_at_once(rows)):
        split = rows.split([sum(lengths) for _, lengths in stacks], dim=-2)
        loss = torch.cat(
            [_losses(own, w, part, lengths, curvature) for (own, lengths), w in zip(stacks, split)],
            dim=-1,
        )
        losses.append((loss * row_weight).sum(-1))
        if "smooth" in solver.methods or solver.activation_bits < 16:
            energy = ((rows * part.unsqueeze(-2)).square() * row_weight.unsqueeze(-1)).sum(-2)
        if solver.activation_bits == 4:  # one by one: quantizing holds several copies of the sample
            losses[-1] += torch.stack(
                [
                    rounding_loss(
                        inputs.sample / scale.unsqueeze(-2), own, solver.activation_quant()
                    )
                    for scale, own in zip(part, energy)
                ]
            )
        elif "smooth" in solver.methods or solver.activation_bits == 8:
            losses[-1] += torch.stack(
                [
                    activation_loss(torch.div(inputs.rows, scale.unsqueeze(-2), out=divided), own)
                    for scale, own in zip(part, energy)
                ]
            )
    best = torch.cat(losses).argmin(0)  # [...], the first of equals
    return candidates.gather(0, best[None, ..., None].expand(1, *candidates.shape[1:])).squeeze(0)


def rounding_loss(x: Tensor, column_energy: Tensor, quant: ActivationQuant) -> Tensor:
    """Squared output error per token, float32 [...], of quantizing rows x [..., T, K], to NVFP4 with
    the divisor of their largest value.

    column_energy [..., K]: squared norm of each weight column. Errors of channels are taken as
    independent.
    """
    divisor = input_divisor(x.abs().amax((-1, -2), keepdim=True))
    error = replace(quant, divisor=divisor)(x).sub_(x)
    return (error.square_().mean(-2) * column_energy).sum(-1)


def _losses(
    solver: LinearSolver, rows: Tensor, scale: Tensor, lengths: list[int], curvature: Curvature
) -> Tensor:
    """Loss of every row [C, ..., n] of concatenated linears of `lengths` rows each, under
    candidates [C, ..., K]."""
    amax = torch.stack(
        [(w * scale.unsqueeze(-2)).abs().amax((-1, -2)) for w in rows.split(lengths, dim=-2)],
        dim=-1,
    )
    return solver.losses(
        rows,
        scale,
        amax.repeat_interleave(torch.tensor(lengths, device=rows.device), dim=-1),
        curvature,
    )


def _at_once(rows: Tensor) -> int:
    """Candidates evaluated together on rows [..., n, K]."""
    return max(1, BATCH_VALUES.get(rows.device.type, ACCELERATOR_VALUES) // rows.numel())


def _candidates(
    solver: LinearSolver, consumers: Sequence[Consumer], inputs: InputStatistics
) -> Tensor:
    """All ones first. "smooth" uses the largest magnitudes of activations and weights, "awq" their
    mean sizes; both may be given. With 8-bit activations both are also tried with fourth moments,
    as a row's scale depends on its largest value."""
    rows, recipe, found = [consumer.rows for consumer in consumers], solver.recipe, []
    fourth = (
        [inputs.rows.square().square_().mean(-2).sqrt().sqrt()]
        if solver.activation_bits == 8
        else []
    )
    if "smooth" in solver.methods:
        weight_max = torch.stack([w.abs().amax(-2) for w in rows]).amax(0)
        found += [
            smoothing_candidates(size, weight_max, recipe.scale_points)
            for size in (inputs.absmax, *fourth)
        ]
    if "awq" in solver.methods:
        size = inputs.mean_hessian.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
        weight = relative_weight(rows, solver.group_size)
        found += [
            candidate_scales(one, weight, recipe.scale_points, recipe.weight_points)
            for one in (size, *fourth)
        ]
    return torch.cat(found)


TOLERANCE = 1e-7
"""Squared relative difference that folding scales may cause in float32."""


@dataclass(frozen=True)
class Folding:
    """How scales change a sublayer's tensors, by name. columns: multiplied by [K]; then rows, and
    biases: divided by [N]; gains: replaced, as stored."""

    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    gains: dict[str, Tensor] = field(default_factory=dict)

    def changes(self, name: str) -> bool:
        return name in self.columns or name in self.rows or name in self.gains

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """The float32 tensor `name` folded, in place if it is a matrix."""
        if name in self.gains:
            return self.gains[name].float()
        if name in self.columns:
            tensor.mul_(self.columns[name])
        if name in self.rows:
            tensor.div_(self.rows[name].view(-1, *[1] * (tensor.dim() - 1)))
        return tensor

    def with_group(
        self, group: ScaleGroup, inside: Sequence[str], scale: Tensor, gain: Tensor | None
    ) -> "Folding":
        """With one more group's scale; inside: the tensors of its consumers in this sublayer; gain: a
        norm's new gain, if that is the producer."""
        producer = f"{group.producer}.weight"
        divided = [producer] * (gain is None) + [f"{group.producer}.bias"] * group.biased
        return Folding(
            self.columns | dict.fromkeys(inside, scale),
            self.rows
            | dict.fromkeys(
                divided, scale if group.heads is None else group.heads.producer_scales(scale)
            ),
            self.gains if gain is None else self.gains | {producer: gain},
        )


class FoldedTensors(Mapping[str, Tensor]):
    """A sublayer's tensors with scales folded, float32, each read from the source when accessed:
    none is held here."""

    def __init__(self, sublayer: Sublayer, source: ParameterReader, folding: Folding) -> None:
        self.rows = {row.name: row for row in sublayer.needed}
        self.source, self.folding = source, folding

    def __getitem__(self, name: str) -> Tensor:
        return self.folding.apply(name, self.source.dequantized(self.rows[name]))

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class LinearInput:
    """An input after division by scale [K], as its consumers' solvers need it. sample: held-out
    rows [S, K]. largest: the largest magnitude of calibration tokens, float32 []. drift: None if
    consumers are not corrected for it."""

    curvature: Curvature
    sample: Tensor
    scale: Tensor
    largest: Tensor
    drift: Drift | None = None

    @cached_property
    def _correction(self) -> Tensor:
        """[K, K], by which a reader's weight changes."""
        assert self.drift is not None, "an input observed on both paths"
        return self.curvature.solved(self.drift.inputs)

    @tensor_core_products()
    def drift_corrected(self, w: Tensor) -> Tensor:
        """A consumer's weight w [N, K] corrected for drift, in place."""
        drift = self.drift
        if drift is None:
            return w
        change = (
            self.curvature.solved(drift.inputs)
            if drift.wide
            else sample_linear(w, self._correction.t())
        )
        changes = [((drift.sample - self.sample) @ w.t(), change)]
        if drift.stream is not None and drift.stream_sample is not None:
            changes.append((drift.stream_sample, self.curvature.solved(drift.stream)))
        room = LARGEST_CHANGE * w.norm()
        for lost, change in changes:
            most = room / change.norm().clamp(min=1e-30)
            best = best_fraction(lost, self.sample @ change.t()).minimum(most)
            w.addcmul_(change, CORRECTED_SHARE * best)
        return w


CORRECTED_SHARE = 0.6
"""Of the correction that is best on held-out rows of the calibration text: what is lost on it is gained
on other text (docs/lab/quality.md)."""
LARGEST_CHANGE = 0.25
"""Most that a correction changes a weight, as a share of its norm: SmolLM2's largest is 0.11, and beyond
it inputs unlike calibration's pay for those of calibration."""


@dataclass(frozen=True)
class SublayerScales:
    """A sublayer with scales chosen and verified. inputs: of linears to quantize, by module; with
    drift, those of the last linears only if a scale was chosen for them. scales: by group."""

    sublayer: Sublayer
    sites: dict[str, tuple[str, ...]]
    inputs: dict[str, LinearInput]
    scales: dict[str, Tensor]
    folding: Folding

    @property
    def experts_input(self) -> LinearInput | None:
        """Input of the routed experts; None without experts."""
        site = self.sublayer.experts_site
        return None if site is None else self.inputs[site]


def linear_input(
    statistics: InputStatistics,
    solvers: SolverTable,
    scale: Tensor | None,
    curvature: Curvature | None = None,
    drift: Drift | None = None,
) -> LinearInput:
    """curvature: of the unscaled input, if already computed; its memory, or that of the Hessian,
    is reused. drift: of the unscaled input."""
    if curvature is None:
        recipe = solvers.recipe
        curvature = Curvature.of_(statistics.mean_hessian, recipe.damping, recipe.shrinkage)
    if scale is None:
        return LinearInput(
            curvature,
            statistics.sample,
            torch.ones_like(statistics.absmax),
            statistics.absmax.amax(),
            drift,
        )
    drift = None if drift is None else drift.scaled(scale)
    return LinearInput(
        curvature.scaled_(scale),
        statistics.sample / scale,
        scale,
        (statistics.absmax / scale).amax(),
        drift,
    )


def scale_sublayer(
    observed: SublayerStatistics,
    source: ParameterReader,
    states: HiddenStatePair,
    experts: Sequence[Consumer] = (),
) -> SublayerScales:
    """Choose the scale of every group. experts: rows of some routed experts, which count if a group
    reaches them.

    Raises QuantkitError if folding changes what the sublayer computes.
    """
    sublayer, folding = observed.sublayer, Folding()
    inputs: dict[str, LinearInput] = {}
    scales: dict[str, Tensor] = {}
    for group in sublayer.groups:
        consumers = [*_consumers(sublayer, group, FoldedTensors(sublayer, source, folding))]
        consumers += experts if group.reaches_experts else ()
        if not consumers or not sublayer.searches(group):
            continue
        solver = consumers[0].solver
        statistics = observed.inputs[group.observe]
        curvature = input_curvature(statistics.mean_hessian, sublayer.solvers.recipe)
        exact = sublayer.solvers.recipe.exact_router and not sublayer.quantized.issuperset(
            _inside(sublayer, group).values()
        )
        scale = choose_scale(solver, consumers, curvature, statistics, exact, group.heads)
        folding, scale = _fold(sublayer, group, scale, source, folding)
        scales[group.name] = scale
        inputs[group.observe] = linear_input(
            statistics, sublayer.solvers, scale, curvature, observed.drifts.get(group.observe)
        )
    _check_same(observed, run_probe(sublayer, FoldedTensors(sublayer, source, folding), states))
    for first in _to_round(observed):
        if first not in inputs:
            inputs[first] = linear_input(
                observed.inputs[first], sublayer.solvers, None, drift=observed.drifts.get(first)
            )
    return SublayerScales(sublayer, observed.sites, inputs, scales, folding)


def scale_in_effect(
    sublayer: Sublayer,
    group: ScaleGroup,
    source: ParameterReader,
    unquantized: Mapping[str, Tensor],
) -> Tensor:
    """The scale folded into the norm of `group`, from its gain as written, [K]."""
    name = f"{group.producer}.weight"
    row = next(row for row in sublayer.rows if row.name == name)
    before = source.gain(row)
    after = unquantized[name].float().to(before.device) + row.gain_offset
    return torch.where(after == 0, torch.ones_like(after), before / after)


def _inside(sublayer: Sublayer, group: ScaleGroup) -> dict[str, str]:
    """The consumers of a group in the sublayer, all but routed experts, by their tensors: `.weight`
    of a module, or a tensor without a module of its own."""
    needed = {row.module: row.name for row in sublayer.needed if not row.name.endswith(".bias")}
    return {needed[module]: module for module in group.consumers if module in needed}


def _consumers(
    sublayer: Sublayer, group: ScaleGroup, tensors: Mapping[str, Tensor]
) -> Iterator[Consumer]:
    """Some rows of every linear of the group that will be quantized."""
    count = sublayer.solvers.recipe.search_rows
    for name, module in _inside(sublayer, group).items():
        if module in sublayer.quantized:
            importance = sublayer.importance if module in sublayer.output_linears else None
            counted = None if importance is None else sample_rows(importance[:, None], count)[:, 0]
            yield Consumer(
                sample_rows(tensors[name], count),
                1.0,
                sublayer.solvers.of(module),
                counted,
            )


def _fold(
    sublayer: Sublayer, group: ScaleGroup, scale: Tensor, source: ParameterReader, folding: Folding
) -> tuple[Folding, Tensor]:
    """With the scale folded, and the scale as a stored gain allows it."""
    inside, gain = _inside(sublayer, group), None
    if group.producer_is_norm:
        name = f"{group.producer}.weight"
        row = next(row for row in sublayer.rows if row.name == name)
        gain, scale = effective_scale(
            source.dequantized(row).to(sublayer.stored[name]), scale, row.gain_offset
        )
    return folding.with_group(group, [*inside], scale, gain), scale


def _to_round(observed: SublayerStatistics) -> Iterator[str]:
    """Inputs of linears that will be quantized, without those that are observed again."""
    for first, modules in observed.sites.items():
        again = observed.drifts and observed.sublayer.output_linears.issuperset(modules)
        if not again and not observed.sublayer.quantized.isdisjoint(modules):
            yield first
    if observed.sublayer.experts_site is not None:
        yield observed.sublayer.experts_site


def _check_same(observed: SublayerStatistics, after: SublayerProbe) -> None:
    """Raise QuantkitError if folding changed the sublayer's output or routing."""
    before = observed.probe
    differences = {"output": relative_distance(after.output, before.output)}
    if before.routed is not None and after.routed is not None:
        experts = 1 + max(int(one.topk_ids.max()) for one in (before.routed, after.routed))
        differences["routing"] = relative_distance(
            after.routed.matrix(experts), before.routed.matrix(experts)
        )
    for what, difference in differences.items():
        if not difference <= TOLERANCE:
            raise QuantkitError(
                f"scaling changes the {what} of {observed.sublayer.name} by {difference:.1e} "
                "before anything is rounded",
                "the scale groups of this architecture are wrong: report it, or use a recipe "
                "without awq and smooth",
            )
