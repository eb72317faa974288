"""How many problems and repeats a verdict takes, with a probability of 80 %.

Advice after an inconclusive look is for the difference seen, known as badly as it is then,
and for no loss at all as long as that may
be so: the difference seen flatters itself, and a run without loss must end too.

The bounds are Gaffke's (bounds.py); their distance from the mean is approximated by the first three
moments of the weights (Cornish and Fisher), which includes the unseen problem. Var(mean) = (between
+ sampling / repeats) / problems, where `between` is the variance over problems of the true
difference and `sampling` what one repeat of both models adds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from quantkit.evaluation.statistics.estimates import ONE_SIDED

POWER = 0.8
POWER_OF_NO_LOSS = 0.88  # a look may take no loss for an unlikely one; with those it is 80 % in all
MAX_REPEATS = 1024
MAX_PROBLEMS = 10_000_000
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Spread:
    """Variances of a difference for one problem: `between` problems, and `sampling` of one repeat
    of both models."""

    between: float
    sampling: float

    def total(self, repeats: int) -> float:
        return self.between + self.sampling / repeats


def bound_distance(
    mean: float, variance: float, problems: int, one_sided: float = ONE_SIDED
) -> float:
    """How far below the mean the lower bound lies for differences in [-1, 1]; of -mean, how far
    above the upper one."""
    total = problems + 1
    centre = (problems * mean - 1) / total
    second = problems * (variance + (mean - centre) ** 2) + (1 + centre) ** 2
    third = -((1 + centre) ** 3)
    deviation = math.sqrt(second / (total * (total + 1)))
    skew = 2 * third / (total * (total + 1) * (total + 2)) / deviation**3
    z = _NORMAL.inv_cdf(one_sided)
    return mean - (centre + deviation * (z + (z * z - 1) * skew / 6))


@dataclass(frozen=True)
class UndecidedLook:
    """An inconclusive look: the difference on `problems`, each repeats `repeats` times of both
    models. May nothing be lost?"""

    difference: float
    spread: Spread
    problems: int
    repeats: int
    no_loss_plausible: bool


def power(
    difference: float,
    uncertainty: float,
    variance: float,
    problems: int,
    margin: float,
    one_sided: float,
) -> float:
    """Probability of held or lost where the mean seen is normal around `difference` with deviation
    `uncertainty`."""
    floor = (
        bound_distance(difference, variance, problems, one_sided) - margin
    )  # held at this mean and above
    ceiling = -bound_distance(-difference, variance, problems, one_sided)  # lost below this one
    return 1 - max(
        0.0,
        _normal_cdf(floor, difference, uncertainty) - _normal_cdf(ceiling, difference, uncertainty),
    )


def repeats_needed(seen: UndecidedLook, margin: float, one_sided: float = ONE_SIDED) -> int | None:
    """Repeats of both on the same problems that give a verdict with POWER; None where none do."""

    def enough(repeats: int) -> bool:
        fresh = seen.spread.sampling / (repeats * seen.problems)
        doubt = seen.spread.sampling / (seen.repeats * seen.problems)
        return _is_decisive(
            seen, seen.spread.total(repeats), seen.problems, (fresh, doubt), margin, one_sided
        )

    return _smallest(enough, seen.repeats + 1, MAX_REPEATS)


def problems_needed(seen: UndecidedLook, margin: float, one_sided: float = ONE_SIDED) -> int:
    """Problems, repeats as often as now, that give a verdict with POWER."""
    variance = seen.spread.total(seen.repeats)

    def enough(repeats: int) -> bool:
        return _is_decisive(
            seen,
            variance,
            repeats,
            (variance / repeats, variance / seen.problems),
            margin,
            one_sided,
        )

    return _smallest(enough, seen.problems + 1, MAX_PROBLEMS) or MAX_PROBLEMS


def _is_decisive(
    seen: UndecidedLook,
    variance: float,
    problems: int,
    noise: tuple[float, float],
    margin: float,
    one_sided: float,
) -> bool:
    """noise: variance of the mean to come, and of the one that was seen."""
    fresh, doubt = noise
    if (
        seen.no_loss_plausible
        and power(0.0, math.sqrt(fresh), variance, problems, margin, one_sided) < POWER_OF_NO_LOSS
    ):
        return False
    return (
        power(seen.difference, math.sqrt(fresh + doubt), variance, problems, margin, one_sided)
        >= POWER
    )


@dataclass(frozen=True)
class PlannedRow:
    """Problems needed at `repeats` of both models: to say held where nothing is lost, and lost
    where `margin` is."""

    repeats: int
    held: int
    lost: int


def plan(accuracy: float, margin: float, sampling: float | None = None) -> list[PlannedRow]:
    """What it takes to detect a loss of `margin` from none at this accuracy, each with POWER. Both
    are shares.

    sampling: variance that one repeat of both models adds, as measured; None is the most there can
    be, 2 p (1 - p): no problem easier than another. A loss is taken to hit whole problems, which is
    the hardest to see.
    """
    noise = 2 * accuracy * (1 - accuracy) if sampling is None else sampling
    rows = []
    for repeats in (1, 2, 4, 8, 16, 32, 64):
        same, worse = (
            Spread(0.0, noise).total(repeats),
            Spread(margin * (1 - margin), noise).total(repeats),
        )
        rows.append(
            PlannedRow(repeats, _problems_for_held(same, margin), _problems_for_lost(worse, margin))
        )
    return rows


def repeats_for_held(problems: int, margin: float, sampling: float) -> int | None:
    """Repeats of both that say held on `problems` where nothing is lost, with POWER; None where
    there are too few problems."""

    def enough(repeats: int) -> bool:
        variance = sampling / repeats
        return (
            _normal_cdf(
                margin - bound_distance(0.0, variance, problems),
                0.0,
                math.sqrt(variance / problems),
            )
            >= POWER
        )

    return _smallest(enough, 1, MAX_REPEATS)


def _problems_for_held(variance: float, margin: float) -> int:
    def enough(repeats: int) -> bool:
        return (
            _normal_cdf(
                margin - bound_distance(0.0, variance, repeats), 0.0, math.sqrt(variance / repeats)
            )
            >= POWER
        )

    return _smallest(enough, 1, MAX_PROBLEMS) or MAX_PROBLEMS


def _problems_for_lost(variance: float, margin: float) -> int:
    def enough(repeats: int) -> bool:
        return (
            _normal_cdf(
                -bound_distance(margin, variance, repeats), -margin, math.sqrt(variance / repeats)
            )
            >= POWER
        )

    return _smallest(enough, 1, MAX_PROBLEMS) or MAX_PROBLEMS


def _normal_cdf(bound: float, mean: float, deviation: float) -> float:
    """P(X < bound) for a normal X."""
    return _NORMAL.cdf((bound - mean) / deviation) if deviation > 0 else float(mean < bound)


def _smallest(enough: Callable[[int], bool], first: int, most: int) -> int | None:
    """The least whole number from `first` to `most` that is enough, where more is never worse; None
    where none is."""
    low, high = first, first
    while not enough(high):
        if high >= most:
            return None
        low, high = high + 1, min(2 * high, most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
