"""One layer's routed experts in a run, and the two references on the same tokens as the quantized
path: the source's weights, and round-to-nearest.

Experts are read in batches, quantized or found finished, written, and run on every path.

The unquantized run of the calibration tokens gives the inputs that linears should have had. The
round-to-nearest (RTN) run of the held-out tokens shows what calibration gains: same grid and
layers, scales from each group's extremes, NVFP4 input divisors from the largest value, and int8
cache scales that clip nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from quantkit_kernels import ExpertBiases
from torch import Tensor

from quantkit.calibrate.cache_scales import QuantizedCache
from quantkit.calibrate.experts import ExpertSolver, ExpertWeights, add_weighted, quantized_outputs
from quantkit.calibrate.hidden_states import (
    Batches,
    HiddenStatePair,
    HiddenStates,
    RoutedTokens,
    RoutingRecorder,
    no_experts,
)
from quantkit.calibrate.input_sums import token_weights
from quantkit.calibrate.linear_solver import LinearSolver, SolverTable
from quantkit.calibrate.output import ProgressLog
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.scales import Consumer, LinearInput, sample_rows
from quantkit.calibrate.source_model import ParameterReader, SourceModel, expert_unit
from quantkit.calibrate.sublayer import NO_ACTIVATION_QUANTS, LayerWeights, Sublayer, advance
from quantkit.grids.base import Weight, dequantize
from quantkit.models.table import GatedMlp, Parameter
from quantkit.quant.tensor_cores import sample_products


@dataclass
class ReferenceRun:
    """states: of the calibration tokens at the input of the next sublayer, in the quantized path's
    order. routed: routing in the last sublayer; None without experts."""

    states: HiddenStates
    routed: RoutedTokens | None = None

    def advance(self, sublayer: Sublayer, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
        """Through this sublayer with the source's tensors. Routed experts add their outputs
        afterwards."""
        recorder = RoutingRecorder(len(self.states.hidden))
        advance(
            sublayer,
            tensors,
            self.states,
            NO_ACTIVATION_QUANTS,
            ranks,
            no_experts if sublayer.experts is None else recorder,
        )
        self.routed = recorder.routed(len(self.states.hidden), len(self.states.hidden))

    @sample_products()
    def expert_outputs(self, number: int, original: ExpertWeights) -> Tensor:
        """One expert's outputs [n, H], unweighted, for the tokens routed to it."""
        assert self.routed is not None, "a sublayer with routed experts"
        tokens = self.routed.of(number)[0]
        return original(self.routed.x[tokens], len(tokens))


@dataclass
class RtnRun:
    """states: of the held-out tokens at the input of the next sublayer. solvers: only their grids
    are used. cache: of a scheme with an 8-bit cache. routed: routing in the last sublayer; None
    without experts."""

    states: HiddenStates
    source: ParameterReader
    solvers: SolverTable
    cache: QuantizedCache | None = None
    routed: RoutedTokens | None = None

    def advance(self, sublayer: Sublayer, ranks: Ranks) -> None:
        """Through this sublayer. Routed experts add their outputs afterwards."""
        recorder = RoutingRecorder(len(self.states.hidden))
        tensors = self._rounded(sublayer)
        activation_quants = self.solvers.activation_quants(
            [row.module for row in sublayer.rows if row.module in sublayer.quantized]
        )
        if self.cache is not None and self.cache.covers(sublayer):
            block = sublayer.build(
                LayerWeights(tensors, no_experts, activation_quants=activation_quants)
            )
            sublayer = replace(
                sublayer, run=self.cache.run_uncalibrated(sublayer, block, self.states)
            )
        advance(
            sublayer,
            tensors,
            self.states,
            activation_quants,
            ranks,
            no_experts if sublayer.experts is None else recorder,
        )
        self.routed = recorder.routed(0, 0)

    def expert_outputs(
        self, number: int, rows: GatedMlp, original: ExpertWeights, solver: LinearSolver | None
    ) -> Tensor:
        """One expert's outputs [n, H], unweighted, for the tokens routed to it. solver: on the
        experts' grid; None if they are not quantized."""
        assert self.routed is not None, "a sublayer with routed experts"
        rounded, (tokens, _) = original, self.routed.of(number)
        if solver is not None:
            weights = dict(zip(rows.modules, (original.gate, original.up, original.down)))
            nearest = _nearest(weights, rows.rows, solver)
            gate, up, down = (nearest[module] for module in rows.modules)
            rounded = replace(
                original, gate=gate, up=up, down=down, activation_quants=solver.activation_quants()
            )
        return rounded(self.routed.x[tokens])

    def _rounded(self, sublayer: Sublayer) -> dict[str, Tensor]:
        """The sublayer's tensors, read and rounded one at a time."""
        tensors = {}
        for row in sublayer.needed:
            tensor = self.source.dequantized(row)
            if row.module in sublayer.quantized:
                (tensor,) = _nearest(
                    {row.module: tensor}, (row,), self.solvers.of(row.module)
                ).values()
            tensors[row.name] = tensor
        return tensors


