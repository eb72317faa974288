"""A sublayer's second value: the scale of every group, and the proof that folding them changes
nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from quantkit.calibrate.drift import Drift, taken
from quantkit.calibrate.hidden_states import HiddenStatePair, relative_distance
from quantkit.calibrate.linear_solver import input_curvature
from quantkit.calibrate.observe import Observed, Probe, probe
from quantkit.calibrate.parameter_reader import ParameterReader
from quantkit.calibrate.scale_search import Consumer, choose_scale, sample_rows
from quantkit.calibrate.solver_table import Solvers
from quantkit.calibrate.statistics import InputStatistics, token_counts
from quantkit.calibrate.sublayer import Sublayer
from quantkit.common.errors import QuantkitError
from quantkit.models.table import ScaleGroup
from quantkit.quant.awq import effective_scale
from quantkit.quant.gptq import Curvature
from quantkit.quant.tensor_cores import tensor_core_products

TOLERANCE = 1e-7
"""Squared relative difference that folding scales may make in float32."""


@dataclass(frozen=True)
class Folding:
    """What becomes of a sublayer's tensors, by name. columns: multiplied by [K]; then rows, and
    biases: divided by [N]; gains: replaced, as stored."""

    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    gains: dict[str, Tensor] = field(default_factory=dict)

    def changes(self, name: str) -> bool:
        return name in self.columns or name in self.rows or name in self.gains

    def into(self, name: str, tensor: Tensor) -> Tensor:
        """The float32 tensor `name` folded, in its own memory where it is a matrix."""
        if name in self.gains:
            return self.gains[name].float()
        if name in self.columns:
            tensor.mul_(self.columns[name])
        if name in self.rows:
            tensor.div_(self.rows[name].view(-1, *[1] * (tensor.dim() - 1)))
        return tensor

    def and_group(
        self, group: ScaleGroup, inside: Sequence[str], scale: Tensor, gain: Tensor | None
    ) -> "Folding":
        """With one more group's scale; inside: its consumers in this sublayer; gain: a norm's new
        one, where that is the producer."""
        producer = f"{group.producer}.weight"
        divided = [producer] * (gain is None) + [f"{group.producer}.bias"] * group.biased
        return Folding(
            self.columns | {f"{module}.weight": scale for module in inside},
            self.rows
            | dict.fromkeys(divided, scale if group.heads is None else group.heads.of_rows(scale)),
            self.gains if gain is None else self.gains | {producer: gain},
        )


class FoldedTensors(Mapping[str, Tensor]):
    """A sublayer's tensors with scales folded, float32, each read from the source when it is asked
    for: none is held here."""

    def __init__(self, sublayer: Sublayer, source: ParameterReader, folding: Folding) -> None:
        self.rows = {row.name: row for row in sublayer.needed}
        self.source, self.folding = source, folding

    def __getitem__(self, name: str) -> Tensor:
        return self.folding.into(name, self.source.dequantized(self.rows[name]))

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class ScaledInput:
    """What is known of an input after it was divided by scale [K], for whoever rounds its readers.
    sample: held-out rows [S, K].
    largest: the largest magnitude of calibration tokens, float32 []. drift: None where readers are
    to answer what they read."""

    curvature: Curvature
    sample: Tensor
    scale: Tensor
    largest: Tensor
    drift: Drift | None = None

    @cached_property
    def _answer(self) -> Tensor:
        """[K, K], by which a reader's weight changes."""
        assert self.drift is not None, "an input that was heard on both paths"
        return self.curvature.solved(self.drift.inputs)

    @tensor_core_products()
    def aimed(self, w: Tensor) -> Tensor:
        """What is rounded in place of a reader's weight w [N, K], in its memory."""
        if self.drift is None:
            return w
        change = w @ self._answer
        share = taken((self.drift.sample - self.sample) @ w.t(), self.sample @ change.t())
        return w.addcmul_(change, share)


@dataclass(frozen=True)
class Scaled:
    """A sublayer with its scales chosen and proven. inputs: by module, of what is to be rounded.
    scales: by group."""

    sublayer: Sublayer
    sites: dict[str, tuple[str, ...]]
    inputs: dict[str, ScaledInput]
    scales: dict[str, Tensor]
    folding: Folding

    @property
    def experts_input(self) -> ScaledInput | None:
        """What the routed experts read; None without experts."""
        site = self.sublayer.experts_site
        return None if site is None else self.inputs[site]


def scaled_input(
    statistics: InputStatistics,
    solvers: Solvers,
    scale: Tensor | None,
    curvature: Curvature | None = None,
    drift: Drift | None = None,
) -> ScaledInput:
    """curvature: of the input as it was observed, where it was made already; its memory is used.
    drift: of the input as it was observed."""
    curvature = (
        input_curvature(statistics.mean_hessian, solvers.recipe) if curvature is None else curvature
    )
    if scale is None:
        return ScaledInput(
            curvature,
            statistics.sample,
            torch.ones_like(statistics.absmax),
            statistics.absmax.amax(),
            drift,
        )
    drift = None if drift is None else drift.scaled(scale)
    return ScaledInput(
        curvature.into_scaled(scale),
        statistics.sample / scale,
        scale,
        (statistics.absmax / scale).amax(),
        drift,
    )


