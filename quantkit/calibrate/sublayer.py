"""One half of a decoder layer, attention or feed-forward: observe, scale, solve, propagate.

The half is run by the model's own forward over three sets of tensors: the original ones; the same with scales folded and nothing
rounded, which must compute the same; and the rounded ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate.experts import Recorder, no_experts
from quantkit.calibrate.hidden_states import HiddenStatePair, HiddenStates, relative_distance
from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.scale_search import Consumer, choose_scale, sample_rows
from quantkit.calibrate.solver import Solved, Solver
from quantkit.calibrate.statistics import InputStatistics, Observations
from quantkit.errors import QuantkitError
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.quant.awq import effective_scale
from quantkit.quant.gptq import Curvature
from quantkit.quant.weights import Weight, dequantize

HELD_OUT_ROWS = 128
"""Held-out rows kept at each linear's input."""
CHECKED_TOKENS = 64
TOLERANCE = 1e-7
"""Squared relative difference that folding scales may make in float32."""

Build = Callable[[LayerWeights], Any]
"""Weights -> the model's decoder layer."""
Run = Callable[[Any, Tensor, list[int]], Tensor]
"""(decoder layer, hidden [T, H], lengths of its sequences) -> hidden [T, H] after this half."""


@dataclass(frozen=True)
class SublayerSpec:
    """What a half is made of.

    rows: its parameters but the routed experts'. groups: the scale groups inside it, those inside one routed expert left out.
    stored: dtype on disk of what stays unquantized, by tensor name. quantized: modules the output holds quantized.
    importance: what a squared error in each channel of the residual stream counts after this half, float32 [H]; None: alike.
    outputs: what an error there costs, [H, H], where GPTQ is to heed it.
    """

    name: str
    build: Build
    run: Run
    rows: list[Parameter]
    groups: list[ScaleGroup]
    stored: dict[str, torch.dtype]
    quantized: set[str]
    importance: Tensor | None
    outputs: Curvature | None


