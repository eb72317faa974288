"""The straight line of a calibrated run: embed, then for every layer attend and feed forward, then the MTP layer.

Each half of a layer is walked in the same steps:
  observe     run it in full precision on the calibration tokens; sum up the Hessian of every linear's input
  scale       choose each group's s, fold it, and check that the half still computes the same before anything is rounded
  solve       round every linear
  propagate   run it again with the rounded weights, so that later layers are fitted to the inputs they will really get
A mixture of experts does the same with its experts streamed between observing and propagating.

Memory: the hidden states of all calibration tokens, one half of one layer, its Hessians, and a few experts. Nothing grows with
the number of layers or experts. Hidden states at the input of each layer are saved, so a stopped run goes on from there.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import psutil
import torch
from quantkit_kernels import rms_norm
from torch import Tensor

from quantkit.calibrate.allocator import give_back, keep_freed_blocks
from quantkit.calibrate.batches import Batches
from quantkit.calibrate.data import Sequences
from quantkit.calibrate.events import Note, OnEvent, Progress
from quantkit.calibrate.experts import ExpertSolver, ExpertWeights, Routed, add_outputs
from quantkit.calibrate.findings import Findings
from quantkit.calibrate.hidden_states import HiddenStatePair, HiddenStates, relative_distance
from quantkit.calibrate.mtp import mtp_streams
from quantkit.calibrate.next_token_kl import BLOCK_ROWS, JUDGED_TOKENS, compare_next_tokens
from quantkit.calibrate.output_cost import ResidualStream
from quantkit.calibrate.parameter_reader import ParameterReader
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.scale_search import Consumer, sample_rows
from quantkit.calibrate.solver import Solved, Solver
from quantkit.calibrate.sublayer import Run, Sublayer, SublayerSpec
from quantkit.calibrate.unit_store import UnitStore
from quantkit.calibrate.units import attend_unit, expert_unit, feed_forward_unit, units_of
from quantkit.errors import QuantkitError
from quantkit.models.context import CausalContext
from quantkit.models.table import Parameter
from quantkit.quant.gptq import Curvature
from quantkit.quant.weights import dequantize

SCALE_EXPERTS = 8
"""Routed experts whose rows the search of the layer's scale looks at."""


def expert_batch_values(device_type: str, batches: Batches) -> int:
    """Experts are solved together up to this many weights, at least one: on a CPU as `Batches` says, elsewhere 24 of R1's."""
    return batches.expert_values if device_type == "cpu" else 2**30