def scale_sublayer(
    observed: Observed,
    source: ParameterReader,
    states: HiddenStatePair,
    experts: Sequence[Consumer] = (),
) -> Scaled:
    """Choose the scale of every group. experts: rows of some routed experts, which count where a
    group reaches them.

    Raises QuantkitError where folding changes what the sublayer computes.
    """
    sublayer, folding = observed.sublayer, Folding()
    inputs: dict[str, ScaledInput] = {}
    scales: dict[str, Tensor] = {}
    for group in sublayer.groups:
        consumers = [*_consumers(sublayer, group, FoldedTensors(sublayer, source, folding))]
        consumers += experts if group.reaches_experts else ()
        if (
            not consumers
            or not {"awq", "smooth"} & set(sublayer.solvers.methods)
            or sublayer.is_frozen(group)
        ):
            continue
        solver = consumers[0].solver
        if group.heads is not None and solver.activation_bits != 8:
            continue  # nobody measured what it does to other schemes
        statistics = observed.inputs[group.observe]
        if solver.activation_bits == 8:
            statistics = replace(
                statistics,
                rows=_counted_rows(observed, group, FoldedTensors(sublayer, source, folding)),
            )
        curvature = input_curvature(statistics.mean_hessian, sublayer.solvers.recipe)
        exact = sublayer.solvers.recipe.exact_router and not sublayer.quantized.issuperset(
            _inside(sublayer, group)
        )
        scale = choose_scale(solver, consumers, curvature, statistics, exact, group.heads)
        folding, scale = _fold(sublayer, group, scale, source, folding)
        scales[group.name] = scale
        inputs[group.observe] = scaled_input(
            statistics, sublayer.solvers, scale, curvature, observed.drifts.get(group.observe)
        )
    _check_same(observed, probe(sublayer, FoldedTensors(sublayer, source, folding), states))
    for first in _to_round(observed):
        if first not in inputs:
            inputs[first] = scaled_input(
                observed.inputs[first], sublayer.solvers, None, drift=observed.drifts.get(first)
            )
    return Scaled(sublayer, observed.sites, inputs, scales, folding)


def _counted_rows(observed: Observed, group: ScaleGroup, tensors: Mapping[str, Tensor]) -> Tensor:
    """The rows of a group's input, of one that is read by who writes to the residual stream each
    times what an error there counts: by the stream with what that reader adds, as the largest
    streams are made so."""
    rows = observed.inputs[group.observe].rows
    writers = sorted(observed.sublayer.ends.intersection(group.consumers))
    if not writers:
        return rows
    assert len(rows) == len(observed.stream), (
        f"{group.observe} reads other tokens than the sublayer"
    )
    added = (rows @ tensors[f"{module}.weight"].t() for module in writers)
    return rows * token_counts(sum(added, observed.stream))


def scale_in_effect(
    sublayer: Sublayer, group: ScaleGroup, source: ParameterReader, plain: Mapping[str, Tensor]
) -> Tensor:
    """The scale that was folded into the norm of `group`, from its gain as it is written, [K]."""
    name = f"{group.producer}.weight"
    row = next(row for row in sublayer.rows if row.name == name)
    before = source.gain(row)
    after = plain[name].float().to(before.device) + row.gain_offset
    return torch.where(after == 0, torch.ones_like(after), before / after)


def _inside(sublayer: Sublayer, group: ScaleGroup) -> list[str]:
    """The consumers of a group that are in the sublayer: all but routed experts."""
    needed = {row.name for row in sublayer.needed}
    return [module for module in group.consumers if f"{module}.weight" in needed]


def _consumers(
    sublayer: Sublayer, group: ScaleGroup, tensors: Mapping[str, Tensor]
) -> Iterator[Consumer]:
    """Some rows of every linear of the group that is to be rounded."""
    count = sublayer.solvers.recipe.search_rows
    for module in _inside(sublayer, group):
        if module in sublayer.quantized:
            importance = sublayer.importance if module in sublayer.ends else None
            counted = None if importance is None else sample_rows(importance[:, None], count)[:, 0]
            yield Consumer(
                sample_rows(tensors[f"{module}.weight"], count),
                1.0,
                sublayer.solvers.of(module),
                counted,
            )


def _fold(
    sublayer: Sublayer, group: ScaleGroup, scale: Tensor, source: ParameterReader, folding: Folding
) -> tuple[Folding, Tensor]:
    """With the scale folded, and the scale as a stored gain lets it be."""
    inside, gain = _inside(sublayer, group), None
    if group.producer_is_norm:
        name = f"{group.producer}.weight"
        row = next(row for row in sublayer.rows if row.name == name)
        gain, scale = effective_scale(
            source.dequantized(row).to(sublayer.stored[name]), scale, row.gain_offset
        )
    return folding.and_group(group, inside, scale, gain), scale


def _to_round(observed: Observed) -> Iterator[str]:
    """Inputs that somebody reads whose weight is to be rounded."""
    for first, modules in observed.sites.items():
        if not observed.sublayer.quantized.isdisjoint(modules):
            yield first
    if observed.sublayer.experts_site is not None:
        yield observed.sublayer.experts_site


def _check_same(observed: Observed, after: Probe) -> None:
    """Stop the run if folding changed what the sublayer computes, or which experts it asks."""
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
