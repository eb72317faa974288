"""Predicted KL of quantizing each linear, measured before quantization by one pass over the
original weights.

Within a sublayer, every group of linears that must share a grid is rounded to nearest on each
candidate grid, the sublayer is run, and the error in the residual stream, or in each of several, is
weighted by its cost (output_cost.py). What a layer computes from the sum of its experts' outputs
is computed for every error. That cost has no common unit across layers, so each sublayer is also measured: a
second path leaves the original one with all of the sublayer rounded, runs through the original
weights to the head, and its KL there gives the value of a unit of the sublayer's cost. Costs of
groups add up: errors are small and have no common sign.

Of a layer's routed experts only some are rounded, and their cost is scaled by the squared routing
weights of all.

Memory: the hidden states of all paths, together no more tokens than a calibrated run holds; of one
sublayer its weights; one expert. Nothing depends on the number of experts. The paths are saved
after each layer, so a stopped pass resumes there.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from quantkit.calibrate.embed_and_head import EmbedAndHead, TableEmbedAndHead
from quantkit.calibrate.expert_layer import expert_weights
from quantkit.calibrate.experts import ExpertWeights
from quantkit.calibrate.hidden_states import (
    BATCH_TOKENS,
    HiddenStates,
    RoutedTokens,
    RoutingRecorder,
    no_experts,
)
from quantkit.calibrate.linear_solver import LinearSolver, SolverTable
from quantkit.calibrate.output_cost import BLOCK_ROWS, ResidualStream, compare_paths
from quantkit.calibrate.source_model import SourceModel, attend_unit, feed_forward_unit
from quantkit.calibrate.sublayer import (
    NO_ACTIVATION_QUANTS,
    AfterExperts,
    LayerWeights,
    Sublayer,
    run_attention,
    run_feed_forward,
    run_without_post_moe,
    sublayer_of,
)
from quantkit.checkpoint.header import save_tensors
from quantkit.common.progress import OnEvent, Progress, peak_memory
from quantkit.grids.base import Grid, grid_label, round_to_nearest
from quantkit.models.activation_quant import ActivationQuant
from quantkit.models.table import GatedMlp, Parameter
from quantkit.models.weights import ExpertsOp


@dataclass(frozen=True)
class LinearGroup:
    """Linears that must share a grid, because engines run them as one operator: fused siblings, and
    all routed experts of a layer. name: of the fused module, of the only linear, or
    layers.N.experts."""

    name: str
    rows: tuple[Parameter, ...]

    @property
    def layer(self) -> int | None:
        return self.rows[0].layer

    @property
    def of_experts(self) -> bool:
        return self.rows[0].expert is not None

    @cached_property
    def modules(self) -> tuple[str, ...]:
        return tuple(row.module for row in self.rows)


def linear_groups(rows: Iterable[Parameter]) -> list[LinearGroup]:
    """rows: linears that may be quantized, in the order of the table."""
    found: dict[str, list[Parameter]] = {}
    for row in rows:
        name = f"layers.{row.layer}.experts" if row.expert is not None else row.fused or row.module
        found.setdefault(name, []).append(row)
    return [LinearGroup(name, tuple(own)) for name, own in found.items()]


MOST_TOKENS = 2**15
"""Of all paths together: a second path leaves each sublayer, and R1 has 122 sublayers."""
PATH_TOKENS = (32, 2048)
"""The fewest and the most tokens of one path."""
SENSED_EXPERTS = 16
"""Routed experts of a layer that are measured."""
JUDGED_PATHS = 16
"""Paths whose logits are held together, a block of the head at a time."""


@dataclass(frozen=True)
class Sensitivities:
    """kl: nats a token, by group of linears and grid label. asked: by layer, the number of tokens
    routed to each expert. tokens: of a path."""

    kl: dict[str, dict[str, float]]
    asked: dict[str, list[int]]
    tokens: int


@dataclass
class PassState:
    """The paths of a pass, in a file that is replaced atomically. key: identifies the pass; total:
    bytes of the source."""

    path: Path
    key: str
    total: int
    on_event: OnEvent

    def save(self, layer: int, hidden: Tensor, facts: dict[str, object]) -> None:
        """hidden float32 [paths, T, H] at the input of `layer`, and the results so far, replacing
        those saved before."""
        metadata = {"key": self.key, "layer": str(layer), "facts": json.dumps(facts)}
        save_tensors(self.path, {"hidden": hidden.cpu().contiguous()}, metadata)

    def load(self) -> tuple[int, Tensor, dict[str, object]] | None:
        if not self.path.exists():
            return None
        with safe_open(self.path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("key") != self.key:
                return None
            return int(metadata["layer"]), file.get_tensor("hidden"), json.loads(metadata["facts"])

    def report(self, unit: str, share: float) -> None:
        self.on_event(Progress("measuring", unit, 0, self.total, 0.0, peak_memory(), 0.0))


@dataclass
class _Found:
    """costs: by group of linears and grid label; probed: by unit, the cost of its path's error;
    units: of each group."""

    costs: dict[str, dict[str, float]]
    probed: dict[str, float]
    units: dict[str, str]
    asked: dict[str, list[int]]


def pieces(sequences: Sequence[Tensor], layers: int, most: int) -> list[Tensor]:
    """The beginning of the calibration text for one path, in whole sequences or the beginning of
    one. most: tokens of all paths."""
    least, largest = PATH_TOKENS
    left = max(least, min(min(MOST_TOKENS, most) // (2 * layers + 1), largest))
    taken = []
    for sequence in sequences:
        if left < 2:
            break
        taken.append(sequence[:left])
        left -= len(taken[-1])
    return taken


class SensitivityPass:
    """solvers: on the grids that the paths round to, and others. choices: groups of linears in
    decoder layers, with their candidate grids. embed_and_head: if the table does not define
    them."""

    def __init__(
        self,
        model: SourceModel,
        solvers: SolverTable,
        choices: Mapping[LinearGroup, Sequence[Grid]],
        store: PassState,
        embed_and_head: EmbedAndHead | None = None,
    ) -> None:
        self.embed_and_head = embed_and_head or TableEmbedAndHead(
            model.weights, model.rows, model.config
        )
        self.model, self.solvers, self.store = model, solvers, store
        self.by_module = {
            choice.rows[0].module: (choice, tuple(grids)) for choice, grids in choices.items()
        }
        groups = [group for layer in model.layers for group in model.groups[layer]]
        self.residual = ResidualStream(model.weights, model.rows, groups, self.embed_and_head)

    @torch.inference_mode()
    def run(self, sequences: Sequence[Tensor]) -> Sensitivities:
        """sequences: those of one path."""
        lengths, layers = [len(one) for one in sequences], self.model.layers
        saved = self.store.load()
        if saved is None:
            first, hidden, found = (
                layers[0],
                self.embed_and_head.embed(sequences).to(self.model.weights.device)[None],
                _Found({}, {}, {}, {}),
            )
        else:
            first, hidden, facts = saved[0], saved[1].to(self.model.weights.device), saved[2]
            found = _Found(**facts)  # type: ignore[arg-type]
        for layer in layers:
            if layer < first:
                continue
            for unit, run in (
                (attend_unit(layer), run_attention),
                (feed_forward_unit(layer), run_feed_forward),
            ):
                if unit not in self.model.units:  # of a layer that is run whole
                    continue
                self.store.report(unit, layers.index(layer) / len(layers))
                hidden = self._sublayer(
                    sublayer_of(self.model, self.solvers, unit, layer, run),
                    layer,
                    hidden,
                    lengths,
                    found,
                )
            if layer + 1 in layers:
                self.store.save(layer + 1, hidden, dict(vars(found)))
        return self._measured(hidden, found)

    def _sublayer(
        self, sublayer: Sublayer, layer: int, hidden: Tensor, lengths: list[int], found: _Found
    ) -> Tensor:
        """All paths [P, T, W] through the original sublayer, followed by the one that leaves the
        original path here."""
        weights, tokens = self.model.weights, hidden.shape[1]
        tensors = weights.dequantized_all(sublayer.needed)
        cost = self._cost(sublayer, hidden[0])
        before, end = hidden.flatten(0, 1), None
        if sublayer.name == feed_forward_unit(layer):
            end = AfterExperts.of(self.model, layer)
        if end is not None:
            sublayer, before = replace(sublayer, run=run_without_post_moe), end.padded(before)
        recorder = RoutingRecorder(len(before))
        after = _run(sublayer, tensors, before, lengths * len(hidden), recorder)
        routed, without_experts = recorder.routed(tokens, tokens), after[:tokens].clone()
        choice, errors, share = (
            (None, {}, 0.0) if routed is None else self._experts(layer, routed, after, found)
        )
        count = self.model.config.stream_count
        own = _OriginalPath(before[:tokens], after[:tokens], lengths, end, cost, count)
        error = self._linears(sublayer, tensors, without_experts, own, found)
        if choice is not None:
            found.costs[choice.name] = {
                grid_label(grid): share * own.cost_of(one) for grid, one in errors.items()
            }
            found.units[choice.name] = sublayer.name
            if (grid := self.solvers.grid_of(choice.modules[0])) in errors:
                error += errors[grid]
        found.probed[sublayer.name] = own.cost_of(error)
        every = torch.cat((after, own.partial + error))
        if end is not None:
            kept = torch.cat((before, own.before))[:, : end.width]
            states = HiddenStates(every, 0, lengths * (len(hidden) + 1), BATCH_TOKENS)
            end.finish_(states, kept)
            every = states.hidden
        return every.view(len(hidden) + 1, tokens, -1)

    def _cost(self, sublayer: Sublayer, hidden: Tensor) -> Tensor:
        """[H, H] of an error in what the sublayer puts out; the same in all channels of a model
        that does not end with a norm."""
        config = self.model.config
        if self.residual.norm is None:
            return torch.eye(config.hidden_size, device=hidden.device)
        next_token = self.residual.next_token_cost(hidden, config.rms_norm_eps)
        return self.residual.cost(self.model.units[sublayer.name], next_token)

    def _linears(
        self,
        sublayer: Sublayer,
        tensors: dict[str, Tensor],
        exact: Tensor,
        own: "_OriginalPath",
        found: _Found,
    ) -> Tensor:
        """Measure every group of linears except routed experts; returns the error of all of them
        rounded together, [T, W]. exact [T, W]: the original path without routed experts."""
        together: dict[str, Tensor] = {}
        rounding: dict[str, ActivationQuant] = {}
        for row in sublayer.rows:
            choice, grids = self.by_module.get(row.module, (None, ()))
            if choice is None or choice.of_experts:
                continue
            for grid in grids:
                solver, modules = self.solvers.on(grid), frozenset(choice.modules)
                fused = {one.module: one.fused for one in choice.rows if one.fused}
                solved = solver.solve_rtn(
                    {one.module: tensors[one.name] for one in choice.rows}, fused
                )
                values = {f"{module}.weight": one.values for module, one in solved.items()}
                reads = dict.fromkeys(modules, solver.activation_quant())
                after = _run(sublayer, tensors | values, own.before, own.lengths, no_experts, reads)
                found.costs.setdefault(choice.name, {})[grid_label(grid)] = own.cost_of(
                    after - exact
                )
                found.units[choice.name] = sublayer.name
                if grid == self.solvers.grid_of(choice.modules[0]):
                    together |= values
                    rounding |= reads
        if not together:
            return torch.zeros_like(exact)
        after = _run(sublayer, tensors | together, own.before, own.lengths, no_experts, rounding)
        return after - exact

    def _experts(
        self, layer: int, routed: RoutedTokens, after: Tensor, found: _Found
    ) -> tuple[LinearGroup | None, dict[Grid, Tensor], float]:
        """Add the outputs of the original routed experts to all paths `after` [P * T, W]. Returns
        their group, the error [T, W] of the measured ones rounded to each grid, and the factor of
        its cost for that of all."""
        experts, count = self.model.experts(layer), routed.fitted
        first = next(iter(experts.values()))
        choice, grids = self.by_module.get(first.gate.module, (None, ()))
        found.asked[str(layer)] = routed.counts(len(experts)).tolist()
        sensed = set(list(experts)[:: max(1, len(experts) // SENSED_EXPERTS)]) if choice else set()
        outputs = after[:, : first.down.shape[0]]
        errors = {grid: torch.zeros_like(after[:count]) for grid in grids}
        asked = {True: 0.0, False: 0.0}
        for number, rows in experts.items():
            own = expert_weights(
                self.model,
                rows,
                {row.module: self.model.weights.dequantized(row) for row in rows.rows},
            )
            tokens, w = routed.of(number)
            exact = own(routed.x[tokens]).mul_(w[:, None])
            outputs.index_add_(0, tokens, exact)
            base = int((tokens < count).sum())
            tokens, w = tokens[:base], w[:base]
            asked[number in sensed] += float(w.square().sum())
            for grid in grids if number in sensed and base else ():
                rounded = self._rounded(rows, own, grid, routed.x[tokens]).mul_(w[:, None])
                errors[grid][:, : exact.shape[1]].index_add_(0, tokens, rounded - exact[:base])
        return choice, errors, sum(asked.values()) / asked[True] if asked[True] else 0.0

    def _rounded(self, rows: GatedMlp, own: ExpertWeights, grid: Grid, x: Tensor) -> Tensor:
        """Output of an expert rounded to nearest, for x [n, H]."""
        solver = self.solvers.on(grid)
        fused = {row.module: row.fused for row in rows.rows if row.fused}
        solved = solver.solve_rtn(dict(zip(rows.modules, (own.gate, own.up, own.down))), fused)
        gate, up, down = (solved[module].values for module in rows.modules)
        return replace(
            own, gate=gate, up=up, down=down, activation_quants=solver.activation_quants()
        )(x)

    def _measured(self, hidden: Tensor, found: _Found) -> Sensitivities:
        """KL of every path at the head, divided among the groups of the sublayer where it left."""
        head = self.residual.head
        self.store.report(head.module, 1.0)
        original, kls = self.embed_and_head.final_norm(hidden[0]), list[float]()
        for start in range(1, len(hidden), JUDGED_PATHS):
            paths = [
                self.embed_and_head.final_norm(one) for one in hidden[start : start + JUDGED_PATHS]
            ]
            kls += [
                one.kl
                for one in compare_paths(
                    original,
                    paths,
                    self.model.weights.blocks(head, BLOCK_ROWS),
                    self.embed_and_head.logits,
                )
            ]
        worth = {
            unit: max(kl, 0.0) / probed if probed else 0.0
            for (unit, probed), kl in zip(found.probed.items(), kls, strict=True)
        }
        kl = {
            name: {label: cost * worth[found.units[name]] for label, cost in costs.items()}
            for name, costs in found.costs.items()
        }
        choice, grids = self.by_module.get(head.module, (None, ()))
        if choice is not None:
            kl[choice.name] = self._of_head(original, grids)
        return Sensitivities(kl, found.asked, len(original))

    def _of_head(self, original: Tensor, grids: Sequence[Grid]) -> dict[str, float]:
        """KL of the head rounded to nearest on each grid, by label; original [T, H]: what it
        reads."""
        weights, head = self.model.weights, self.residual.head
        solvers = [self.solvers.on(grid) for grid in grids]
        largest = [rows.abs().amax() for rows in weights.blocks(head, BLOCK_ROWS)]

        def rounded(solver: LinearSolver) -> Iterator[Tensor]:
            quantizer = solver.quantizer(torch.stack(largest).amax())
            for rows in weights.blocks(head, BLOCK_ROWS):
                yield round_to_nearest(rows, quantizer)[0]

        found = compare_paths(
            original,
            [solver.activation_quant()(original) for solver in solvers],
            weights.blocks(head, BLOCK_ROWS),
            self.embed_and_head.logits,
            [rounded(solver) for solver in solvers],
        )
        return {grid_label(grid): max(one.kl, 0.0) for grid, one in zip(grids, found)}


def _run(
    sublayer: Sublayer,
    tensors: Mapping[str, Tensor],
    hidden: Tensor,
    lengths: list[int],
    experts: ExpertsOp = no_experts,
    activation_quants: Mapping[str, ActivationQuant] = NO_ACTIVATION_QUANTS,
) -> Tensor:
    """hidden [T, H] after a sublayer with these tensors."""
    block, after = (
        sublayer.build(LayerWeights(tensors, experts, activation_quants=activation_quants)),
        torch.empty_like(hidden),
    )
    for batch in HiddenStates(hidden, 0, lengths, BATCH_TOKENS).batches():
        after[batch.part] = sublayer.run(block, hidden[batch.part], batch.lengths)
    return after


@dataclass(frozen=True)
class _OriginalPath:
    """Around one sublayer. before [T, W]; partial [T, W]: after it, but for what `end` computes
    from the experts' sum; cost [H, H]: of an error in each of the `count` residual streams."""

    before: Tensor
    partial: Tensor
    lengths: list[int]
    end: AfterExperts | None
    cost: Tensor
    count: int

    def cost_of(self, error: Tensor) -> float:
        """Mean over tokens of e^T C e, summed over the streams, for an error [T, W] of
        `partial`."""
        if self.end is not None:
            error = self._finished(self.partial + error) - self.exact
        size = len(self.cost)
        streams = error[:, : self.count * size].unflatten(-1, (self.count, size))
        return float((streams @ self.cost).mul_(streams).sum((-2, -1)).mean())

    @cached_property
    def exact(self) -> Tensor:
        """The original path after the sublayer, [T, W]."""
        return self._finished(self.partial.clone())

    def _finished(self, partial: Tensor) -> Tensor:
        assert self.end is not None
        states = HiddenStates(partial, 0, self.lengths, BATCH_TOKENS)
        self.end.finish_(states, self.before[:, : self.end.width])
        return states.hidden
