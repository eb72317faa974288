"""How much each routed expert adds, on the source as it is: what decides which are pruned.

REAP (arXiv 2510.13999, equation 9): the mean over the tokens that chose an expert of its router
weight times the norm of its output. An expert that nobody chose adds nothing. The source is walked
sublayer by sublayer, experts a batch at a time, as in a calibrated run; the hidden states after
each layer are kept, so that a stopped walk goes on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from quantkit.calibrate.allocator import keep_freed_blocks
from quantkit.calibrate.batches import Batches
from quantkit.calibrate.data import Sequences
from quantkit.calibrate.embed_and_head import TableEnds
from quantkit.calibrate.expert_layer import expert_batch_values, expert_batches, expert_weights
from quantkit.calibrate.experts import add_weighted
from quantkit.calibrate.hidden_states import HiddenStatePair, HiddenStates
from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.mtp import mtp_states
from quantkit.calibrate.post_moe import feed_forward
from quantkit.calibrate.routing import Recorder, Routed
from quantkit.calibrate.source_model import SourceModel
from quantkit.calibrate.sublayer import Run, run_attention
from quantkit.calibrate.units import attend_unit, feed_forward_unit


@dataclass
class Saliency:
    """layers: float64 of every expert, by layer, MTP layers included. held_out: float32 [T, H],
    hidden states of the held-out tokens after the last decoder layer; None before that."""

    layers: dict[int, list[float]] = field(default_factory=dict)
    held_out: Tensor | None = None


class SaliencyStore(Protocol):
    """What a walk keeps for a restart."""

    def save(self, layer: int, hidden: Tensor, found: Saliency) -> None:
        """Keep the hidden states at the input of decoder layer `layer`, and what was found before
        it."""

    def load(self) -> tuple[int, Tensor, Saliency] | None: ...


Tell = Callable[[int], None]
"""Called with the number of each layer that is begun."""


class SaliencyWalk:
    """One walk over a source. batches: how much is in work at a time."""

    def __init__(
        self, model: SourceModel, batches: Batches, store: SaliencyStore, tell: Tell
    ) -> None:
        self.model, self.batches, self.store, self.tell = model, batches, store, tell

    @torch.inference_mode()
    def run(self, sequences: Sequences) -> Saliency:
        keep_freed_blocks()
        begun = self.store.load()
        if begun is None:
            first, states, found = (
                self.model.layers[0],
                self._states(self._embedded(sequences), sequences),
                Saliency(),
            )
        else:
            first, hidden, found = begun
            states = self._states(hidden, sequences)
        for layer in self.model.layers:
            if layer >= first:
                self._layer(layer, states, found)
                self.store.save(layer + 1, states.hidden, found)
        found.held_out = states.hidden[states.fitted :].clone()
        for layer in self.model.mtp_layers:
            if self.model.experts(layer):
                self._layer(layer, self._mtp_states(layer, states, sequences), found)
        return found

    def _embedded(self, sequences: Sequences) -> Tensor:
        ends = TableEnds(self.model.weights, self.model.rows, self.model.config)
        return ends.embedded([*sequences.calibration, *sequences.held_out])

    def _states(self, hidden: Tensor, sequences: Sequences) -> HiddenStates:
        lengths = [len(s) for s in (*sequences.calibration, *sequences.held_out)]
        fitted = sum(len(s) for s in sequences.calibration)
        return HiddenStates(
            hidden.to(self.model.weights.device), fitted, lengths, self.batches.tokens
        )

    def _mtp_states(self, layer: int, states: HiddenStates, sequences: Sequences) -> HiddenStates:
        fitted = Sequences([*sequences.calibration, *sequences.held_out], [])
        nothing = HiddenStates(states.hidden[:0], 0, [], states.batch_tokens)
        found = mtp_states(self.model, layer, HiddenStatePair(states, nothing), fitted).quantized
        found.fitted = sum(len(s) - 1 for s in sequences.calibration)
        return found

    # --- one layer
    # -------------------------------------------------------------------------------------------------------

    def _layer(self, layer: int, states: HiddenStates, found: Saliency) -> None:
        self.tell(layer)
        self._advance(attend_unit(layer), layer, states, run_attention)
        with feed_forward(self.model, layer, [states]) as run:
            routed = self._advance(feed_forward_unit(layer), layer, states, run)
            if routed is not None:
                found.layers[layer] = self._experts(layer, states, routed)

    def _advance(self, unit: str, layer: int, states: HiddenStates, run: Run) -> Routed | None:
        """Replace the hidden states by those after the sublayer; routed experts add their outputs
        afterwards."""
        model = self.model
        _, needed = model.sublayer_rows(unit, layer)
        recorder = Recorder(len(states.hidden))
        block = model.architecture.DecoderLayer(
            model.config, layer, LayerWeights(model.weights.dequantized_all(needed), recorder)
        )
        for batch in states.batches():
            states.hidden[batch.part] = run(block, states.hidden[batch.part], batch.lengths)
        return recorder.routed(states.fitted, 0)

    def _experts(self, layer: int, states: HiddenStates, routed: Routed) -> list[float]:
        """Add the outputs of the layer's experts; what each adds to calibration tokens."""
        experts, weights = self.model.experts(layer), self.model.weights
        found: list[float] = []
        batches = list(
            expert_batches(experts, expert_batch_values(weights.device.type, self.batches))
        )
        for batch, following in zip(batches, [*batches[1:], []]):
            originals = {}
            for expert in batch:
                values = {row.module: weights.dequantized(row) for row in experts[expert].rows}
                originals[expert] = expert_weights(self.model, experts[expert], values)
            weights.will_read(row for expert in following for row in experts[expert].rows)
            for expert, original in originals.items():
                tokens, w = routed.of(expert)
                outputs = original(routed.x[tokens])
                fitted = int((tokens < routed.fitted).sum())
                found.append(mean_contribution(outputs[:fitted], w[:fitted]))
                add_weighted(states, tokens, outputs, w)
        return found


def mean_contribution(outputs: Tensor, w: Tensor) -> float:
    """outputs [n, H], router weights [n] -> mean of w |output|; 0 for no token."""
    return float((w * outputs.norm(dim=1)).double().mean()) if len(w) else 0.0


def choose_kept(
    saliency: Mapping[int, list[float]], groups: int, share: int
) -> dict[int, list[int]]:
    """The `share` experts of each group that add most, rising, by layer. Groups are equal parts of
    the experts in their order."""
    kept = {}
    for layer, values in saliency.items():
        parts = torch.tensor(values, dtype=torch.float64).view(groups, -1)
        best = parts.argsort(dim=1, descending=True, stable=True)[:, :share].sort(dim=1).values
        kept[layer] = (best + torch.arange(groups)[:, None] * parts.shape[1]).flatten().tolist()
    return kept
