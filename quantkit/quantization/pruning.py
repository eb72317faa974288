"""Expert pruning: the sizes a model can have, which experts contribute least, and the checkpoint
without them.

    pruned = open_pruned(checkpoint, 0.25)           a checkpoint of the smaller model's names and shapes, from headers
    found = prune(pruned, ...)                       which experts are kept; from now on the checkpoint holds these

REAP (arXiv 2510.13999, equation 9): the mean over the tokens routed to an expert of its router
weight times the norm of its output; 0 without tokens. The source is walked sublayer by sublayer,
experts a batch at a time, as in a calibrated run; the hidden states after each layer are kept, so
that a stopped walk resumes.

Every layer keeps the same number of experts, and every group of them the same share: engines read
one number of experts, and groups are equal parts. Router rows and correction biases are removed
with them, in MTP layers too; a table of experts by token id gets others in the place of those that
are gone (`checkpoint.pruned.renumbered`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quantkit.calibrate.data import Sequences
from quantkit.calibrate.embed_and_head import TableEmbedAndHead, embedded_states, mtp_states
from quantkit.calibrate.expert_layer import expert_batch_values, expert_batches, expert_weights
from quantkit.calibrate.experts import add_weighted
from quantkit.calibrate.hidden_states import (
    Batches,
    HiddenStatePair,
    HiddenStates,
    RoutedTokens,
    RoutingRecorder,
    keep_freed_blocks,
    stored_states,
)
from quantkit.calibrate.source_model import (
    ParameterReader,
    SourceModel,
    attend_unit,
    feed_forward_unit,
)
from quantkit.calibrate.sublayer import (
    LayerWeights,
    Run,
    decoder_layer,
    feed_forward,
    run_attention,
)
from quantkit.checkpoint.header import save_tensors
from quantkit.checkpoint.pruned import PrunedCheckpoint, TensorSelection
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.source_guard import Stamp, file_stamps
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_json
from quantkit.models import find_architecture, is_known
from quantkit.models.mtp import has_block_head
from quantkit.models.stored_parameters import Model, read_model
from quantkit.models.table import Parameter


@dataclass
class Saliency:
    """layers: float64 of every expert, by layer, MTP layers included. held_out: float32 [T, H],
    hidden states of the held-out tokens after the last decoder layer; None before that."""

    layers: dict[int, list[float]] = field(default_factory=dict)
    held_out: Tensor | None = None


@dataclass(frozen=True)
class SaliencyWalk:
    """One walk over a source. batches: how much is processed at a time. report: called with the
    number of each layer at its start. scratch: as of `HiddenStates`."""

    model: SourceModel
    batches: Batches
    store: "_Store"
    report: Callable[[int], None]
    scratch: Path | None = None

    @torch.inference_mode()
    def run(self, sequences: Sequences) -> Saliency:
        keep_freed_blocks()
        saved = self.store.load(self.scratch)
        if saved is None:
            first, states, found = (
                self.model.layers[0],
                self._states(self._embedded(sequences), sequences),
                Saliency(),
            )
        else:
            first, hidden, found = saved
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
        embed_and_head = TableEmbedAndHead(self.model.weights, self.model.rows, self.model.config)
        every = [*sequences.calibration, *sequences.held_out]
        return embedded_states(embed_and_head, every, self.scratch)

    def _states(self, hidden: Tensor, sequences: Sequences) -> HiddenStates:
        lengths = [len(s) for s in (*sequences.calibration, *sequences.held_out)]
        fitted = sum(len(s) for s in sequences.calibration)
        hidden = hidden.to(self.model.weights.device)
        return HiddenStates(hidden, fitted, lengths, self.batches.tokens, self.scratch)

    def _mtp_states(self, layer: int, states: HiddenStates, sequences: Sequences) -> HiddenStates:
        fitted = Sequences([*sequences.calibration, *sequences.held_out], [])
        nothing = HiddenStates(states.hidden[:0], 0, [], states.batch_tokens, self.scratch)
        found = mtp_states(self.model, layer, HiddenStatePair(states, nothing), fitted).quantized
        found.fitted = sum(len(s) - 1 for s in sequences.calibration)
        return found

    # --- one layer

    def _layer(self, layer: int, states: HiddenStates, found: Saliency) -> None:
        self.report(layer)
        self._advance(attend_unit(layer), layer, states, run_attention)
        with feed_forward(self.model, layer, [states]) as run:
            routed = self._advance(feed_forward_unit(layer), layer, states, run)
            if routed is not None:
                found.layers[layer] = self._experts(layer, states, routed)

    def _advance(
        self, unit: str, layer: int, states: HiddenStates, run: Run
    ) -> RoutedTokens | None:
        """Replace the hidden states by those after the sublayer; routed experts add their outputs
        afterwards."""
        model = self.model
        _, needed = model.sublayer_rows(unit, layer)
        recorder = RoutingRecorder(len(states.hidden))
        weights = LayerWeights(model.weights.dequantized_all(needed), recorder)
        block = decoder_layer(model, layer, weights)
        for batch in states.batches():
            states.put(batch.part, run(block, states.hidden[batch.part], batch.lengths))
        return recorder.routed(states.fitted, 0)

    def _experts(self, layer: int, states: HiddenStates, routed: RoutedTokens) -> list[float]:
        """Add the outputs of the layer's experts; returns each one's saliency on calibration
        tokens."""
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
    """outputs [n, H], router weights [n] -> mean of w |output|; 0 without tokens."""
    return float((w * outputs.norm(dim=1)).double().mean()) if len(w) else 0.0


def experts_to_keep(
    saliency: Mapping[int, list[float]], groups: int, share: int
) -> dict[int, list[int]]:
    """The `share` experts of each group that contribute most, ascending, by layer. Groups are equal
    parts of the experts in their order."""
    kept = {}
    for layer, values in saliency.items():
        parts = torch.tensor(values, dtype=torch.float64).view(groups, -1)
        best = parts.argsort(dim=1, descending=True, stable=True)[:, :share].sort(dim=1).values
        kept[layer] = (best + torch.arange(groups)[:, None] * parts.shape[1]).flatten().tolist()
    return kept


FILE_NAME = "pruning.json"
"""An output's record of its pruned experts."""
COUNT_KEYS = (
    "n_routed_experts",
    "num_routed_experts",
    "num_experts",
    "num_local_experts",
    "moe_num_experts",
)
"""Keys of config.json for the number of routed experts."""


