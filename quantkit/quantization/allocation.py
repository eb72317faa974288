"""Bit allocation: the grid of each group of linears such that the predicted KL is least for a
budget.

Every group starts on its cheapest grid. Its candidates are the lower convex hull of KL over cost,
and the steps of all hulls are taken in the order of KL saved per unit of cost: the optimum for that
cost (the multiplier of a Lagrangian, found by sorting). The rest of the budget is spent on the
single changes that save most and still fit.

Cost is bytes stored, bytes read for a token, or a mean of the two as shares of their sums; the
budget is of bytes stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit.grids.base import Grid, grid_label

CURVE_POINTS = 40
"""Most points of a curve."""


@dataclass(frozen=True)
class Option:
    """A candidate grid of a group, None for 16 bits: bytes stored, bytes read for a token on
    average, predicted KL in nats a token."""

    grid: Grid | None
    stored: int
    read: float
    kl: float

    @property
    def label(self) -> str:
        return grid_label(self.grid)


@dataclass(frozen=True)
class CurvePoint:
    """One allocation of a curve. bits: per weight, scales included."""

    bits: float
    stored: int
    read: float
    kl: float


@dataclass(frozen=True)
class Allocation:
    """chosen: by group. curve: allocations from the smallest to the largest."""

    chosen: dict[str, Option]
    curve: tuple[CurvePoint, ...]

    @property
    def stored(self) -> int:
        return sum(option.stored for option in self.chosen.values())

    @property
    def kl(self) -> float:
        return sum(option.kl for option in self.chosen.values())


class Allocator:
    """options: by group; at least one each. weights: of all groups together. read_weight: from 0,
    where cost is bytes stored, to 1, where it is bytes read."""

    def __init__(
        self, options: Mapping[str, Sequence[Option]], weights: int, read_weight: float
    ) -> None:
        self.weights = weights
        stored, read = (
            sum(max(getattr(one, what) for one in own) for own in options.values()) or 1
            for what in ("stored", "read")
        )
        self._cost = lambda one: (
            (1 - read_weight) * one.stored / stored + read_weight * one.read / read
        )
        self.options = {name: self._useful(own) for name, own in options.items()}

    @property
    def smallest(self) -> int:
        """Bytes stored of the smallest allocation."""
        return sum(min(one.stored for one in own) for own in self.options.values())

    def allocate(self, budget: int) -> Allocation:
        """The best allocation of at most `budget` bytes stored, which must be at least
        `smallest`."""
        chosen, left = self._start(budget)
        for name, after in self._steps(chosen):
            extra = after.stored - chosen[name].stored
            if extra <= left and after.kl < chosen[name].kl:
                chosen[name], left = after, left - extra
        self._fill(chosen, left)
        return Allocation(chosen, self.curve())

    def curve(self) -> tuple[CurvePoint, ...]:
        """Allocations from the smallest on, each with one step more."""
        chosen, _ = self._start(self.smallest)
        points = [self._point(chosen)]
        for name, after in self._steps(chosen):
            chosen[name] = after
            points.append(self._point(chosen))
        every = -(-len(points) // CURVE_POINTS)
        return tuple([*points[:-1:every], points[-1]])

    def _start(self, budget: int) -> tuple[dict[str, Option], int]:
        """The cheapest options, and the remaining budget; those of the fewest bytes if the cheapest
        do not fit."""
        chosen = {name: own[0] for name, own in self.options.items()}
        if sum(one.stored for one in chosen.values()) > budget:
            chosen = {
                name: min(own, key=lambda one: (one.stored, one.kl))
                for name, own in self.options.items()
            }
        return chosen, budget - sum(one.stored for one in chosen.values())

    def _useful(self, own: Sequence[Option]) -> list[Option]:
        """Without options that another one beats in cost and KL; the cheapest first."""
        kept: list[Option] = []
        for one in sorted(own, key=lambda one: (self._cost(one), one.kl, one.stored)):
            if not kept or one.kl < kept[-1].kl or one.stored < min(other.stored for other in kept):
                kept.append(one)
        return kept

    def _steps(self, start: Mapping[str, Option]) -> list[tuple[str, Option]]:
        """All steps along the hulls from `start`, by KL saved per unit of cost, the best first;
        those of one group in their order."""
        steps = []
        for name, first in start.items():
            at, rest = (
                first,
                [
                    one
                    for one in self.options[name]
                    if one.kl < first.kl and self._cost(one) >= self._cost(first)
                ],
            )
            while rest:
                after = max(rest, key=lambda one: (self._rate(at, one), -self._cost(one)))
                steps.append((self._rate(at, after), name, after))
                at, rest = (
                    after,
                    [
                        one
                        for one in rest
                        if one.kl < after.kl and self._cost(one) > self._cost(after)
                    ],
                )
        return [(name, after) for _, name, after in sorted(steps, key=lambda step: -step[0])]

    def _rate(self, before: Option, after: Option) -> float:
        return (before.kl - after.kl) / max(self._cost(after) - self._cost(before), 1e-30)

    def _fill(self, chosen: dict[str, Option], left: int) -> None:
        """Spend the remaining budget on the changes that save most and fit."""
        while True:
            fitting = [
                (chosen[name].kl - one.kl, name, one)
                for name, own in self.options.items()
                for one in own
                if one.kl < chosen[name].kl and one.stored - chosen[name].stored <= left
            ]
            if not fitting:
                return
            _, name, after = max(fitting, key=lambda change: change[0])
            left -= after.stored - chosen[name].stored
            chosen[name] = after

    def _point(self, chosen: Mapping[str, Option]) -> CurvePoint:
        stored = sum(one.stored for one in chosen.values())
        read, kl = (sum(getattr(one, what) for one in chosen.values()) for what in ("read", "kl"))
        return CurvePoint(8 * stored / max(self.weights, 1), stored, read, kl)
