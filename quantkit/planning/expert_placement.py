"""Placement of routed experts on devices for balanced load, written as the file that an engine
reads.

Reads expert counts and headers, and writes one file. Balance is the mean over the maximum load of a
layer's devices, averaged over layers: the share of the expert time in which a device is busy. The
formats:

- vllm: no release read a placement when this was written. The JSON of pull request 49572 ("Support
  custom initial expert maps", `eplb_config.initial_expert_map_path`): for every MoE layer the
  logical expert of each physical slot
- sglang: `--init-expert-location FILE.json`, {"physical_to_logical_map": [layers, slots]} with a
  row for every decoder layer, also dense ones: python/sglang/srt/eplb/expert_location.py,
  `compute_initial_expert_location_metadata` and `init_trivial`
- vllm-ascend: `expert_map_path` of `eplb_config`: vllm_ascend/eplb/core/eplb_utils.py,
  `expert_file_to_tensor`; layers are counted from the first with experts
- omni-infer: `pattern_path` of omni_placement's YAML, an .npy of 0 and 1 [devices, MoE layers,
  experts]: omni_placement/expert_mapping.py, `_load_placement_pattern_with_validation`

Slots are numbered device by device in all of them. MTP layers stay as the engine places them.
"""

import io
import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.checkpoint.reader import Checkpoint, open_headers
from quantkit.common.atomic_write import check_writable, write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.common.result import Result
from quantkit.common.sizes import format_bytes
from quantkit.engines.memory import ParallelSizes, fit
from quantkit.models.expert_counts import ExpertCounts
from quantkit.models.stored_parameters import Model, read_model
from quantkit.planning.device_fit import MEMORY_FRACTION, RESERVE_GIB
from quantkit.planning.devices import Devices
from quantkit.planning.expert_balance import Loads, Slots, balance, copy_experts, place_layer

ENOUGH = 0.95
"""A balance that leaves little to gain; the recommended redundancy reaches it."""
_MAX_DEVICES = 4096
_CONTEXT = 4096
"""Tokens of the request that must fit next to the weights."""


@dataclass(frozen=True, repr=False)
class ExpertPlacement(Result):
    """The result of a placement.

    redundant: average copies per layer. balance, worst_balance: on the counts, mean and minimum
    over layers; held_out_balance: on other counts, if given; in_order_balance: of experts in order
    without copies, if they divide evenly. expert_bytes: of one expert as stored; device_bytes: of
    the experts on a device; copies_bytes: the part of those for copies. fits: whether that fits
    next to the rest, None if no memory was given. advised: the smallest redundancy whose balance on
    the counts is ENOUGH, if any.
    """

    model: str
    engine: str
    file: Path
    options: str
    note: str
    devices: int
    experts: int
    redundant: int
    slots: tuple[int, ...]
    balance: float
    worst_balance: float
    in_order_balance: float | None
    held_out_balance: float | None
    expert_bytes: int
    device_bytes: int
    copies_bytes: int
    fits: bool | None
    advised: int | None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "file": str(self.file), "slots": list(self.slots)}

    @property
    def heading(self) -> str:
        return f"experts of {self.model} on {self.devices} devices, for {self.engine}"

    def facts(self) -> list[tuple[str, str]]:
        least, most = min(self.slots), max(self.slots)
        slots = f"{least}" if least == most else f"{least} to {most}"
        rows = [
            ("written to", str(self.file)),
            ("experts", f"{self.experts} and {self.redundant} copies a layer, {slots} a device"),
            ("balance", f"{self.balance:.3f}, of the worst layer {self.worst_balance:.3f}"),
        ]
        if self.in_order_balance is not None:
            rows.append(("  in order, no copies", f"{self.in_order_balance:.3f}"))
        if self.held_out_balance is not None:
            rows.append(("  on the held-out counts", f"{self.held_out_balance:.3f}"))
        if self.balance < ENOUGH:
            rows.append(("  for more", self._advice))
        rows.append(
            (
                "memory a device",
                f"{format_bytes(self.device_bytes)} of experts, "
                f"{format_bytes(self.copies_bytes)} of that for copies",
            )
        )
        if self.fits is not None:
            rows.append(("  fits", "yes"))
        return rows + [("start with", self.options)] + ([("note", self.note)] if self.note else [])

    @property
    def _advice(self) -> str:
        if self.advised is None:
            return f"no redundancy reaches {ENOUGH} on these devices"
        return f"--redundant {self.advised} reaches {ENOUGH}"


