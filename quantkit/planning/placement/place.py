"""place(): the routed experts of every layer on devices, so that none waits for another.

Counts and headers are read, and one file is written. The balance that is told is the mean load over
the largest of a layer's devices,
averaged over layers: of a step's time in the experts, the share in which a device works.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.remote import open_headers
from quantkit.common.atomic_write import check_writable, write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.common.result import Result
from quantkit.common.sizes import format_bytes
from quantkit.engines.memory import ParallelSizes, fit
from quantkit.models.expert_counts import ExpertCounts
from quantkit.models.stored_parameters import Model, read_model
from quantkit.planning.devices import Devices
from quantkit.planning.placement.balance import Loads, Slots, balance, copy_experts, place_layer
from quantkit.planning.placement.layouts import PlacedLayers, find_layout
from quantkit.planning.plan import MEMORY_FRACTION, RESERVE_GIB

ENOUGH = 0.95
"""A balance that nobody gains much over; the redundancy that is advised reaches it."""
_MOST_DEVICES = 4096
_CONTEXT = 4096
"""Tokens of the request that must fit beside the weights."""


@dataclass(frozen=True, repr=False)
class ExpertPlacement(Result):
    """What was placed. redundant: copies of a layer, on average. balance, worst_balance: on the
    counts, mean and smallest over layers;
    held_out_balance: on other counts, where they were given. in_order_balance: of experts in their
    order and without copies, where they
    divide. expert_bytes: of one expert as MODEL stores it. device_bytes: of the experts that a
    device holds; copies_bytes: of those, what
    copies take. fits: whether that fits beside the rest; None where no memory was given."""

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
    """The smallest redundancy whose balance is ENOUGH on the counts; None where none is."""

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
                f"{format_bytes(self.device_bytes)} of experts, {format_bytes(self.copies_bytes)} of that for "
                "copies",
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
    """Write to `out` (by default expert-placement-ENGINE beside where you are) where each expert of
    `model` lies and which have copies.

    counts: a file of what the experts were asked. devices: their number, or with their memory, in
    which the copies must fit. redundant: copies a layer; with omni-infer, whose layers may have
    different numbers, on average. held_out: counts of another text, to judge by. Raises
    QuantkitError where these do not belong together, before anything is written.
    """
    layout = find_layout(engine)
    checkpoint = open_headers(str(model))
    read = read_model(checkpoint)
    number = devices if isinstance(devices, int) else devices.count
    loads = _loads(ExpertCounts.read(counts), counts, checkpoint, read)
    others = (
        None
        if held_out is None
        else _loads(ExpertCounts.read(held_out), held_out, checkpoint, read)
    )
    experts = len(next(iter(loads.values())))
    _check_slots(experts, number, redundant)
    fits = None if isinstance(devices, int) else _check_fits(checkpoint, devices, redundant)
    target = out or Path(f"expert-placement-{engine}{layout.suffix}")
    check_writable(target, "--out")
    placed = PlacedLayers(
        place_layers(loads, number, redundant, uneven=layout.uneven),
        read.config.num_hidden_layers,
        experts,
    )
    write_atomic(target, layout.write(placed))
    found = {layer: balance(slots, loads[layer]) for layer, slots in placed.layers.items()}
    mean = float(np.mean(list(found.values())))
    expert_bytes, total = _expert_bytes(checkpoint, read)
    held = sum(slots.shape[1] for slots in placed.layers.values()) * expert_bytes
    return ExpertPlacement(
        model=str(checkpoint.path),
        engine=engine,
        file=target,
        options=layout.options(placed, target),
        note=layout.note,
        devices=number,
        experts=experts,
        redundant=redundant,
        slots=tuple(slots.shape[1] for slots in placed.layers.values()),
        balance=mean,
        worst_balance=min(found.values()),
        in_order_balance=_in_order(loads, number),
        held_out_balance=None
        if others is None
        else float(np.mean([balance(s, others[layer]) for layer, s in placed.layers.items()])),
        expert_bytes=expert_bytes,
        device_bytes=held,
        copies_bytes=max(held - total // number, 0),
        fits=fits,
        advised=redundant if mean >= ENOUGH else _advised(loads, number, redundant),
    )


def place_layers(
    loads: Mapping[int, Loads], devices: int, redundant: int, *, uneven: bool = False
) -> dict[int, Slots]:
    """Every layer by itself. uneven: layers may have different numbers of slots, `redundant` copies
    on average."""
    slots = (len(next(iter(loads.values()))) + redundant) // devices
    tried = _Tried(loads, devices)
    chosen = _share_out(tried, slots) if uneven else dict.fromkeys(loads, slots)
    return {layer: tried.placed(layer, count) for layer, count in chosen.items()}


class _Tried:
    """Placements of layers with different numbers of slots, each made once."""

    def __init__(self, loads: Mapping[int, Loads], devices: int) -> None:
        self.loads, self.devices = loads, devices
        self.experts = len(next(iter(loads.values())))
        self._placed: dict[tuple[int, int], Slots] = {}

    def placed(self, layer: int, slots: int) -> Slots:
        if (layer, slots) not in self._placed:
            self._placed[layer, slots] = place_layer(self.loads[layer], self.devices, slots)
        return self._placed[layer, slots]

    def wait(self, layer: int, slots: int) -> float:
        """What the busiest device has to do, in what an even share would be."""
        return 1 / balance(self.placed(layer, slots), self.loads[layer])

    def gain(self, layer: int, slots: int) -> float:
        """What one slot more on every device saves of it; nothing where a device has all
        experts."""
        return (
            self.wait(layer, slots) - self.wait(layer, slots + 1)
            if slots < self.experts
            else -math.inf
        )


def _share_out(tried: _Tried, average: int) -> dict[int, int]:
    """Slots of each layer: the next goes where it saves most. All alike where that is better."""
    layers = list(tried.loads)
    counts = dict.fromkeys(layers, -(-tried.experts // tried.devices))
    for _ in range(average * len(layers) - sum(counts.values())):
        layer = max(layers, key=lambda one: (tried.gain(one, counts[one]), -counts[one]))
        counts[layer] += 1
    alike = dict.fromkeys(layers, average)
    return min(
        alike,
        counts,
        key=lambda chosen: sum(tried.wait(layer, count) for layer, count in chosen.items()),
    )


def _loads(
    counts: ExpertCounts, file: Path, checkpoint: Checkpoint, model: Model
) -> dict[int, Loads]:
    """Of the decoder layers with experts. Raises QuantkitError where the counts are of another
    model, or of no text."""
    config, told = model.config, str(checkpoint.config.get("model_type"))
    remedy = "count with this model, or with the one that it was quantized from"
    if config.routing is None:
        raise QuantkitError(
            f"{checkpoint.path} has no routed experts to place", "give a mixture of experts"
        )
    layers = [layer for layer in range(config.num_hidden_layers) if config.is_moe(layer)]
    theirs = {
        "model_type": counts.model_type,
        "hidden_size": counts.hidden_size,
        "experts": counts.experts,
    }
    ours = {
        "model_type": told,
        "hidden_size": config.hidden_size,
        "experts": config.routing.n_routed_experts,
    }
    for name, value in ours.items():
        if theirs[name] != value:
            raise QuantkitError(
                f"{file} is of a model with {name} {theirs[name]}, and {checkpoint.path} has "
                f"{value}",
                remedy,
            )
    lacking = [layer for layer in layers if layer not in counts.layers]
    beyond = [
        layer
        for layer in counts.layers
        if layer >= config.num_hidden_layers + config.num_nextn_predict_layers
    ]
    if lacking or beyond:
        what = f"counts no layer {lacking[0]}" if lacking else f"counts layer {beyond[0]}"
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
    """Every device has as many slots, at least one and no more than there are experts."""
    if not 1 <= devices <= _MOST_DEVICES or redundant < 0:
        told = f"{redundant} copies on {devices} devices make no sense"
        raise QuantkitError(
            told, f"give --devices from 1 to {_MOST_DEVICES} and --redundant from 0 on"
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
    """True; raises QuantkitError where weights, copies and one request do not fit on a device,
    whose attention is whole."""
    world = ParallelSizes(tensor=1, data=devices.count, expert=True, redundant=redundant)
    found = fit(
        checkpoint, world, _CONTEXT, devices.memory_bytes / 2**30, MEMORY_FRACTION, RESERVE_GIB
    )
    if not found.fits:
        raise QuantkitError(
            f"{format_bytes(found.weight_bytes)} of weights with {redundant} copies a layer, and the cache "
            f"of {_CONTEXT} tokens, do not fit in "
            f"{format_bytes(found.usable_bytes - found.reserve_bytes)} of a device",
            "give fewer copies, or more devices",
        )
    return True


def _expert_bytes(checkpoint: Checkpoint, model: Model) -> tuple[int, int]:
    """Of the largest routed expert as it is stored, and of all in the decoder layers."""
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


def _in_order(loads: Mapping[int, Loads], devices: int) -> float | None:
    """The balance that engines begin with."""
    experts = len(next(iter(loads.values())))
    if experts % devices:
        return None
    return float(
        np.mean([balance(np.arange(experts).reshape(devices, -1), load) for load in loads.values()])
    )


def _advised(loads: Mapping[int, Loads], devices: int, redundant: int) -> int | None:
    """The next redundancy that is enough, looked for up to four times the experts."""
    experts = len(next(iter(loads.values())))
    for more in range(redundant + devices, min(4 * experts, experts * (devices - 1)) + 1, devices):
        bound = np.mean([_bound(load, devices, experts + more) for load in loads.values()])
        if bound < ENOUGH:
            continue
        placed = place_layers(loads, devices, more)
        if np.mean([balance(placed[layer], load) for layer, load in loads.items()]) >= ENOUGH:
            return more
    return None


def _bound(load: Loads, devices: int, slots: int) -> float:
    """No placement of so many slots is more even: its busiest copy lies somewhere."""
    busiest = float((load / copy_experts(load, slots, devices)).max())
    return min(1.0, float(load.sum()) / devices / busiest)
