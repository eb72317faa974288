"""Which expert lies in which slot of which device, so that all devices of a layer have the same to
do.

A layer's load is shared out in three steps. Copies: as long as there are slots, the expert whose
copies have most to do gets one more; no other choice makes the busiest copy less busy. Packing: the
busiest copy goes to the device that has least, as far as that has a free slot and no copy of the
same expert. Refining: slots of two devices are exchanged, or a copy becomes one of another expert,
as long as that lowers the sum of squared loads.

The first two are what DeepSeek's EPLB does (github.com/deepseek-ai/EPLB, eplb.py:
`replicate_experts`, `balanced_packing`), but for copies of one expert on one device, which EPLB
allows and which are of no use. Tokens are assumed to be spread evenly over the copies.
"""

import heapq

import numpy as np

Loads = np.ndarray
"""float64 [experts]: what the tokens of a layer ask of each expert, in any unit."""
Slots = np.ndarray
"""int64 [devices, slots]: the expert in each slot of a layer. No device has an expert twice, and
every expert is somewhere."""

_ROUNDS = 400
"""Exchanges that refining makes at most, for each device."""
_TRIED = 4
"""Devices with least to do that are offered one more copy of a busy expert."""
_GAIN = 1e-9
"""Share of the mean load, squared, that an exchange must save: less is rounding."""


def place_layer(loads: Loads, devices: int, slots: int) -> Slots:
    """The experts of one layer on `devices` of `slots` slots each; experts <= devices * slots <=
    experts * devices."""
    loads = np.maximum(loads.astype(np.float64), 0.0)
    total = loads.sum()
    # An expert that nobody asked for is not free: half a token keeps its copies apart from others.
    shares = (loads + 0.5) / (total + 0.5 * len(loads))
    copies = copy_experts(shares, devices * slots, devices)
    return _refined(_packed(shares, copies, devices, slots), shares, copies)


def copy_experts(loads: Loads, slots: int, most: int) -> np.ndarray:
    """How many copies of each expert fill `slots`, int64 [experts], at most `most` of one, with the
    busiest copy least busy."""
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
    """What each device has to do, float64 [devices]."""
    copies = np.bincount(placed.ravel(), minlength=len(loads))
    found: np.ndarray = (loads / np.maximum(copies, 1))[placed].sum(axis=1)
    return found


def balance(placed: Slots, loads: Loads) -> float:
    """Mean load over largest load of the devices; 1 is even, and so is a layer that nobody asks."""
    found = device_loads(placed, loads.astype(np.float64))
    return float(found.mean() / found.max()) if found.max() > 0 else 1.0


def _packed(loads: Loads, copies: np.ndarray, devices: int, slots: int) -> Slots:
    """Busiest copy first, to the device that has least of those with a free slot and without the
    expert, or that can be given one."""
    each = loads / copies
    busiest_first = np.argsort(-each, kind="stable")
    placed = np.full((devices, slots), -1, dtype=np.int64)
    for expert in np.repeat(busiest_first, copies[busiest_first]):
        lacking = ~(placed == expert).any(axis=1)
        taken = np.where(placed >= 0, each[placed], 0.0).sum(axis=1)
        free = np.flatnonzero(lacking & (placed[:, -1] < 0))
        device = (
            free[taken[free].argmin()] if len(free) else _make_room(placed, np.flatnonzero(lacking))
        )
        placed[device, int((placed[device] >= 0).sum())] = expert
    return placed


def _make_room(placed: Slots, lacking: np.ndarray) -> int:
    """Every device with a free slot has the expert: one of those that lack it gives one of its own
    to such a device. Returns which.

    It holds as many experts as there are slots, the other fewer, one of them the expert: so it
    holds one that the other does not.
    """
    device, other = int(lacking[0]), int(np.flatnonzero(placed[:, -1] < 0)[0])
    given = np.flatnonzero(~np.isin(placed[device], placed[other]))[-1]
    placed[other, int((placed[other] >= 0).sum())] = placed[device, given]
    placed[device] = np.append(np.delete(placed[device], given), -1)
    return device


