"""Placement of one layer's routed experts on device slots, so that all devices have equal load.

Three steps. Copies: while slots are left, the expert with the highest load per copy gets one more;
no other choice lowers the maximum load per copy. Packing: the copy with the highest load goes to
the device with the lowest load that has a free slot and no copy of the same expert. Refinement:
slots of two devices are exchanged as long as that lowers the sum of squared loads.

The first two steps are those of DeepSeek's EPLB (github.com/deepseek-ai/EPLB, eplb.py:
`replicate_experts`, `balanced_packing`), except that EPLB allows several copies of one expert on a
device, which are useless. Tokens are assumed to be spread evenly over the copies.
"""

import heapq

import numpy as np

Loads = np.ndarray
"""float64 [experts]: load of each expert of a layer, in any unit."""
Slots = np.ndarray
"""int64 [devices, slots]: the expert in each slot of a layer. No device has an expert twice, and
every expert has a slot."""

_MAX_EXCHANGES = 400
"""Limit of exchanges per device during refinement."""
_MIN_GAIN = 1e-9
"""Minimum gain of an exchange relative to the squared mean load; less is rounding error."""


def place_layer(loads: Loads, devices: int, slots: int) -> Slots:
    """Slots of one layer's experts on `devices` of `slots` slots each; experts <= devices * slots
    <= experts * devices."""
    loads = np.maximum(loads.astype(np.float64), 0.0)
    total = loads.sum()
    # An expert without tokens still gets half a token, so that its copies are kept apart.
    shares = (loads + 0.5) / (total + 0.5 * len(loads))
    copies = copy_experts(shares, devices * slots, devices)
    return _refine(_pack(shares, copies, devices, slots), shares, copies)


def copy_experts(loads: Loads, slots: int, most: int) -> np.ndarray:
    """Number of copies of each expert, int64 [experts], that fill `slots` with at most `most` of
    one and minimize the maximum load per copy."""
    copies = np.ones(len(loads), dtype=np.int64)
    busiest = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(busiest)
    for _ in range(slots - len(loads)):
        while copies[busiest[0][1]] == most:
            heapq.heappop(busiest)
        expert = busiest[0][1]
        copies[expert] += 1
        heapq.heapreplace(busiest, (-loads[expert] / copies[expert], expert))
    return copies


def device_loads(placed: Slots, loads: Loads) -> np.ndarray:
    """Load of each device, float64 [devices]."""
    copies = np.bincount(placed.ravel(), minlength=len(loads))
    found: np.ndarray = (loads / np.maximum(copies, 1))[placed].sum(axis=1)
    return found


def balance(placed: Slots, loads: Loads) -> float:
    """Mean over maximum load of the devices; 1 is even, and also the value for a layer without
    load."""
    found = device_loads(placed, loads.astype(np.float64))
    return float(found.mean() / found.max()) if found.max() > 0 else 1.0


def _pack(loads: Loads, copies: np.ndarray, devices: int, slots: int) -> Slots:
    """Copies in order of load, each to the least loaded device that has a free slot and lacks the
    expert, or can be given one."""
    each = loads / copies
    busiest_first = np.argsort(-each, kind="stable")
    placed = np.full((devices, slots), -1, dtype=np.int64)
    for expert in np.repeat(busiest_first, copies[busiest_first]):
        lacking = ~(placed == expert).any(axis=1)
        load = np.where(placed >= 0, each[placed], 0.0).sum(axis=1)
        free = np.flatnonzero(lacking & (placed[:, -1] < 0))
        device = (
            free[load[free].argmin()] if len(free) else _make_room(placed, np.flatnonzero(lacking))
        )
        placed[device, int((placed[device] >= 0).sum())] = expert
    return placed


def _make_room(placed: Slots, lacking: np.ndarray) -> int:
    """Free a slot where every device with a free slot has the expert: a device that lacks it moves
    one of its experts to such a device. Returns the device with the freed slot.

    It has more experts than the other device, which also holds the expert to place, so one of its
    experts is missing there.
    """
    device, other = int(lacking[0]), int(np.flatnonzero(placed[:, -1] < 0)[0])
    own = np.flatnonzero(~np.isin(placed[device], placed[other]))[-1]
    placed[other, int((placed[other] >= 0).sum())] = placed[device, own]
    placed[device] = np.append(np.delete(placed[device], own), -1)
    return device


def _refine(placed: Slots, loads: Loads, copies: np.ndarray) -> Slots:
    """Exchange slots of two devices until no exchange helps."""
    placed, each = placed.copy(), loads / copies
    load = each[placed].sum(axis=1)
    holds = np.zeros((len(placed), len(loads)), dtype=bool)
    holds[np.arange(len(placed))[:, None], placed] = True
    for _ in range(_MAX_EXCHANGES * len(placed)):
        found = _best_exchange(placed, each, load, holds)
        if found is None:
            break
        device, slot, other, other_slot = found
        own, theirs = placed[device, slot], placed[other, other_slot]
        placed[device, slot], placed[other, other_slot] = theirs, own
        holds[device, own] = holds[other, theirs] = False
        holds[device, theirs] = holds[other, own] = True
        load[device] -= each[own] - each[theirs]
        load[other] += each[own] - each[theirs]
    return placed


def _best_exchange(
    placed: Slots, each: np.ndarray, load: np.ndarray, holds: np.ndarray
) -> tuple[int, int, int, int] | None:
    """Device, slot, other device and its slot with the largest gain, the first on the most loaded
    device that has one; None if no exchange helps. each [E]: load per copy; load [D]; holds [D,
    E]."""
    mean = load.mean()
    for device in np.argsort(-load, kind="stable"):
        if load[device] <= mean:
            return None
        own = placed[device]
        # moved [S, D, S]: load that the device loses by exchanging slot s for slot t of device d.
        moved = each[own][:, None, None] - each[placed][None]
        saved = 2 * moved * (load[device] - load[None, :, None] - moved)
        saved[holds[:, own].T[:, :, None] | holds[device][placed][None]] = 0.0
        best = int(saved.argmax())
        if saved.flat[best] > _MIN_GAIN * mean**2:
            slot, other, other_slot = (int(i) for i in np.unravel_index(best, saved.shape))
            return int(device), slot, other, other_slot
    return None
