"""Placement of one layer's routed experts on device slots, so that all devices have equal load.

Three steps. Copies: while slots are left, the expert with the highest load per copy gets one more;
no other choice lowers the maximum load per copy. Packing: the copy with the highest load goes to
the device with the lowest load that has a free slot and no copy of the same expert. Refinement:
slots of two devices are exchanged, or a copy is replaced by one of another expert, as long as that
lowers the sum of squared loads.

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
_CANDIDATES = 4
"""Number of least loaded devices that are tried for one more copy of a busy expert."""
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
    """Apply exchanges and conversions until none helps."""
    search = _Search(placed, loads, copies)
    for _ in range(_MAX_EXCHANGES * len(placed)):
        if not (search.exchange() or search.convert()):
            break
    return search.placed


class _Search:
    """A placement under refinement: placed [D, S], each (load per copy) [E], load [D], holds [D,
    E]."""

    def __init__(self, placed: Slots, loads: Loads, copies: np.ndarray) -> None:
        self.placed, self.loads, self.copies = placed.copy(), loads, copies.copy()
        self.each = loads / self.copies
        self.load = self.each[self.placed].sum(axis=1)
        self.holds = np.zeros((len(placed), len(loads)), dtype=bool)
        self.holds[np.arange(len(placed))[:, None], self.placed] = True
        self.least_gain = _MIN_GAIN * float(self.load.mean()) ** 2

    def exchange(self) -> bool:
        """Exchange the two slots with the largest gain, one of them on the most loaded device that
        has one; False if no exchange helps."""
        mean = self.load.mean()
        for device in np.argsort(-self.load, kind="stable"):
            if self.load[device] <= mean:
                return False
            own = self.placed[device]
            # moved [S, D, S]: load that the device loses by exchanging slot s for slot t of device
            # d.
            moved = self.each[own][:, None, None] - self.each[self.placed][None]
            saved = 2 * moved * (self.load[device] - self.load[None, :, None] - moved)
            invalid = self.holds[:, own].T[:, :, None] | self.holds[device][self.placed][None]
            saved[invalid] = 0.0
            best = int(saved.argmax())
            if saved.flat[best] > self.least_gain:
                slot, other, other_slot = (int(i) for i in np.unravel_index(best, saved.shape))
                self._swap(int(device), slot, other, other_slot)
                return True
        return False

    def _swap(self, device: int, slot: int, other: int, other_slot: int) -> None:
        own, other_expert = self.placed[device, slot], self.placed[other, other_slot]
        self.placed[device, slot], self.placed[other, other_slot] = other_expert, own
        self.holds[device, own] = self.holds[other, other_expert] = False
        self.holds[device, other_expert] = self.holds[other, own] = True
        moved = self.each[own] - self.each[other_expert]
        self.load[device] -= moved
        self.load[other] += moved

    def convert(self) -> bool:
        """Replace a copy of an expert that has several by a copy of one of the most loaded device's
        experts; False if that does not help."""
        found = [
            self._best_conversion(int(wanted)) for wanted in self.placed[int(self.load.argmax())]
        ]
        after, device, slot, wanted = min(found)
        if float(np.square(self.load).sum()) - after <= self.least_gain:
            return False
        own = self.placed[device, slot]
        self.placed[device, slot] = wanted
        self.holds[device, own], self.holds[device, wanted] = False, True
        self.copies[own] -= 1
        self.copies[wanted] += 1
        self.each = self.loads / self.copies
        self.load = self.each[self.placed].sum(axis=1)
        return True

    def _best_conversion(self, wanted: int) -> tuple[float, int, int, int]:
        """The lowest sum of squares with one more copy of `wanted`, and its device and slot; only
        the least loaded devices are tried."""
        hosts = self.holds[:, wanted]
        with_copy = self.loads[wanted] / (self.copies[wanted] + 1)
        base = self.load - hosts * (self.each[wanted] - with_copy)
        best = (float("inf"), 0, 0, wanted)
        for device in np.argsort(base, kind="stable")[:_CANDIDATES]:
            for slot, own in enumerate(self.placed[device]):
                if hosts[device] or self.copies[own] < 2:
                    continue
                without_copy = self.loads[own] / (self.copies[own] - 1)
                load = base + self.holds[:, own] * (without_copy - self.each[own])
                load[device] += with_copy - without_copy
                best = min(best, (float(np.square(load).sum()), int(device), slot, wanted))
        return best