def _nearest(
    weights: dict[str, Tensor], rows: tuple[Parameter, ...], solver: LinearSolver
) -> dict[str, Tensor]:
    """Values of the rounded weights by module, in their order."""
    fused = {row.module: row.fused for row in rows if row.fused}
    return solver.rtn_values(weights, fused)


SCALE_EXPERTS = 8
"""Routed experts whose rows the search of the layer's scale uses."""


def expert_batch_values(device_type: str, batches: Batches) -> int:
    """Experts are solved together up to this many weights, at least one: on a CPU as in `Batches`,
    on accelerators 16 of R1's 256."""
    return batches.expert_values if device_type == "cpu" else 2**30


def expert_weights(
    model: SourceModel, rows: GatedMlp, values: Mapping[str, Tensor]
) -> ExpertWeights:
    """An expert with these linears, by module, and the source's biases."""
    gate, up, down = (values[module] for module in rows.modules)
    biases = [model.weights.dequantized(model.by_name[name]) for name in rows.biases]
    gating = model.config.gating.rotated(model.weights.checkpoint.input_rotation(rows.down.module))
    return ExpertWeights(gate, up, down, gating, ExpertBiases(*biases) if biases else None)


@dataclass(frozen=True)
class _Expert:
    """On the rank that has read it. hidden: as returned by `ExpertSolver.solve`, if the expert was
    solved in this run."""

    original: ExpertWeights
    rounded: ExpertWeights
    hidden: Tensor | None


@dataclass(frozen=True)
class _Path:
    """Hidden states to which an expert adds w [n] times its `outputs` [n, H], for its tokens
    [n]."""

    states: HiddenStates
    tokens: Tensor
    w: Tensor
    outputs: Callable[[_Expert], Tensor]