def place(
    model: str | Path,
    counts: Path,
    devices: int | Devices,
    *,
    engine: str,
    redundant: int = 0,
    held_out: Path | None = None,
    out: Path | None = None,
) -> ExpertPlacement:
    """Write the placement of `model`'s experts to `out`, by default expert-placement-ENGINE in the
    current directory.

    counts: file of tokens routed to each expert. devices: their number, or with their memory, in
    which the copies must fit. redundant: copies per layer; for omni-infer, whose layers may differ,
    on average. held_out: counts of another text, for evaluation. Raises QuantkitError if these do
    not match, before anything is written.
    """
    layout = find_layout(engine)
    checkpoint = open_headers(str(model))
    read = read_model(checkpoint)
    number = devices if isinstance(devices, int) else devices.count
    loads = _loads(ExpertCounts.read(counts), counts, checkpoint, read)
    held_out_loads = (
        None
        if held_out is None
        else _loads(ExpertCounts.read(held_out), held_out, checkpoint, read)
    )
    experts = _experts(loads)
    _check_slots(experts, number, redundant)
    fits = None if isinstance(devices, int) else _check_fits(checkpoint, devices, redundant)
    target = out or Path(f"expert-placement-{engine}{layout.suffix}")
    check_writable(target, "--out")
    placed = PlacedLayers(
        place_layers(loads, number, redundant, uneven=layout.uneven),
        read.config.num_hidden_layers,
        experts,
    )
    content, options = layout.write(placed, target)
    write_atomic(target, content)
    found = _balances(placed.layers, loads)
    mean = float(np.mean(found))
    expert_bytes, total = _expert_bytes(checkpoint, read)
    held = sum(slots.shape[1] for slots in placed.layers.values()) * expert_bytes
    return ExpertPlacement(
        model=str(checkpoint.path),
        engine=engine,
        file=target,
        options=options,
        note=layout.note,
        devices=number,
        experts=experts,
        redundant=redundant,
        slots=tuple(slots.shape[1] for slots in placed.layers.values()),
        balance=mean,
        worst_balance=min(found),
        in_order_balance=_default_balance(loads, number),
        held_out_balance=None
        if held_out_loads is None
        else float(np.mean(_balances(placed.layers, held_out_loads))),
        expert_bytes=expert_bytes,
        device_bytes=held,
        copies_bytes=max(held - total // number, 0),
        fits=fits,
        advised=redundant if mean >= ENOUGH else _advise_redundancy(loads, number, redundant),
    )


def place_layers(
    loads: Mapping[int, Loads], devices: int, redundant: int, *, uneven: bool = False
) -> dict[int, Slots]:
    """Slots of each layer. uneven: layers may have different numbers of slots, with `redundant`
    copies on average."""
    slots = (_experts(loads) + redundant) // devices
    cache = _PlacementCache(loads, devices)
    chosen = _distribute_slots(cache, slots) if uneven else dict.fromkeys(loads, slots)
    return {layer: cache.placed(layer, count) for layer, count in chosen.items()}


def _balances(placed: Mapping[int, Slots], loads: Mapping[int, Loads]) -> list[float]:
    """By layer."""
    return [balance(slots, loads[layer]) for layer, slots in placed.items()]


class _PlacementCache:
    """Placements by layer and number of slots, each computed once."""

    def __init__(self, loads: Mapping[int, Loads], devices: int) -> None:
        self.loads, self.devices = loads, devices
        self.experts = _experts(loads)
        self._placed: dict[tuple[int, int], Slots] = {}

    def placed(self, layer: int, slots: int) -> Slots:
        if (layer, slots) not in self._placed:
            self._placed[layer, slots] = place_layer(self.loads[layer], self.devices, slots)
        return self._placed[layer, slots]

    def wait(self, layer: int, slots: int) -> float:
        """Load of the busiest device relative to an even share."""
        return 1 / balance(self.placed(layer, slots), self.loads[layer])

    def gain(self, layer: int, slots: int) -> float:
        """Decrease of `wait` from one more slot per device; -inf if a device already has all
        experts."""
        return (
            self.wait(layer, slots) - self.wait(layer, slots + 1)
            if slots < self.experts
            else -math.inf
        )


def _distribute_slots(cache: _PlacementCache, average: int) -> dict[int, int]:
    """Slots of each layer: the next goes where it gains most. The same number for all layers if
    that is better."""
    layers = list(cache.loads)
    counts = dict.fromkeys(layers, -(-cache.experts // cache.devices))
    for _ in range(average * len(layers) - sum(counts.values())):
        layer = max(layers, key=lambda one: (cache.gain(one, counts[one]), -counts[one]))
        counts[layer] += 1
    uniform = dict.fromkeys(layers, average)
    return min(
        uniform,
        counts,
        key=lambda chosen: sum(cache.wait(layer, count) for layer, count in chosen.items()),
    )


def _loads(
    counts: ExpertCounts, file: Path, checkpoint: Checkpoint, model: Model
) -> dict[int, Loads]:
    """Loads of the decoder layers with experts. Raises QuantkitError if the counts are of another
    model or all zero."""
    config, model_type = model.config, str(checkpoint.config.get("model_type"))
    remedy = "count with this model, or with the one that it was quantized from"
    if config.routing is None:
        raise QuantkitError(
            f"{checkpoint.path} has no routed experts to place", "give a mixture of experts"
        )
    layers = [layer for layer in range(config.num_hidden_layers) if config.is_moe(layer)]
    for name, counted, value in (
        ("model_type", counts.model_type, model_type),
        ("hidden_size", counts.hidden_size, config.hidden_size),
        ("experts", counts.experts, config.routing.n_routed_experts),
    ):
        if counted != value:
            raise QuantkitError(
                f"{file} is of a model with {name} {counted}, and {checkpoint.path} has {value}",
                remedy,
            )
    missing = [layer for layer in layers if layer not in counts.layers]
    unknown = [
        layer
        for layer in counts.layers
        if layer >= config.num_hidden_layers + config.num_nextn_predict_layers
    ]
    if missing or unknown:
        what = f"counts no layer {missing[0]}" if missing else f"counts layer {unknown[0]}"
        raise QuantkitError(
            f"{file} {what}, and {checkpoint.path} has experts in {len(layers)} layers from "
            f"{layers[0]} on",
            remedy,
        )
    idle = [layer for layer in layers if not any(counts.layers[layer])]
    if idle:
        raise QuantkitError(
            f"{file} has nothing but zeros for layer {idle[0]}",
            "count over a text that is not empty",
        )
    return {layer: np.array(counts.layers[layer], dtype=np.float64) for layer in layers}


def _check_slots(experts: int, devices: int, redundant: int) -> None:
    """Check that every device has the same number of slots, at least one and at most the number of
    experts."""
    if not 1 <= devices <= _MAX_DEVICES or redundant < 0:
        problem = f"{redundant} copies on {devices} devices make no sense"
        raise QuantkitError(
            problem, f"give --devices from 1 to {_MAX_DEVICES} and --redundant from 0 on"
        )
    least, most = -experts % devices, experts * (devices - 1)
    if redundant > most:
        raise QuantkitError(
            f"{redundant} copies a layer are more than {devices} devices hold of {experts} experts "
            "without having one twice",
            f"give --redundant {most} at most",
        )
    if (experts + redundant) % devices:
        below = redundant - (experts + redundant) % devices
        legal = [str(one) for one in (below, below + devices) if least <= one <= most]
        raise QuantkitError(
            f"{experts} experts and {redundant} copies are {experts + redundant} slots, which "
            f"{devices} devices cannot share evenly",
            f"give --redundant {' or '.join(legal)}",
        )


def _check_fits(checkpoint: Checkpoint, devices: Devices, redundant: int) -> bool:
    """True; raises QuantkitError if weights, copies and one request do not fit on a device with
    whole attention."""
    world = ParallelSizes(tensor=1, data=devices.count, expert=True, redundant=redundant)
    found = fit(
        checkpoint, world, _CONTEXT, devices.memory_bytes / 2**30, MEMORY_FRACTION, RESERVE_GIB
    )
    if not found.fits:
        raise QuantkitError(
            f"{format_bytes(found.weight_bytes)} of weights with {redundant} copies a layer, and "
            f"the cache of {_CONTEXT} tokens, do not fit in "
            f"{format_bytes(found.usable_bytes - found.reserve_bytes)} of a device",
            "give fewer copies, or more devices",
        )
    return True


def _expert_bytes(checkpoint: Checkpoint, model: Model) -> tuple[int, int]:
    """Stored bytes of the largest routed expert, and of all routed experts in the decoder
    layers."""
    stored: dict[tuple[int | None, int], int] = {}
    for row in model.rows:
        if row.expert is not None and not row.mtp:
            names = (
                checkpoint.parts(row.module) if row.module in checkpoint.linears else (row.name,)
            )
            key = row.layer, row.expert
            stored[key] = stored.get(key, 0) + sum(
                checkpoint.tensors[name].nbytes for name in names
            )
    return max(stored.values()), sum(stored.values())


def _experts(loads: Mapping[int, Loads]) -> int:
    return len(next(iter(loads.values())))


def _default_balance(loads: Mapping[int, Loads], devices: int) -> float | None:
    """Balance of the engines' default placement."""
    experts = _experts(loads)
    if experts % devices:
        return None
    return float(
        np.mean([balance(np.arange(experts).reshape(devices, -1), load) for load in loads.values()])
    )


def _advise_redundancy(loads: Mapping[int, Loads], devices: int, redundant: int) -> int | None:
    """The next redundancy that reaches ENOUGH, searched up to four times the number of experts."""
    experts = _experts(loads)
    for more in range(redundant + devices, min(4 * experts, experts * (devices - 1)) + 1, devices):
        bound = np.mean([_bound(load, devices, experts + more) for load in loads.values()])
        if bound < ENOUGH:
            continue
        if np.mean(_balances(place_layers(loads, devices, more), loads)) >= ENOUGH:
            return more
    return None


def _bound(load: Loads, devices: int, slots: int) -> float:
    """Upper bound of the balance with that many slots, given by the load of the busiest copy."""
    busiest = float((load / copy_experts(load, slots, devices)).max())
    return min(1.0, float(load.sum()) / devices / busiest)


@dataclass(frozen=True)
class PlacedLayers:
    """layers: slots by layer number, of the decoder layers with routed experts. num_layers: decoder
    layers of the model."""

    layers: Mapping[int, Slots]
    num_layers: int
    experts: int

    @property
    def redundant(self) -> int:
        """Copies in the layer that has the most."""
        return max(slots.size for slots in self.layers.values()) - self.experts

    @property
    def devices(self) -> int:
        return len(next(iter(self.layers.values())))


@dataclass(frozen=True)
class PlacementFormat:
    """An engine's placement file. write: its bytes, and the engine options that load it. uneven:
    layers may have different numbers of slots. note: shown to the user."""

    suffix: str
    write: Callable[[PlacedLayers, Path], tuple[bytes, str]]
    uneven: bool = False
    note: str = ""


def find_layout(engine: str) -> PlacementFormat:
    if engine not in LAYOUTS:
        raise QuantkitError(
            f"no placement is written for engine {engine!r}", f"choose one of {', '.join(LAYOUTS)}"
        )
    return LAYOUTS[engine]


def _vllm(placed: PlacedLayers, file: Path) -> tuple[bytes, str]:
    config = {"num_redundant_experts": placed.redundant, "initial_expert_map_path": str(file)}
    options = f"--enable-eplb --eplb-config {shlex.quote(json.dumps(config))}"
    slots = [slots.ravel().tolist() for slots in placed.layers.values()]
    return _json(slots), f"--enable-expert-parallel {options}"


def _sglang(placed: PlacedLayers, file: Path) -> tuple[bytes, str]:
    count = next(iter(placed.layers.values())).size
    default = [slot % placed.experts for slot in range(count)]
    rows = [
        placed.layers[layer].ravel().tolist() if layer in placed.layers else default
        for layer in range(placed.num_layers)
    ]
    copies = f"--ep-num-redundant-experts {placed.redundant} " if placed.redundant else ""
    return _json({"physical_to_logical_map": rows}), (
        f"--ep-size {placed.devices} {copies}--ep-dispatch-algorithm static "
        f"--init-expert-location {shlex.quote(str(file))}"
    )


def _vllm_ascend(placed: PlacedLayers, file: Path) -> tuple[bytes, str]:
    layers = [
        {
            "layer_id": number,
            "device_count": len(slots),
            "device_list": [
                {"device_id": device, "device_expert": row.tolist()}
                for device, row in enumerate(slots)
            ],
        }
        for number, slots in enumerate(placed.layers.values())
    ]
    config = {
        "eplb_config": {"expert_map_path": str(file), "num_redundant_experts": placed.redundant}
    }
    return _json({"moe_layer_count": len(layers), "layer_list": layers}), (
        f"--enable-expert-parallel --additional-config {shlex.quote(json.dumps(config))}"
    )


def _omni(placed: PlacedLayers, file: Path) -> tuple[bytes, str]:
    pattern = np.zeros((placed.devices, len(placed.layers), placed.experts), dtype=np.int32)
    for number, slots in enumerate(placed.layers.values()):
        pattern[np.arange(placed.devices)[:, None], number, slots] = 1
    content = io.BytesIO()
    np.save(content, pattern, allow_pickle=False)
    return content.getvalue(), (
        f"pattern_path: {json.dumps(str(file))}, max_moe_layer_num: {len(placed.layers)} "
        "(omni_placement's YAML)"
    )


def _json(value: object) -> bytes:
    return (json.dumps(value) + "\n").encode()


LAYOUTS = {
    "vllm": PlacementFormat(
        ".json",
        _vllm,
        note="no release of vLLM reads a placement yet; this is the file of its pull request 49572",
    ),
    "sglang": PlacementFormat(".json", _sglang),
    "vllm-ascend": PlacementFormat(".json", _vllm_ascend),
    "omni-infer": PlacementFormat(".npy", _omni, uneven=True),
}