class Sublayer:
    """tensors: float32, all that `build` and this half's forward ask for."""

    def __init__(self, spec: SublayerSpec, tensors: dict[str, Tensor], solver: Solver, streams: HiddenStatePair) -> None:
        self.spec, self.solver, self.streams = spec, solver, streams
        self.original = tensors
        self.folded = dict(tensors)
        """Folded in place once the original path has been propagated: the matrices are held once."""
        self.rounded: dict[str, Tensor] = {}
        self.plain: dict[str, Tensor] = {}
        """Unquantized tensors that folding changed, in their stored dtype."""
        self.scales: dict[str, Tensor] = {}
        """Scale in effect at an input, by the module it is observed at."""
        self.group_scales: dict[str, Tensor] = {}
        self.sites: dict[str, tuple[str, ...]] = {}
        self.observations = Observations(HELD_OUT_ROWS)
        self.recorder = Recorder(len(streams.quantized.hidden) + len(streams.original.hidden))
        self._curvatures: dict[str, Curvature] = {}
        self._before: tuple[Tensor, Recorder] | None = None

    # --- observe ---------------------------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Run the original weights; keep statistics of every linear's input, what the routed experts are asked, and a few outputs."""
        weights = LayerWeights(self.original, self.recorder, self.observations, unread=self._ends)
        block = self.spec.build(weights)
        own = {row.module for row in self.spec.rows}
        self.sites = {first: modules for first, modules in weights.sites.items() if first in own}
        for one in self.streams.quantized.batches():
            self.observations.held_out = one.held_out
            self.spec.run(block, self.streams.quantized.hidden[one.part], one.lengths)
        if self.recorder.asked:
            block = self.spec.build(LayerWeights(self.original, self.recorder, unread=frozenset(row.module for row in self.spec.rows)))
            for one in self.streams.original.batches():
                self.spec.run(block, self.streams.original.hidden[one.part], one.lengths)
        self._before = self._probe(self.original)

    def statistics(self, module: str) -> InputStatistics:
        """Of the input of `module`. A router is no linear and is not observed: its input is what the experts were asked."""
        if module not in self.observations.by_module:
            stream = self.streams.quantized
            x = self.recorder.routed(stream.fitted, len(stream.hidden)).x
            for one in stream.batches():
                self.observations.held_out = one.held_out
                self.observations(module, x[one.part])
        return self.observations.by_module[module]

    def curvature(self, module: str) -> Curvature:
        if module not in self._curvatures:
            self._curvatures[module] = self.solver.curvature(self.statistics(module).mean_hessian)
        return self._curvatures[module]

    # --- scale -----------------------------------------------------------------------------------------------------------

    def fold(self, more: dict[str, list[Consumer]]) -> None:
        """Choose and fold the scale of every group. more: consumers outside this half's rows (routed experts), by group."""
        assert all(tensor.dim() == 1 for tensor in self.original.values()), "matrices are folded in place"
        for group in self.spec.groups:
            inside = [module for module in group.consumers if f"{module}.weight" in self.folded]
            rounded = [module for module in inside if module in self.spec.quantized]
            count = self.solver.recipe.search_rows
            consumers = [
                Consumer(sample_rows(self.folded[f"{m}.weight"], count), 1.0, self.solver, self._importance(m, count)) for m in rounded
            ]
            consumers += more.get(group.name, [])
            if not consumers or not {"awq", "smooth"} & set(self.solver.methods):
                continue
            statistics = self.statistics(group.observe)
            exact = self.solver.recipe.exact_router and len(rounded) < len(inside)
            scale = choose_scale(
                self.solver,
                consumers,
                self.curvature(group.observe),
                statistics.mean_hessian,
                statistics.absmax,
                statistics.sample,
                exact,
            )
            if group.observe not in self._asked_again:
                statistics.release()
            self._apply(group, inside, scale)

    @property
    def _ends(self) -> frozenset[str]:
        """Modules that write to the residual stream: nobody in this half looks at their outputs."""
        return frozenset(row.module for row in self.spec.rows if row.split == "row")

    def _importance(self, module: str, count: int) -> Tensor | None:
        """Of the rows that `sample_rows` takes of a module."""
        if self.spec.importance is None or module not in self._ends:
            return None
        return sample_rows(self.spec.importance[:, None], count)[:, 0]

    def _apply(self, group: ScaleGroup, inside: list[str], scale: Tensor) -> None:
        producer = f"{group.producer}.weight"
        if group.producer_is_norm:
            gain, scale = effective_scale(self.folded[producer].to(self.spec.stored[producer]), scale)
            self.folded[producer], self.plain[producer] = gain.float(), gain
        else:
            self.folded[producer].div_(scale[:, None])
        for module in inside:
            name = f"{module}.weight"
            self.folded[name].mul_(scale)
            if module not in self.spec.quantized:
                self.plain[name] = self.folded[name].to(self.spec.stored[name])
        self.scales[group.observe] = self.group_scales[group.name] = scale

    def _probe(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Recorder]:
        """What this half adds to the first tokens' hidden states, and what it asks of the experts."""
        stream = self.streams.quantized
        count = min(CHECKED_TOKENS, stream.lengths[0])
        recorder = Recorder(count)
        hidden = stream.hidden[:count]
        return self.spec.run(self.spec.build(LayerWeights(tensors, recorder)), hidden, [count]) - hidden, recorder

    def check_same(self) -> None:
        """Stop the run if folding changed what this half computes, or which experts it asks."""
        assert self._before is not None, "not observed"
        (before_output, before), (after_output, after) = self._before, self._probe(self.folded)
        differences = {"output": relative_distance(after_output, before_output)}
        if before.asked:
            routed = [recorder.routed(recorder.asked, recorder.asked) for recorder in (after, before)]
            experts = max(int(one.topk_ids.max()) for one in routed) + 1
            differences["routing"] = relative_distance(*(one.dense(experts) for one in routed))
        for what, difference in differences.items():
            if not difference <= TOLERANCE:
                raise QuantkitError(
                    f"scaling changes the {what} of {self.spec.name} by {difference:.1e} before anything is rounded",
                    "the scale groups of this architecture are wrong: report it, or use a recipe without awq and smooth",
                )

    # --- solve -----------------------------------------------------------------------------------------------------------

    def solve(self) -> dict[str, Solved]:
        """Every linear of this half that the output holds quantized. Rounded weights are kept for `propagate`."""
        fused = {row.module: row.fused for row in self.spec.rows if row.fused}
        solved: dict[str, Solved] = {}
        # The widest input first, so that its Hessian is gone when the others are solved.
        for first, modules in sorted(self.sites.items(), key=lambda site: -self.folded[f"{site[0]}.weight"].shape[1]):
            weights = {module: self.folded[f"{module}.weight"] for module in modules if module in self.spec.quantized}
            if not weights:
                continue
            curvature, sample = self.curvature(first), self.statistics(first).sample
            del self._curvatures[first]
            if first not in self._asked_again:
                self.statistics(first).release()
            if first in self.scales:
                curvature, sample = curvature.into_scaled(self.scales[first]), sample / self.scales[first]
            outputs = self.spec.outputs if self._ends.issuperset(weights) else None
            solved |= self.solver.solve_stack(weights, fused, curvature, sample, outputs)
            for module in weights:
                self.folded[f"{module}.weight"] = solved[module].values
        self._keep({}, self.plain)
        return solved

    @property
    def _asked_again(self) -> set[str]:
        """Where routed experts read: their curvature is asked for when this half is solved."""
        return {g.observe for g in self.spec.groups if any(".experts." in module for module in g.consumers)}

    def load(self, quantized: dict[str, Weight], plain: dict[str, Tensor]) -> None:
        """What an earlier run solved, in place of `fold` and `solve`."""
        self._keep(quantized, plain)

    def scale_of(self, module: str) -> Tensor:
        """The scale in effect at the input of `module`: original gain over the gain as it is now; ones without a scale."""
        for group in self.spec.groups:
            if group.observe == module and group.producer_is_norm:
                before, after = (tensors[f"{group.producer}.weight"] for tensors in (self.original, self.rounded))
                return torch.where(after == 0, torch.ones_like(after), before / after)
        return torch.ones(len(self.statistics(module).absmax), device=self.streams.quantized.hidden.device)

    def _keep(self, quantized: dict[str, Weight], plain: dict[str, Tensor]) -> None:
        for name, tensor in self.folded.items():
            dtype = self.spec.stored.get(name)
            self.rounded[name] = tensor if dtype is None else tensor.to(dtype).float()
        device = self.streams.quantized.hidden.device
        for module, weight in quantized.items():
            self.rounded[f"{module}.weight"] = dequantize(weight)
        self.rounded |= {name: tensor.float().to(device) for name, tensor in plain.items()}

    # --- propagate -------------------------------------------------------------------------------------------------------

    def propagate_original(self) -> None:
        """Replace the hidden states of the original path, which nothing else asks for the original matrices after."""
        self._advance(self.original, self.streams.original)
        self.original = {name: tensor for name, tensor in self.original.items() if tensor.dim() == 1}

    def propagate(self) -> None:
        """Replace the hidden states of the quantized path. Routed experts add their outputs to them, of both paths, afterwards."""
        self._advance(self.rounded, self.streams.quantized)

    def _advance(self, tensors: dict[str, Tensor], stream: HiddenStates) -> None:
        block = self.spec.build(LayerWeights(tensors, no_experts))
        for one in stream.batches():
            stream.hidden[one.part] = self.spec.run(block, stream.hidden[one.part], one.lengths)