class ExpertLayer:
    """All experts of a layer are quantized on one grid, or none is."""

    def __init__(
        self,
        model: SourceModel,
        layer: int,
        solvers: SolverTable,
        log: ProgressLog,
        ranks: Ranks,
        batches: Batches,
    ) -> None:
        self.model, self.layer, self.recipe, self.log, self.ranks = (
            model,
            layer,
            solvers.recipe,
            log,
            ranks,
        )
        self.experts = model.experts(layer)
        first = next(iter(self.experts.values())).modules
        self.solver = None if model.quantized.isdisjoint(first) else solvers.of(first[0])
        values = expert_batch_values(model.weights.device.type, batches)
        self.batches = list(expert_batches(self.experts, values))
        self.own = [batch for number, batch in enumerate(self.batches) if ranks.owns(number)]
        """Batches that this rank reads and solves."""

    def will_run(self) -> None:
        """Prefetch the first batch."""
        self._will_read(self.own[0] if self.own else [])

    def consumers(self, routed: RoutedTokens) -> list[Consumer]:
        """Rows of some experts, for the group that reaches them; an expert's weight is its number
        of tokens."""
        if self.solver is None:
            return []
        counts = routed.counts(len(self.experts))
        chosen = list(self.experts)[:: max(1, len(self.experts) // SCALE_EXPERTS)]
        count = max(16, self.recipe.search_rows // 4)
        consumers = []
        for expert in chosen:
            weights = self._weights(expert)
            share = float(counts[expert] / max(routed.fitted, 1)) * len(self.experts) / len(chosen)
            consumers += [
                Consumer(sample_rows(w, count), share, self.solver)
                for w in (weights.gate, weights.up)
            ]
        return consumers

    def run(
        self,
        sublayer: Sublayer,
        routed: RoutedTokens,
        read: LinearInput,
        states: HiddenStatePair,
        rtn: RtnRun | None,
        path: ReferenceRun | None,
    ) -> None:
        """Quantize and write all experts, and add their outputs to the hidden states of both paths,
        of the RTN run, and of the calibration tokens on the original path."""
        self._report_routing(routed)
        solver, original = None, None if path is None else path.routed
        if self.solver is not None:
            counts = (
                token_weights(states.quantized.hidden[:, : sublayer.width])
                if self.solver.activation_bits == 8
                else None
            )
            # Their cost is known in the residual stream, not in a latent space.
            in_stream = next(iter(self.experts.values())).down.shape[0] == sublayer.width
            cost = (sublayer.importance, sublayer.outputs) if in_stream else (None, None)
            solver = ExpertSolver(self.solver, routed, read, *cost, original, counts)
        rank, size = self.ranks.rank, self.ranks.size
        activation_quant = self._read()
        for start in range(0, len(self.batches), size):
            together = self.batches[start : start + size]  # one for every rank
            own: dict[int, _Expert] = {}
            if rank < len(together):
                originals = next(activation_quant)
                rounded, hidden = self._output_weights(solver, originals, read.scale)
                own = {
                    expert: _Expert(weights, rounded[expert], hidden.get(expert))
                    for expert, weights in originals.items()
                }
                del originals, rounded, hidden
            paths = {
                expert: list(self._paths(expert, routed, read.scale, states, rtn, path))
                for batch in together
                for expert in batch
            }
            held: dict[int, list[Tensor]] = {}
            if size > 1:  # every rank computes its own before it waits for another's
                held = {
                    expert: list(self._outputs(expert, own.pop(expert), paths[expert]))
                    for expert in list(own)
                }
            for source, batch in enumerate(together):
                self.log.report("propagating", self._unit(batch[0]))
                for expert in batch:
                    outputs = (
                        held.pop(expert)
                        if expert in held
                        else self._outputs(expert, own.get(expert), paths[expert])
                    )
                    for one, added in zip(paths[expert], outputs):
                        add_weighted(
                            one.states, one.tokens, self.ranks.broadcast(added, source), one.w
                        )
                    self.log.finish(self._unit(expert))
        if size > 1:
            self.log.store.sync(self.ranks)
            for expert in (
                expert
                for number, batch in enumerate(self.batches)
                if not self.ranks.owns(number)
                for expert in batch
            ):
                self.log.merge_facts(self._unit(expert))

    def _paths(
        self,
        expert: int,
        routed: RoutedTokens,
        scale: Tensor,
        states: HiddenStatePair,
        rtn: RtnRun | None,
        path: ReferenceRun | None,
    ) -> "Iterator[_Path]":
        """The paths of an expert: quantized, original, RTN, and original on calibration tokens."""
        tokens, w = routed.of(expert)
        count = len(routed.quantized_tokens_of(expert)[0])
        yield _Path(
            states.quantized,
            tokens[:count],
            w[:count],
            lambda one: quantized_outputs(routed, expert, one.rounded, scale, one.hidden),
        )
        held_out = tokens[count:]
        yield _Path(
            states.original,
            held_out - routed.quantized,
            w[count:],
            lambda one: one.original(routed.x[held_out]),
        )
        if rtn is not None and rtn.routed is not None:
            rtn_tokens, own = rtn.routed.of(expert)
            yield _Path(
                rtn.states,
                rtn_tokens,
                own,
                lambda one: rtn.expert_outputs(
                    expert, self.experts[expert], one.original, self.solver
                ),
            )
        if path is not None and path.routed is not None:
            yield _Path(
                path.states,
                *path.routed.of(expert),
                lambda one: path.expert_outputs(expert, one.original),
            )

    def _outputs(
        self, expert: int, own: "_Expert | None", paths: "list[_Path]"
    ) -> Iterator[Tensor]:
        """An expert's outputs on each of its paths, one at a time; empty buffers if another rank
        has it."""
        for path in paths:
            if own is not None and len(path.tokens):
                yield path.outputs(own)
            else:
                yield path.states.hidden.new_empty(
                    len(path.tokens), self.experts[expert].down.shape[0]
                )

    def _unit(self, expert: int) -> str:
        return expert_unit(self.layer, expert)

    def _weights(self, expert: int) -> ExpertWeights:
        """The source's weights."""
        return self._of(
            {row.module: self.model.weights.dequantized(row) for row in self.experts[expert].rows},
            expert,
        )

    def _read(self) -> Iterator[dict[int, ExpertWeights]]:
        """The original weights of each batch of this rank; the next batch is prefetched."""
        for batch, following in zip(self.own, [*self.own[1:], []]):
            self.log.report("reading", self._unit(batch[0]))
            originals = {expert: self._weights(expert) for expert in batch}
            self._will_read(following)
            yield originals

    def _will_read(self, batch: list[int]) -> None:
        self.model.weights.will_read(row for expert in batch for row in self.experts[expert].rows)

    def _output_weights(
        self, solver: ExpertSolver | None, originals: Mapping[int, ExpertWeights], scale: Tensor
    ) -> tuple[dict[int, ExpertWeights], dict[int, Tensor]]:
        """The weights of a batch of experts as in the output."""
        return (
            (self._unquantized(originals, scale), {})
            if solver is None
            else self._quantized(solver, originals)
        )

    def _unquantized(
        self, originals: Mapping[int, ExpertWeights], scale: Tensor
    ) -> dict[int, ExpertWeights]:
        """Experts that are not quantized: the source's, apart from the scale [H] of their input."""
        kept = {}
        for expert, own in originals.items():
            rows = self.experts[expert]
            changed = {}
            if not bool((scale == 1).all()):
                changed = {
                    row.name: (w * scale).to(self.model.weights.dtype(row))
                    for row, w in ((rows.gate, own.gate), (rows.up, own.up))
                }
            gate, up = (
                changed[row.name].float() if row.name in changed else w
                for row, w in ((rows.gate, own.gate), (rows.up, own.up))
            )
            kept[expert] = replace(own, gate=gate, up=up)
            if not self.log.store.done(self._unit(expert)):
                self.log.write(self._unit(expert), {}, changed, {}, owned=True)
        return kept

    def _quantized(
        self, solver: ExpertSolver, originals: Mapping[int, ExpertWeights]
    ) -> tuple[dict[int, ExpertWeights], dict[int, Tensor]]:
        """The quantized weights of a batch of experts: solved now, or read back if an earlier run
        wrote them; and the inputs of their down projections from `ExpertSolver.solve`, if solved
        now."""
        # A batch is solved whole or not at all, so that its arithmetic does not depend on where an
        # earlier run stopped.
        if not all(self.log.store.done(self._unit(expert)) for expert in originals):
            return self._solve(solver, originals)
        rounded = {}
        for expert in originals:
            weights, _ = self.log.load(self._unit(expert))
            rounded[expert] = self._with_activation_quants(
                weights, {module: dequantize(weight) for module, weight in weights.items()}, expert
            )
        return rounded, {}

    def _solve(
        self, solver: ExpertSolver, originals: Mapping[int, ExpertWeights]
    ) -> tuple[dict[int, ExpertWeights], dict[int, Tensor]]:
        first = self._unit(next(iter(originals)))
        self.log.report("solving", first)
        solved, hidden = solver.solve(self.experts, originals)
        self.log.report("writing", first)
        for expert in originals:
            own = {module: solved[module].result for module in self.experts[expert].modules}
            self.log.write(
                self._unit(expert), own, {}, {}, owned=not self.log.store.done(self._unit(expert))
            )
        weights, values = (
            {module: getattr(one, part) for module, one in solved.items()}
            for part in ("weight", "values")
        )
        return {
            expert: self._with_activation_quants(weights, values, expert) for expert in originals
        }, hidden

    def _with_activation_quants(
        self, weights: Mapping[str, Weight], values: Mapping[str, Tensor], expert: int
    ) -> ExpertWeights:
        """A quantized expert with its activation quantization. values: the dequantized weights."""
        assert self.solver is not None, "quantized experts"
        rows = self.experts[expert]
        activation_quants = self.solver.activation_quants(
            weights[rows.gate.module], weights[rows.down.module]
        )
        return replace(self._of(values, expert), activation_quants=activation_quants)

    def _of(self, values: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        return expert_weights(self.model, self.experts[expert], values)

    def _report_routing(self, routed: RoutedTokens) -> None:
        findings, least, count = self.log.findings, self.recipe.min_expert_tokens, len(self.experts)
        counts = routed.counts(count)
        findings.expert_tokens[str(self.layer)] = counts.tolist()
        starved = int((counts < least).sum())
        if starved:
            self.log.note(
                f"layer {self.layer}: {starved} of {count} experts saw fewer than {least} tokens"
            )
        agreement = routed.agreement()
        if agreement is not None:
            findings.expert_agreement[str(self.layer)] = agreement


def expert_batches(experts: Mapping[int, GatedMlp], values: int) -> Iterator[list[int]]:
    """Experts in batches of at most `values` weights, at least one, independent of the machine; if
    possible a power of two of them, so that ranks have equally many."""
    first = next(iter(experts.values()))
    most = max(1, values // sum(row.shape[0] * row.shape[1] for row in first.rows))
    count = 1 << (math.ceil(len(experts) / most) - 1).bit_length()
    size, order = math.ceil(len(experts) / count), list(experts)
    for start in range(0, len(order), size):
        yield order[start : start + size]