class Walk:
    """One calibrated run over one source. architecture: a module of quantkit.models; parameters: its rows, resolved."""

    def __init__(
        self,
        source: ParameterReader,
        architecture: Any,
        config: Any,
        parameters: list[Parameter],
        solver: Solver,
        store: UnitStore,
        on_event: OnEvent,
        ranks: Ranks,
        batches: Batches,
    ) -> None:
        self.source, self.architecture, self.config = source, architecture, config
        self.solver, self.store, self.on_event, self.ranks, self.batches = solver, store, on_event, ranks, batches
        self.rows = parameters
        self.layers = sorted({row.layer for row in parameters if row.layer is not None and not row.mtp})
        self.mtp_layers = sorted({row.layer for row in parameters if row.layer is not None and row.mtp})
        self.groups = {layer: architecture.scale_groups(config, layer) for layer in [*self.layers, *self.mtp_layers]}
        self.residual = ResidualStream(source, parameters, [group for layer in self.layers for group in self.groups[layer]])
        self.units = units_of(parameters, [group for groups in self.groups.values() for group in groups])
        self.quantized = {row.module for row in parameters if store.quantizes(row)}
        self.findings = Findings()
        self.total_bytes = sum(source.stored_bytes(row) for row in parameters)
        self.done_bytes = 0
        self._process = psutil.Process()

    @torch.inference_mode()
    def run(self, sequences: Sequences) -> Findings:
        """Quantize every decoder layer, MTP layers included. Tables outside the layers are left to the caller."""
        keep_freed_blocks()
        lengths = [len(s) for s in (*sequences.calibration, *sequences.held_out)]
        fitted = sum(len(s) for s in sequences.calibration)
        saved = self.store.load_state()
        self.ranks.wait()  # all begin from the same state
        if saved is None:
            first = self.layers[0]
            streams = self._embed(sequences, lengths, fitted)
        else:
            first, tensors, facts = saved
            self.findings = Findings(**facts)
            streams = self._streams(tensors["quantized"], tensors["original"], lengths, fitted, sequences)
        for layer in self.layers:
            if layer >= first:
                self._layer(layer, streams)
            else:
                self._skip(layer)
        if len(streams.original.hidden) and self.ranks.leads:
            self._judge(streams)
        for layer in self.mtp_layers:
            rows = [row for row in self.rows if row.layer == layer]
            if any(row.mtp and row.module in self.quantized for row in rows):
                model = self.source, self.architecture, self.config
                self._layer(layer, mtp_streams(*model, layer, rows, self.residual.norm, streams, sequences), save=False)
        return self.findings

    def _embed(self, sequences: Sequences, lengths: list[int], fitted: int) -> HiddenStatePair:
        table = self.source.checkpoint.read("model.embed_tokens.weight")
        ids = torch.cat([*sequences.calibration, *sequences.held_out])
        if int(ids.max()) >= len(table):
            raise QuantkitError(f"the tokenizer gives token {int(ids.max())}, the model has {len(table)}", "use the model's own tokenizer")
        return self._streams(table[ids].float(), table[ids[fitted:]].float(), lengths, fitted, sequences)

    def _streams(self, quantized: Tensor, original: Tensor, lengths: list[int], fitted: int, sequences: Sequences) -> HiddenStatePair:
        device = self.source.device
        held_out = [len(s) for s in sequences.held_out]
        at_once = self.batches.tokens
        return HiddenStatePair(
            HiddenStates(quantized.to(device), fitted, lengths, at_once), HiddenStates(original.to(device), 0, held_out, at_once)
        )

    # --- one layer -------------------------------------------------------------------------------------------------------

    def _layer(self, layer: int, streams: HiddenStatePair, save: bool = True) -> None:
        self._attend(layer, streams)
        self._feed_forward(layer, streams)
        fitted = streams.quantized.fitted
        self.findings.hidden_error[str(layer)] = relative_distance(streams.quantized.hidden[fitted:], streams.original.hidden)
        if save and layer + 1 in self.layers and self.ranks.leads:
            hidden = {"quantized": streams.quantized.hidden, "original": streams.original.hidden}
            self.store.save_state(layer + 1, hidden, self.findings.to_dict())

    def _attend(self, layer: int, streams: HiddenStatePair) -> None:
        unit = attend_unit(layer)
        device = self.source.device
        half = self._half(unit, layer, streams, lambda block, x, lengths: block.attend(x, CausalContext(lengths, device)))
        if self.store.done(unit):
            half.propagate_original()
            self._load(unit, half)
        else:
            self._enter("observing", unit)
            half.observe()
            half.propagate_original()
            self._enter("scaling", unit)
            half.fold({})
            half.check_same()
            self._enter("solving", unit)
            self._write(unit, half.solve(), half.plain, half.group_scales, mine=self.ranks.leads)
        self._enter("propagating", unit)
        half.propagate()
        self._account(unit)

    def _feed_forward(self, layer: int, streams: HiddenStatePair) -> None:
        unit = feed_forward_unit(layer)
        half = self._half(unit, layer, streams, lambda block, x, lengths: block.feed_forward(x))
        experts = self._expert_rows(layer)
        finished = self.store.done(unit)
        if experts or not finished:
            self._enter("observing", unit)
            half.observe()
        half.propagate_original()
        if finished:
            self._load(unit, half)
        else:
            self._enter("scaling", unit)
            half.fold(self._expert_consumers(layer, half))
            half.check_same()
            self._enter("solving", unit)
            self._write(unit, half.solve(), half.plain, half.group_scales, mine=self.ranks.leads)
        self._enter("propagating", unit)
        half.propagate()
        if experts:
            self._experts(layer, half)
        self._account(unit)

    def _half(self, unit: str, layer: int, streams: HiddenStatePair, run: Run) -> Sublayer:
        rows = [row for row in self.units[unit] if row.role != "mtp_proj"]
        own = {row.name for row in rows}
        inner = [
            row for row in self.rows if row.layer == layer and row.expert is None and row.role not in ("embedding", "head", "mtp_proj")
        ]
        # A decoder layer is built whole; the other half's linears are asked for only when they run, so they need not be read.
        needed = [row for row in inner if row.name in own or row.role != "linear"]
        outputs, importance = self._outputs(unit, layer, streams.quantized), None
        if outputs is not None:
            importance = outputs.conditional
        elif layer in self.layers:
            importance = self.residual.squared_gain(layer)
        spec = SublayerSpec(
            name=unit,
            build=lambda weights: self.architecture.Model.layer_class(self.config, layer, weights),
            run=run,
            rows=rows,
            groups=[g for g in self.groups[layer] if g.expert is None and f"{g.producer}.weight" in own],
            stored={row.name: self.source.dtype(row) for row in needed if row.module not in self.quantized},
            quantized=self.quantized,
            importance=importance,
            outputs=outputs,
        )
        return Sublayer(spec, self.source.dequantized_all(needed), self.solver, streams)

    def _outputs(self, unit: str, layer: int, stream: HiddenStates) -> Curvature | None:
        """What an error costs in the residual stream after this half, judged by the stream before it. None in an MTP layer, and where an
        earlier run solved all that asks for it."""
        solved = unit == attend_unit(layer) and self.store.done(unit)
        if solved or layer not in self.layers or not (self.solver.compensates and self.solver.recipe.output_curvature):
            return None
        cost = self.residual.cost(self.units[unit], stream.hidden[: stream.fitted], self.config.rms_norm_eps)
        return Curvature.of(cost, self.solver.recipe.output_damping)

    # --- routed experts --------------------------------------------------------------------------------------------------

    def _expert_rows(self, layer: int) -> dict[int, list[Parameter]]:
        experts: dict[int, list[Parameter]] = {}
        for row in self.rows:
            if row.layer == layer and row.expert is not None:
                experts.setdefault(row.expert, []).append(row)
        return experts

    def _expert_weights(self, rows: list[Parameter]) -> ExpertWeights:
        by_side = {row.module.rsplit(".", 1)[1]: self.source.dequantized(row) for row in rows}
        return ExpertWeights(by_side["gate_proj"], by_side["up_proj"], by_side["down_proj"])

    def _expert_consumers(self, layer: int, half: Sublayer) -> dict[str, list[Consumer]]:
        """Rows of some routed experts, for the groups that reach them; an expert counts by the tokens that choose it."""
        experts = self._expert_rows(layer)
        reached = [g for g in half.spec.groups if experts and any(m not in half.sites and ".experts." in m for m in g.consumers)]
        if not reached or not self.quantized & {row.module for row in next(iter(experts.values()))}:
            return {}
        stream = half.streams.quantized
        counts = half.recorder.routed(stream.fitted, len(stream.hidden)).counts(len(experts))
        chosen = list(experts)[:: max(1, len(experts) // SCALE_EXPERTS)]
        solver = self._expert_solver(experts)
        consumers = []
        for expert in chosen:
            weights = self._expert_weights(experts[expert])
            share = float(counts[expert] / max(stream.fitted, 1)) * len(experts) / len(chosen)
            for w in (weights.gate, weights.up):
                consumers.append(Consumer(sample_rows(w, max(16, self.solver.recipe.search_rows // 4)), share, solver))
        return {group.name: consumers for group in reached}

    def _experts(self, layer: int, half: Sublayer) -> None:
        """Solve and write all routed experts, and add their outputs to the hidden states of both paths."""
        stream = half.streams.quantized
        routed = half.recorder.routed(stream.fitted, len(stream.hidden))
        experts = self._expert_rows(layer)
        self._report_routing(layer, routed, len(experts))
        observed = self._experts_input(layer, half)
        scale = half.scale_of(observed)
        held_out = half.statistics(observed).sample
        curvature, costs = half.curvature(observed), (half.spec.importance, half.spec.outputs)
        solver = ExpertSolver(self._expert_solver(experts), routed, scale, curvature, held_out, *costs)
        batches = list(_batches(experts, expert_batch_values(self.source.device.type, self.batches)))
        if self.ranks.size > 1:
            mine = [batch for number, batch in enumerate(batches) if self.ranks.mine(number)]
            for _, originals in self._read_experts(layer, experts, mine):
                self._solve_experts(layer, solver, experts, originals)
            self.ranks.share(self.store)
        for batch, originals in self._read_experts(layer, experts, batches):
            rounded, hidden = self._solve_experts(layer, solver, experts, originals)
            self._progress("propagating", expert_unit(layer, batch[0]))
            for expert in batch:
                add_outputs(half.streams, routed, expert, originals[expert], rounded[expert], scale, hidden.get(expert))
                self._account(expert_unit(layer, expert))

    def _read_experts(
        self, layer: int, rows: dict[int, list[Parameter]], batches: list[list[int]]
    ) -> Iterator[tuple[list[int], dict[int, ExpertWeights]]]:
        """Each batch of experts with their original weights; those of the next are on their way from the disk meanwhile."""
        for batch, following in zip(batches, [*batches[1:], []]):
            self._progress("reading", expert_unit(layer, batch[0]))
            originals = {expert: self._expert_weights(rows[expert]) for expert in batch}
            self.source.will_read(row for expert in following for row in rows[expert])
            yield batch, originals

    def _solve_experts(
        self, layer: int, solver: ExpertSolver, rows: dict[int, list[Parameter]], originals: dict[int, ExpertWeights]
    ) -> tuple[dict[int, ExpertWeights], dict[int, Tensor]]:
        """The rounded weights of a batch of experts: solved now, or read back where an earlier run wrote them. With what
        `ExpertSolver.solve` found their down projections to read, where it was asked."""
        prefixes = {expert: rows[expert][0].module.rsplit(".", 1)[0] for expert in originals}
        units = {expert: expert_unit(layer, expert) for expert in originals}
        # A batch is solved whole or not at all, so that its arithmetic does not depend on where an earlier run stopped.
        if not all(self.store.done(unit) for unit in units.values()):
            self._progress("solving", units[next(iter(units))])
            solved, hidden = solver.solve(prefixes, originals)
            self._progress("writing", units[next(iter(units))])
            for expert, unit in units.items():
                own = {module: one for module, one in solved.items() if module.startswith(prefixes[expert] + ".")}
                self._write(unit, own, {}, {}, mine=not self.store.done(unit))
            dense = {module: one.values for module, one in solved.items()}
            return {expert: _expert(dense, prefixes[expert]) for expert in units}, hidden
        rounded = {}
        for expert, unit in units.items():
            weights, _, facts = self.store.load(unit)
            self.findings.take(facts)
            dense = {module: dequantize(weight) for module, weight in weights.items()}
            rounded[expert] = _expert(dense, prefixes[expert])
        return rounded, {}

    def _expert_solver(self, experts: dict[int, list[Parameter]]) -> Solver:
        """On the grid of one layer's routed experts, which may be another than that of its other linears."""
        return self.solver.on(self.store.grid(next(iter(experts.values()))[0]))

    def _experts_input(self, layer: int, half: Sublayer) -> str:
        """The module whose input is the routed experts' input."""
        return next(g.observe for g in half.spec.groups if any(".experts." in m for m in g.consumers))

    def _report_routing(self, layer: int, routed: Routed, experts: int) -> None:
        counts = routed.counts(experts)
        self.findings.expert_tokens[str(layer)] = counts.tolist()
        starved = int((counts < self.solver.recipe.min_expert_tokens).sum())
        if starved:
            self._note(f"layer {layer}: {starved} of {experts} experts saw fewer than {self.solver.recipe.min_expert_tokens} tokens")
        held_out, original = routed.topk_ids[routed.fitted : routed.quantized], routed.topk_ids[routed.quantized :]
        if len(original):
            common = (held_out[:, :, None] == original[:, None, :]).any(-1)
            self.findings.expert_agreement[str(layer)] = float(common.float().mean())

    # --- the end of the stack ----------------------------------------------------------------------------------------------

    def _judge(self, streams: HiddenStatePair) -> None:
        """What both paths say comes next, on held-out tokens. Nothing of it is kept for a restart: it follows from the last layer."""
        head, norm = self.residual.head, self.source.dequantized(self.residual.norm)
        self._progress("judging", head.module)
        step = max(1, len(streams.original.hidden) // JUDGED_TOKENS)
        original, quantized = (
            rms_norm(hidden[::step][:JUDGED_TOKENS], norm, self.config.rms_norm_eps)
            for hidden in (streams.original.hidden, streams.quantized.hidden[streams.quantized.fitted :])
        )
        self.findings.next_token = asdict(compare_next_tokens(original, quantized, self.source.blocks(head, BLOCK_ROWS)))

    # --- telling and writing ---------------------------------------------------------------------------------------------

    def _write(
        self, unit: str, solved: dict[str, Solved], plain: dict[str, Tensor], scales: dict[str, Tensor], *, mine: bool = True
    ) -> None:
        for module, one in solved.items():
            if one.method == "nearest" and self.solver.methods:
                self._note(f"{module}: plain rounding is better on held-out inputs, and kept")
        facts = self.findings.facts(solved, scales)  # also of what is written already: a report tells of all units
        if mine:
            self.store.write(unit, {module: one.weight for module, one in solved.items()}, plain, facts)

    def _load(self, unit: str, half: Sublayer) -> None:
        weights, plain, facts = self.store.load(unit)
        half.load(weights, plain)
        self.findings.take(facts)
        self._note(f"{unit}: found finished")

    def _skip(self, layer: int) -> None:
        """A layer that an earlier run finished."""
        for unit in self.units:
            if unit.startswith(f"layers.{layer}."):
                assert self.store.done(unit), f"{unit} is not written, but a later layer was begun"
                self._account(unit)

    def _account(self, unit: str) -> None:
        self.done_bytes += sum(self.source.stored_bytes(row) for row in self.units[unit])
        self._progress("done", unit)

    def _enter(self, phase: str, unit: str) -> None:
        """A phase of half a layer begins, with other sizes than the last. An expert's phases find the blocks of the expert before."""
        give_back()
        self._progress(phase, unit)

    def _progress(self, phase: str, unit: str) -> None:
        memory = self._process.memory_info().rss
        self.on_event(Progress(phase, unit, self.done_bytes, self.total_bytes, self.findings.mean_error, memory))

    def _note(self, text: str) -> None:
        self.on_event(Note(text))


def _expert(dense: dict[str, Tensor], prefix: str) -> ExpertWeights:
    return ExpertWeights(*(dense[f"{prefix}.{side}_proj"] for side in ("gate", "up", "down")))


def _batches(experts: dict[int, list[Parameter]], values: int) -> Iterator[list[int]]:
    """Experts in batches of at most `values` weights, at least one; the same whatever machine runs them."""
    first = next(iter(experts.values()))
    size = max(1, values // sum(row.shape[0] * row.shape[1] for row in first))
    order = list(experts)
    for start in range(0, len(order), size):
        yield order[start : start + size]