def open_pruned(checkpoint: Checkpoint, share: float) -> PrunedCheckpoint:
    """`checkpoint` without a `share` of its routed experts, as many as whole groups allow,
    provisionally the last of each group.

    Raises QuantkitError if the model has none, or if fewer would be left than a token chooses.
    """
    if not is_known(checkpoint.config):
        message = (
            f"model_type {checkpoint.config.get('model_type')!r} of "
            f"{checkpoint.path / 'config.json'}"
        )
        raise QuantkitError(
            f"{message} is not one whose experts quantkit knows", "quantize it without --prune"
        )
    model = read_model(checkpoint)
    rows = _prunable(model)
    layers = sorted({row.layer for row in rows if row.expert is not None and row.layer is not None})
    if not layers:
        raise QuantkitError(
            f"{checkpoint.path} has no routed experts to prune", "quantize it without --prune"
        )
    sizes = _sizes(model, share)
    if any(row.expert is not None and row.projection is None for row in rows):
        raise QuantkitError(
            f"the routed experts of {checkpoint.path} have biases, which are not pruned here",
            "quantize it without --prune",
        )
    first = {
        layer: [
            group * sizes.of_group + number
            for group in range(sizes.groups)
            for number in range(sizes.kept)
        ]
        for layer in layers
    }
    _check_alike(checkpoint, rows)
    return PrunedCheckpoint(checkpoint, _config(checkpoint, sizes), _kept(checkpoint, rows, first))


def _prunable(model: Model) -> list[Parameter]:
    """The table without a head that drafts blocks, whose stages have experts of their own number."""
    has_head = has_block_head(model.rows)
    return [row for row in model.rows if not (has_head and row.mtp)]


@dataclass(frozen=True)
class PrunedExperts:
    """saliency and kept by layer; held_out as in `Saliency`."""

    saliency: dict[int, list[float]]
    kept: dict[int, list[int]]
    held_out: Tensor | None = None

    def to_bytes(self) -> bytes:
        layers = {
            str(layer): {"kept": self.kept[layer], "saliency": values}
            for layer, values in sorted(self.saliency.items())
        }
        return (json.dumps({"layers": layers}) + "\n").encode()


