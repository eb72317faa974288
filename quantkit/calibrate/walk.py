"""The loop of a calibrated run: embed, then attention and feed-forward of every layer, then the MTP
layers.

Each sublayer is observed (input_statistics.py), scaled (scales.py) and solved (sublayer_solver.py),
and then runs again with the quantized weights, so that later layers are calibrated on the inputs
they will really get. A mixture of experts has its experts streamed after that (expert_layer.py).

Memory: the hidden states of all calibration tokens, and of one sublayer its weights while it is
observed, its Hessians and their factors while its scales are searched, its factors and the linears
of one input while these are solved; or a few experts. Nothing grows with the number of layers or
experts. Hidden states at the input of each layer are saved, so a stopped run resumes there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibrate.block_drafts import BlockDrafts, Blocks, accepted_mtp_drafts
from quantkit.calibrate.cache_scales import QuantizedCache
from quantkit.calibrate.data import Sequences
from quantkit.calibrate.embed_and_head import (
    EmbedAndHead,
    TableEmbedAndHead,
    embedded_states,
    mtp_states,
)
from quantkit.calibrate.expert_layer import ExpertLayer, ReferenceRun, RtnRun
from quantkit.calibrate.hidden_states import (
    Batches,
    HiddenStatePair,
    HiddenStates,
    RoutedTokens,
    RoutingUpdater,
    copied_states,
    keep_freed_blocks,
    mean_row_distance,
)
from quantkit.calibrate.input_statistics import (
    HELD_OUT_ROWS,
    SublayerStatistics,
    collect_statistics,
)
from quantkit.calibrate.input_sums import Observer
from quantkit.calibrate.linear_solver import SolverTable
from quantkit.calibrate.output import Findings, ProgressLog
from quantkit.calibrate.output_cost import (
    JUDGED_ROWS,
    JUDGED_TOKENS,
    ResidualStream,
    compare_paths,
)
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.scales import LinearInput, linear_input, scale_in_effect, scale_sublayer
from quantkit.calibrate.source_model import SourceModel, attend_unit, feed_forward_unit
from quantkit.calibrate.sublayer import (
    NO_ACTIVATION_QUANTS,
    Run,
    Sublayer,
    advance,
    feed_forward,
    output_tensors,
    run_attention,
    sublayer_of,
)
from quantkit.calibrate.sublayer_solver import solve_sublayer
from quantkit.grids.base import Weight, dequantize
from quantkit.models.table import Parameter
from quantkit.quant.gptq import Curvature


@dataclass(frozen=True)
class SublayerResult:
    """Result of a sublayer. weights: by module; unquantized: its other tensors that changed, or all, in
    their stored dtype. routed, read: routing to its experts, and their input; None without
    experts. advanced: whether tokens on the original path are after the sublayer already."""

    weights: Mapping[str, Weight]
    unquantized: Mapping[str, Tensor]
    routed: RoutedTokens | None = None
    read: LinearInput | None = None
    advanced: bool = False


class Walk:
    """One calibrated run over one model. embed_and_head: if the table does not define them. cache:
    of a scheme with an 8-bit cache. scratch: of hidden states that do not fit into memory."""

    def __init__(
        self,
        model: SourceModel,
        solvers: SolverTable,
        log: ProgressLog,
        ranks: Ranks,
        batches: Batches,
        embed_and_head: EmbedAndHead | None = None,
        cache: QuantizedCache | None = None,
        scratch: Path | None = None,
    ) -> None:
        self.embed_and_head = embed_and_head or TableEmbedAndHead(
            model.weights, model.rows, model.config
        )
        self.model, self.solvers, self.log = model, solvers, log
        self.ranks, self.batches, self.cache = ranks, batches, cache
        self.fit = scratch is None
        """Whether hidden states fit into the host's memory."""
        self.scratch = scratch if model.weights.device.type == "cpu" else None
        groups = [group for layer in model.layers for group in model.groups[layer]]
        self.residual = ResidualStream(model.weights, model.rows, groups, self.embed_and_head)
        self.rtn: RtnRun | None = None
        self.path: ReferenceRun | None = None
        """Of the calibration tokens, if the recipe corrects for drift."""
        self.unpruned: Tensor | None = None
        """Hidden states of the held-out tokens after the last layer of the model before pruning,
        [T, H]."""
        self.head: Weight | None = None
        """Quantized, where it is."""

    @torch.inference_mode()
    def run(self, sequences: Sequences) -> Findings:
        """Quantize every decoder layer, and MTP layers. Tables outside the layers are left to the
        caller."""
        keep_freed_blocks()
        first, states, head = self._begun(sequences)
        for layer in self.model.layers:
            if layer >= first:
                if head is not None:
                    head.read(layer, states)
                self._decoder_layer(layer, states, head)
            else:
                self._skip(layer)
        if self.residual.head.module in self.model.quantized:
            self._quantize_head(states.quantized)
        if len(states.original.hidden) and self.ranks.is_main:
            self._compare_next_tokens(states)
        self.rtn = self.path = None
        if head is not None:
            head.read(len(self.model.layers), states)
            blocks = head.blocks(states, sequences)
            del head
            self._draft_blocks(blocks)
            return self.log.findings
        for layer in self.model.mtp_layers:
            if any(
                row.mtp and row.module in self.model.quantized
                for row in self.model.layer_rows(layer)
            ):
                drafts = mtp_states(self.model, layer, states, sequences)
                self._layer(layer, drafts)
                first = layer == self.model.mtp_layers[0]
                if first and len(drafts.original.hidden) and self.ranks.is_main:
                    ends = self.embed_and_head, self.residual.head
                    self.log.findings.next_token |= accepted_mtp_drafts(
                        self.model, *ends, layer, states, drafts, sequences
                    )
        return self.log.findings

    def _begun(self, sequences: Sequences) -> tuple[int, HiddenStatePair, BlockDrafts | None]:
        """The layer to begin with, the states at its input, and what a DSpark head has read. A
        stopped run goes on where it was saved."""
        saved = self.log.store.load_state(self.scratch)
        self.ranks.barrier()  # all ranks start from the same state
        first, tensors = self.model.layers[0], None
        if saved is None:
            states, fitted = self._embedded(sequences)
            judged = states.quantized.hidden[states.quantized.fitted :]
            rtn_states = copied_states(judged, self.scratch) if len(judged) else None
        else:
            first, tensors, facts = saved
            self.log.findings = Findings(**facts)
            states = self._states(tensors["quantized"], tensors["original"], sequences)
            rtn_states = tensors.get("plain")  # older versions did not save it
            fitted = tensors["fitted"] if "drift" in self.solvers.methods else None
        device = states.original.hidden.device
        if rtn_states is not None:  # on every rank: each adds its experts' outputs
            rtn = replace(states.original, hidden=rtn_states.to(device))
            self.rtn = RtnRun(rtn, self.model.weights, self.solvers, self.cache)
        if fitted is not None:
            lengths, count = [len(s) for s in sequences.calibration], len(fitted)
            kept = self.batches.tokens, self.scratch
            self.path = ReferenceRun(HiddenStates(fitted.to(device), count, lengths, *kept))
        return first, states, BlockDrafts.of(self.model, states, tensors)

    def _embedded(self, sequences: Sequences) -> tuple[HiddenStatePair, Tensor | None]:
        """Both paths at the input of the first layer, and with drift what the calibration tokens
        have on the original one."""
        every = [*sequences.calibration, *sequences.held_out]
        embed, scratch = self.embed_and_head, self.scratch
        fitted = sum(map(len, sequences.calibration))
        hidden = embedded_states(embed, every, scratch)
        original = copied_states(hidden[fitted:], scratch)
        source = (
            copied_states(hidden[:fitted], scratch) if "drift" in self.solvers.methods else None
        )
        if isinstance(embed, TableEmbedAndHead) and embed.embedding.module in self.model.quantized:
            hidden = embedded_states(embed, every, scratch, self._round_embedding(embed.embedding))
        return self._states(hidden, original, sequences), source

    def _round_embedding(self, row: Parameter) -> Tensor:
        """The embedding rounded to nearest, float32, written or loaded: a lookup has no input that
        errors could be weighed by."""
        unit = row.module
        if self.log.store.done(unit):
            weight = self._loaded(unit)[0][unit]
        else:
            table = {unit: self.model.weights.dequantized(row)}
            solved = self.solvers.of(unit).solve_rtn(table, {})[unit]
            result = replace(solved.result, method="rounded")
            self.log.write(unit, {unit: result}, {}, {}, owned=self.ranks.is_main)
            weight = result.weight
        self.log.finish(unit)
        return dequantize(weight).cpu()

    def _states(self, quantized: Tensor, original: Tensor, sequences: Sequences) -> HiddenStatePair:
        device, kept = self.model.weights.device, (self.batches.tokens, self.scratch)
        fitted, held_out = (
            [len(s) for s in part] for part in (sequences.calibration, sequences.held_out)
        )
        return HiddenStatePair(
            HiddenStates(quantized.to(device), sum(fitted), [*fitted, *held_out], *kept),
            HiddenStates(original.to(device), 0, held_out, *kept),
        )

    # --- layers

    def _decoder_layer(self, layer: int, states: HiddenStatePair, head: BlockDrafts | None) -> None:
        """One layer; the hidden states after it are saved for a restart."""
        self._layer(layer, states)
        if layer + 1 in self.model.layers and self.ranks.is_main:
            hidden = {"quantized": states.quantized.hidden, "original": states.original.hidden}
            if self.rtn is not None:
                hidden["plain"] = self.rtn.states.hidden
            if self.path is not None:
                hidden["fitted"] = self.path.states.hidden
            if head is not None:
                hidden |= head.projected
            self.log.store.save_state(layer + 1, hidden, self.log.findings.to_dict(), fit=self.fit)

    def _layer(self, layer: int, states: HiddenStatePair, attend: Run = run_attention) -> None:
        next_token = self._next_token_cost(layer, states.quantized)
        if attend_unit(layer) in self.model.units:  # except for layers that are run whole
            attention = self._sublayer(attend_unit(layer), layer, attend, next_token)
            self._walk(attention, states, None)
        experts = None
        if self.model.experts(layer):
            experts = ExpertLayer(
                self.model, layer, self.solvers, self.log, self.ranks, self.batches
            )
            experts.will_run()
        paths = [
            states.quantized,
            states.original,
            *(one.states for one in (self.rtn, self.path) if one is not None),
        ]
        with feed_forward(self.model, layer, paths) as run:
            mlp = self._sublayer(feed_forward_unit(layer), layer, run, next_token)
            self._walk(mlp, states, experts)
        fitted = states.quantized.fitted
        self.log.findings.hidden_error[str(layer)] = mean_row_distance(
            states.quantized.hidden[fitted:], states.original.hidden
        )

    def _skip(self, layer: int) -> None:
        """Skip a layer that an earlier run finished."""
        rows = {row.name for row in self.model.layer_rows(layer)}
        for unit, own in self.model.units.items():
            if own[0].name in rows:
                assert self.log.store.done(unit), f"{unit} is not written, but a later layer is"
                self.log.skip(unit)

    def _sublayer(self, unit: str, layer: int, run: Run, next_token: Tensor | None) -> Sublayer:
        outputs = self._output_cost(unit, layer, next_token)
        importance = None if outputs is None else outputs.conditional
        if outputs is None and layer in self.model.layers:
            importance = self.residual.squared_gain(layer)
        return sublayer_of(self.model, self.solvers, unit, layer, run, importance, outputs)

    def _next_token_cost(self, layer: int, states: HiddenStates) -> Tensor | None:
        """Of an error in the stream of this layer, evaluated before it, so that a resumed run finds
        the same. None in an MTP layer."""
        weighted = (
            self.solvers.compensates
            and self.solvers.recipe.output_curvature
            and self.residual.norm is not None
        )
        if layer not in self.model.layers or not weighted:
            return None
        hidden = states.hidden[: states.fitted]
        return self.residual.next_token_cost(hidden, self.model.config.rms_norm_eps)

    def _output_cost(self, unit: str, layer: int, next_token: Tensor | None) -> Curvature | None:
        """Cost of an error in what this sublayer writes. None if it is unknown, or an earlier run
        solved everything that needs it."""
        if next_token is None or (unit == attend_unit(layer) and self.log.store.done(unit)):
            return None
        cost = self.residual.cost(self.model.units[unit], next_token)
        return Curvature.of(cost, self.solvers.recipe.output_damping)

    # --- one sublayer

    def _walk(
        self, sublayer: Sublayer, states: HiddenStatePair, experts: ExpertLayer | None
    ) -> None:
        """Solve a sublayer, or load what an earlier run wrote, and replace the hidden states by
        those after it."""
        unit = sublayer.name
        self.model.weights.keep(sublayer.needed)
        if self.rtn is not None:
            self.rtn.advance(sublayer, self.ranks)
        done = self.log.store.done(unit)
        written = (
            self._resumed(sublayer, states, experts)
            if done
            else self._quantized(sublayer, states, experts)
        )
        if self.path is not None and not written.advanced:
            source = self.model.weights.dequantized_all(sublayer.needed)
            self._advance_original(sublayer, source, states)
            self.path.advance(sublayer, source, self.ranks)
            del source
        self.log.begin_phase("propagating", unit)
        tensors = output_tensors(sublayer, self.model.weights, written.weights, written.unquantized)
        activation_quants = self.solvers.activation_quants(written.weights, written.weights)
        if self.cache is not None and self.cache.covers(sublayer):
            sublayer = replace(sublayer, run=self.cache.run(sublayer, written.unquantized))
        if experts is not None and written.routed is not None and written.read is not None:
            # Attention may precede them in this sublayer, and a router into which a scale was
            # folded
            # is stored rounded: both change the routing.
            again = RoutingUpdater(written.routed, written.read.scale)
            advance(sublayer, tensors, states.quantized, activation_quants, self.ranks, again)
            experts.run(sublayer, written.routed, written.read, states, self.rtn, self.path)
        else:
            advance(sublayer, tensors, states.quantized, activation_quants, self.ranks)
        self.log.finish(unit)

    def _quantized(
        self, sublayer: Sublayer, states: HiddenStatePair, experts: ExpertLayer | None
    ) -> SublayerResult:
        """Each value is released when the next one is made from it."""
        unit, weights = sublayer.name, self.model.weights
        observed = self._observed(sublayer, states)
        routed = observed.routed
        self.log.begin_phase("scaling", unit)
        consumers = experts.consumers(routed) if experts is not None and routed is not None else []
        scaled = scale_sublayer(observed, weights, states, consumers)
        del observed, consumers
        self.log.begin_phase("solving", unit)
        solved = solve_sublayer(
            scaled, weights, states, self.ranks, None if self.path is None else self.path.states
        )
        unquantized = solved.unquantized
        if self.cache is not None and self.cache.covers(sublayer):
            tensors = output_tensors(sublayer, weights, solved.weights, unquantized)
            activation_quants = self.solvers.activation_quants(solved.weights, solved.weights)
            unquantized = unquantized | self.cache.find(
                sublayer, tensors, states.quantized, activation_quants
            )
        self.log.write(unit, solved.linears, unquantized, scaled.scales, owned=self.ranks.is_main)
        return SublayerResult(
            solved.weights, unquantized, routed, scaled.experts_input, solved.advanced
        )

    def _resumed(
        self, sublayer: Sublayer, states: HiddenStatePair, experts: ExpertLayer | None
    ) -> SublayerResult:
        """Finished by an earlier run; its experts may not be."""
        if experts is None:
            if self.path is None:
                self._advance_original(
                    sublayer, self.model.weights.dequantized_all(sublayer.needed), states
                )
            return SublayerResult(*self._loaded(sublayer.name))
        observed = self._observed(sublayer, states)
        weights, unquantized = self._loaded(sublayer.name)
        group, site = sublayer.experts_group, sublayer.experts_site
        assert site is not None, f"{sublayer.name} has experts"
        scale = (
            None
            if group is None
            else scale_in_effect(sublayer, group, self.model.weights, unquantized)
        )
        return SublayerResult(
            weights,
            unquantized,
            observed.routed,
            linear_input(
                observed.inputs[site], self.solvers, scale, drift=observed.drifts.get(site)
            ),
        )

    def _loaded(self, unit: str) -> tuple[Mapping[str, Weight], Mapping[str, Tensor]]:
        weights, unquantized = self.log.load(unit)
        self.log.note(f"{unit}: found finished")
        return weights, unquantized

    def _observed(self, sublayer: Sublayer, states: HiddenStatePair) -> SublayerStatistics:
        """Statistics on the quantized path. Without drift correction the original path advances
        here as well, so that the original matrices are read once."""
        self.log.begin_phase("observing", sublayer.name)
        tensors = self.model.weights.dequantized_all(sublayer.needed)
        observed = collect_statistics(
            sublayer, tensors, states, self.ranks, None if self.path is None else self.path.states
        )
        if self.path is None:
            self._advance_original(sublayer, tensors, states)
        return observed

    def _advance_original(
        self, sublayer: Sublayer, tensors: Mapping[str, Tensor], states: HiddenStatePair
    ) -> None:
        """The held-out tokens on the original path. Routed experts add their outputs afterwards."""
        advance(sublayer, tensors, states.original, NO_ACTIVATION_QUANTS, self.ranks)

    # --- after the last layer

    def _draft_blocks(self, blocks: Blocks) -> None:
        for layer in self.model.mtp_layers:
            self._layer(layer, blocks.states, blocks.attend)
        if self.ranks.is_main:
            self.log.findings.next_token |= blocks.accepted()

    def _quantize_head(self, states: HiddenStates) -> None:
        """Solve the head by the outputs of the final norm, or load what an earlier run wrote."""
        head, unit = self.residual.head, self.residual.head.module
        if self.log.store.done(unit):
            self.head = self._loaded(unit)[0][unit]
        else:
            self.log.begin_phase("observing", unit)
            observer = Observer(HELD_OUT_ROWS, self.ranks)
            for batch in states.batches():
                observer.held_out = batch.held_out
                observer(unit, self.embed_and_head.final_norm(states.hidden[batch.part]))
            read = linear_input(observer.finish()[unit], self.solvers, None)
            self.log.begin_phase("solving", unit)
            solver, weights = self.solvers.of(unit), {unit: self.model.weights.dequantized(head)}
            solved = solver.solve_stack(weights, {}, read.curvature, read.sample)
            result = solver.with_input_divisor(solved[unit], read.largest).result
            self.log.write(unit, {unit: result}, {}, {}, owned=self.ranks.is_main)
            self.head = result.weight
        self.log.finish(unit)

    def _compare_next_tokens(self, states: HiddenStatePair) -> None:
        """Compare the next-token distributions of the paths on held-out tokens. Not saved for a
        restart: it follows from the last layer."""
        head, logits = self.residual.head, self.embed_and_head.logits
        self.log.begin_phase("judging", head.module)
        step = max(1, len(states.original.hidden) // JUDGED_TOKENS)
        original, quantized, *unquantized = (
            self.embed_and_head.final_norm(hidden[::step][:JUDGED_TOKENS])
            for hidden in (
                states.original.hidden
                if self.unpruned is None
                else self.unpruned.to(states.original.hidden.device),
                states.quantized.hidden[states.quantized.fitted :],
                *(() if self.rtn is None else (self.rtn.states.hidden,)),
            )
        )
        weights, paths = self.model.weights, [quantized, *unquantized]
        heads: list[Iterable[Tensor]] = []
        if self.head is not None:
            solver = self.solvers.of(head.module)
            paths = [solver.activation_quant(self.head)(path) for path in paths]
            heads.append(dequantize(self.head).split(JUDGED_ROWS))
            if unquantized:
                rounded = solver.rtn_values({head.module: weights.dequantized(head)}, {})
                heads.append(rounded[head.module].split(JUDGED_ROWS))
        blocks = weights.blocks(head, JUDGED_ROWS)
        own, *others = compare_paths(original, paths, blocks, logits, heads)
        found = asdict(own)
        if others:
            found["plain_kl"] = others[0].kl
        self.log.findings.next_token = found