def _refined(placed: Slots, loads: Loads, copies: np.ndarray) -> Slots:
    """Exchanges until none helps."""
    search = _Search(placed, loads, copies)
    for _ in range(_ROUNDS * len(placed)):
        if not (search.exchange() or search.convert()):
            break
    return search.placed


class _Search:
    """A placement on its way down: placed [D, S], each (of a copy) [E], taken [D], holds [D, E]."""

    def __init__(self, placed: Slots, loads: Loads, copies: np.ndarray) -> None:
        self.placed, self.loads, self.copies = placed.copy(), loads, copies.copy()
        self.each = loads / self.copies
        self.taken = self.each[self.placed].sum(axis=1)
        self.holds = np.zeros((len(placed), len(loads)), dtype=bool)
        self.holds[np.arange(len(placed))[:, None], self.placed] = True
        self.least_gain = _GAIN * float(self.taken.mean()) ** 2

    def exchange(self) -> bool:
        """Exchange the two slots that save most, one of them on the busiest device that has such;
        False where there is none."""
        mean = self.taken.mean()
        for device in np.argsort(-self.taken, kind="stable"):
            if self.taken[device] <= mean:
                return False
            given = self.placed[device]
            # moved [S, D, S]: what the device would have less after giving slot s for slot t of
            # device d.
            moved = self.each[given][:, None, None] - self.each[self.placed][None]
            saved = 2 * moved * (self.taken[device] - self.taken[None, :, None] - moved)
            barred = self.holds[:, given].T[:, :, None] | self.holds[device][self.placed][None]
            saved[barred] = 0.0
            best = int(saved.argmax())
            if saved.flat[best] > self.least_gain:
                slot, other, other_slot = (int(i) for i in np.unravel_index(best, saved.shape))
                self._swap(int(device), slot, other, other_slot)
                return True
        return False

    def _swap(self, device: int, slot: int, other: int, other_slot: int) -> None:
        mine, theirs = self.placed[device, slot], self.placed[other, other_slot]
        self.placed[device, slot], self.placed[other, other_slot] = theirs, mine
        self.holds[device, mine] = self.holds[other, theirs] = False
        self.holds[device, theirs] = self.holds[other, mine] = True
        moved = self.each[mine] - self.each[theirs]
        self.taken[device] -= moved
        self.taken[other] += moved

    def convert(self) -> bool:
        """Turn a copy of an expert that has several into one of the busiest device's, where that
        saves; False where none does."""
        found = [self._best_turn(int(wanted)) for wanted in self.placed[int(self.taken.argmax())]]
        after, device, slot, wanted = min(found)
        if float(np.square(self.taken).sum()) - after <= self.least_gain:
            return False
        given = self.placed[device, slot]
        self.placed[device, slot] = wanted
        self.holds[device, given], self.holds[device, wanted] = False, True
        self.copies[given] -= 1
        self.copies[wanted] += 1
        self.each = self.loads / self.copies
        self.taken = self.each[self.placed].sum(axis=1)
        return True

    def _best_turn(self, wanted: int) -> tuple[float, int, int, int]:
        """The sum of squares with one more copy of `wanted`, in which slot of which device; only
        devices with least to do are tried."""
        hosts = self.holds[:, wanted]
        lighter = self.loads[wanted] / (self.copies[wanted] + 1)
        base = self.taken - hosts * (self.each[wanted] - lighter)
        best = (float("inf"), 0, 0, wanted)
        for device in np.argsort(base, kind="stable")[:_TRIED]:
            for slot, given in enumerate(self.placed[device]):
                if hosts[device] or self.copies[given] < 2:
                    continue
                heavier = self.loads[given] / (self.copies[given] - 1)
                taken = base + self.holds[:, given] * (heavier - self.each[given])
                taken[device] += lighter - heavier
                best = min(best, (float(np.square(taken).sum()), int(device), slot, wanted))
        return best