def prune(
    pruned: PrunedCheckpoint,
    sequences: Sequences,
    device: torch.device,
    batches: Batches,
    state: Path,
    report: Callable[[int], None],
    scratch: Path | None = None,
) -> PrunedExperts:
    """Find the experts that contribute least, or what an earlier run found and left in the folder
    `state`, and remove them from the checkpoint. scratch: of hidden states that do not fit into
    memory."""
    model = read_model(pruned.base)
    store = _Store(
        state, file_stamps(pruned.base.path, {info.shard for info in pruned.base.tensors.values()})
    )
    found = store.finished()
    if found is None:
        source = SourceModel(
            ParameterReader(pruned.base, device),
            model.architecture,
            model.config,
            _prunable(model),
            set(),
            set(),
        )
        scratch = scratch if device.type == "cpu" else None
        found = SaliencyWalk(source, batches, store, report, scratch).run(sequences)
        store.finish(found)
    routing = find_architecture(pruned.config).Config.from_dict(pruned.config).routing
    assert routing is not None
    kept = experts_to_keep(
        found.layers, routing.n_group, routing.n_routed_experts // routing.n_group
    )
    pruned.select(_kept(pruned.base, _prunable(model), kept))
    return PrunedExperts(found.layers, kept, found.held_out)


def prune_as(pruned: PrunedCheckpoint, out: Path) -> None:
    """See of the source what the finished output `out` was made from."""
    layers = read_json(out / FILE_NAME)["layers"]
    pruned.select(
        _kept(
            pruned.base,
            _prunable(read_model(pruned.base)),
            {int(layer): about["kept"] for layer, about in layers.items()},
        )
    )


def describe_pruning(checkpoint: Checkpoint) -> str:
    """Number of experts kept in a layer, in words; empty without pruning."""
    if not isinstance(checkpoint, PrunedCheckpoint):
        return ""
    counts = [
        find_architecture(one.config).Config.from_dict(one.config).routing
        for one in (checkpoint, checkpoint.base)
    ]
    kept, all_ = (0 if one is None else one.n_routed_experts for one in counts)
    return f"{kept} of {all_} in each layer are kept"


@dataclass(frozen=True)
class _Sizes:
    """groups of `of_group` experts each, of which `kept` are kept."""

    groups: int
    of_group: int
    kept: int


def _sizes(model: Model, share: float) -> _Sizes:
    routing = model.config.routing
    assert routing is not None, "experts and no routing"
    if not 0 < share < 1:
        raise QuantkitError(
            f"{share} of the experts cannot be pruned", "give a share between 0 and 1"
        )
    of_group = routing.n_routed_experts // routing.n_group
    left = of_group - int(of_group * share + 1e-9)
    message = (
        f"--prune {share:.0%} leaves {left} of the {of_group} experts of each of "
        f"{routing.n_group} groups"
    )
    least = max(
        -(-routing.num_experts_per_tok // routing.topk_group),
        2 if routing.topk_group < routing.n_group else 1,
    )
    most = 100 * (of_group - least) // of_group
    none = "leave --prune out: none can go"
    if left == of_group:
        fewest = -(-100 // of_group)
        raise QuantkitError(message, f"give --prune {fewest}% or more" if most > 0 else none)
    if left < least:
        why = (
            f"a token chooses {routing.num_experts_per_tok} experts of {routing.topk_group} groups"
        )
        raise QuantkitError(
            f"{message}, and {why}", f"give --prune {most}% or less" if most > 0 else none
        )
    return _Sizes(routing.n_group, of_group, left)


def _config(checkpoint: Checkpoint, sizes: _Sizes) -> dict[str, Any]:
    """config.json with the smaller number, verified by reading it."""
    before, after = sizes.groups * sizes.of_group, sizes.groups * sizes.kept
    config = _with_count(checkpoint.config, before, after)
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = _with_count(config["text_config"], before, after)
    routing = find_architecture(config).Config.from_dict(config).routing
    count = None if routing is None else routing.n_routed_experts
    assert count == after, f"{checkpoint.path}: which key of config.json counts experts?"
    return config


def _with_count(config: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    changed = {
        key: after if key in COUNT_KEYS and value == before else value
        for key, value in config.items()
    }
    if changed.get("dspark_block_size"):
        changed.setdefault("dspark_n_routed_experts", before)
    return changed


def _kept(
    checkpoint: Checkpoint, rows: list[Parameter], kept: Mapping[int, list[int]]
) -> TensorSelection:
    """Names of a checkpoint whose layers keep these experts, renumbered in their order. rows: its
    whole table."""
    experts = 1 + max(row.expert for row in rows if row.expert is not None)
    names = {name: name for name in checkpoint.tensors}
    cut: dict[str, list[int]] = {}
    modules = {
        (row.layer, row.expert, row.projection): row.module
        for row in rows
        if row.expert is not None
    }
    for module in modules.values():
        for name in checkpoint.parts(module):
            del names[name]
    for (layer, expert, projection), module in modules.items():
        if layer is None or expert is None or expert not in kept[layer]:
            continue
        seen_as = modules[layer, kept[layer].index(expert), projection]
        names |= {seen_as + name.removeprefix(module): name for name in checkpoint.parts(module)}
    for row in rows:
        if (
            row.role in ("router", "router_bias")
            and row.layer is not None
            and row.layer in kept
            and row.shape[0] == experts
        ):
            cut[row.name] = kept[row.layer]
    router = {row.layer: row.name for row in rows if row.role == "router"}
    tables = {row.name: router[row.layer] for row in rows if row.role == "router_table"}
    return TensorSelection(names, cut, tables)


def _check_alike(checkpoint: Checkpoint, rows: list[Parameter]) -> None:
    """Raise QuantkitError if experts of a layer are stored differently: the choice would change
    what is written."""
    found: dict[tuple[int | None, str | None], tuple[object, ...]] = {}
    for row in rows:
        if row.expert is not None:
            parts = [checkpoint.tensors[name] for name in checkpoint.parts(row.module)]
            stored = tuple(
                (info.name.removeprefix(row.module), info.dtype, info.shape) for info in parts
            )
            if found.setdefault((row.layer, row.projection), stored) != stored:
                raise QuantkitError(
                    f"{row.module} is stored in another way than other experts of its layer",
                    "quantize it without --prune",
                )


_HIDDEN = "saliency-hidden.safetensors"


@dataclass
class _Store:
    """Files of a walk in the state folder of an unfinished output. stamps: of the source's shards,
    by name.

    Results from shards that were modified since are not used: the walk starts anew. Units made with
    another choice of experts are detected by the source guard.
    """

    folder: Path
    stamps: dict[str, Stamp]
    done: str = field(default="saliency.safetensors")

    def save(self, layer: int, hidden: Tensor, found: Saliency) -> None:
        self._write(_HIDDEN, {"hidden": hidden}, found, layer)

    def load(self, scratch: Path | None) -> tuple[int, Tensor, Saliency] | None:
        found = self._read(_HIDDEN, "hidden", scratch)
        return None if found is None else (found[0], found[1], Saliency(found[2]))

    def finish(self, found: Saliency) -> None:
        assert found.held_out is not None
        self._write(self.done, {"held_out": found.held_out}, found, 0)
        (self.folder / _HIDDEN).unlink(missing_ok=True)

    def finished(self) -> Saliency | None:
        found = self._read(self.done, "held_out")
        return None if found is None else Saliency(found[2], found[1])

    def _read(
        self, name: str, key: str, scratch: Path | None = None
    ) -> tuple[int, Tensor, dict[int, list[float]]] | None:
        """Next layer, tensor and scores of a file; None without, or of a source that has changed."""
        path = self.folder / name
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["found"])
            if about["stamps"] != self.stamps:
                return None
            scores = {int(layer): values for layer, values in about["layers"].items()}
        return about["layer"], stored_states(path, key, scratch), scores

    def _write(self, name: str, tensors: dict[str, Tensor], found: Saliency, layer: int) -> None:
        about = json.dumps({"layer": layer, "layers": found.layers, "stamps": self.stamps})
        dense = {key: value.contiguous() for key, value in tensors.items()}
        save_tensors(self.folder / name, dense, {"found": about})
