"""How many problems and repeats a verdict needs, with probability 80 %.

After an inconclusive look, plans assume the observed difference with its uncertainty, and also no
loss as long as that is plausible: the observed difference is biased, and a run without loss must
end too.

The bounds are Gaffke's (estimates.py); their distance from the mean is approximated with the first
three moments of the weights (Cornish and Fisher), which includes the unseen problem. Var(mean) =
(between + sampling / repeats) / problems, where `between` is the variance over problems of the true
difference and `sampling` the variance that one repeat of both models adds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from quantkit.evaluation.statistics.estimates import ONE_SIDED

POWER = 0.8
POWER_OF_NO_LOSS = 0.88  # a look may reject no loss as implausible; overall this gives 80 %
MAX_REPEATS = 1024
MAX_PROBLEMS = 10_000_000
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Spread:
    """Variances of a difference for one problem: `between` problems, and `sampling` of one
    repeat of both models."""

    between: float
    sampling: float

    def total(self, repeats: int) -> float:
        return self.between + self.sampling / repeats


def bound_distance(
    mean: float, variance: float, problems: int, one_sided: float = ONE_SIDED
) -> float:
    """Distance of the lower bound from the mean for differences in [-1, 1]; of -mean, that of
    the upper bound."""
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
    """An inconclusive look: the difference on `problems`, each sampled `repeats` times from both
    models."""

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
    """Probability of held or lost where the observed mean is normal around `difference` with
    standard deviation `uncertainty`."""
    floor = (
        bound_distance(difference, variance, problems, one_sided) - margin
    )  # held at this mean and above
    ceiling = -bound_distance(-difference, variance, problems, one_sided)  # lost below this one
    return 1 - max(
        0.0,
        _normal_cdf(floor, difference, uncertainty) - _normal_cdf(ceiling, difference, uncertainty),
    )


def repeats_needed(seen: UndecidedLook, margin: float, one_sided: float = ONE_SIDED) -> int | None:
    """Repeats of both models on the same problems that give a verdict with probability POWER;
    None where no number does."""

    def enough(repeats: int) -> bool:
        fresh = seen.spread.sampling / (repeats * seen.problems)
        doubt = seen.spread.sampling / (seen.repeats * seen.problems)
        return _is_decisive(
            seen, seen.spread.total(repeats), seen.problems, (fresh, doubt), margin, one_sided
        )

    return _smallest(enough, seen.repeats + 1, MAX_REPEATS)


def problems_needed(seen: UndecidedLook, margin: float, one_sided: float = ONE_SIDED) -> int:
    """Problems, with the present repeats, that give a verdict with probability POWER."""
    variance = seen.spread.total(seen.repeats)

    def enough(problems: int) -> bool:
        return _is_decisive(
            seen,
            variance,
            problems,
            (variance / problems, variance / seen.problems),
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
    """noise: variance of the future mean, and of the observed one."""
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
    """Problems needed at `repeats` of both models for `held` where nothing is lost, and for
    `lost` where `margin` is."""

    repeats: int
    held: int
    lost: int


def plan(accuracy: float, margin: float, sampling: float | None = None) -> list[PlannedRow]:
    """Problems needed at this accuracy to distinguish a loss of `margin` from none, each with
    probability POWER. Both are shares.

    sampling: measured variance that one repeat of both models adds; None is its maximum, 2 p (1 -
    p), where no problem is easier than another. A loss is assumed to hit whole problems, which is
    the hardest to detect.
    """
    noise = 2 * accuracy * (1 - accuracy) if sampling is None else sampling
    rows = []
    for repeats in (1, 2, 4, 8, 16, 32, 64):
        same, worse = (
            Spread(0.0, noise).total(repeats),
            Spread(margin * (1 - margin), noise).total(repeats),
        )
        rows.append(
            PlannedRow(
                repeats, _problems_for(_p_held, same, margin), _problems_for(_p_lost, worse, margin)
            )
        )
    return rows


def repeats_for_held(problems: int, margin: float, sampling: float) -> int | None:
    """Repeats of both models that give `held` on `problems` where nothing is lost, with probability
    POWER; None where there are too few problems."""
    return _smallest(
        lambda repeats: _p_held(sampling / repeats, problems, margin) >= POWER, 1, MAX_REPEATS
    )


def _p_held(variance: float, problems: int, margin: float) -> float:
    """Probability of `held` where nothing is lost."""
    bound = margin - bound_distance(0.0, variance, problems)
    return _normal_cdf(bound, 0.0, math.sqrt(variance / problems))


def _p_lost(variance: float, problems: int, margin: float) -> float:
    """Probability of `lost` where `margin` is lost."""
    bound = -bound_distance(margin, variance, problems)
    return _normal_cdf(bound, -margin, math.sqrt(variance / problems))


def _problems_for(
    probability: Callable[[float, int, float], float], variance: float, margin: float
) -> int:
    return (
        _smallest(lambda count: probability(variance, count, margin) >= POWER, 1, MAX_PROBLEMS)
        or MAX_PROBLEMS
    )


def _normal_cdf(bound: float, mean: float, deviation: float) -> float:
    """P(X < bound) for a normal X."""
    return _NORMAL.cdf((bound - mean) / deviation) if deviation > 0 else float(mean < bound)


def _smallest(enough: Callable[[int], bool], first: int, most: int) -> int | None:
    """The smallest integer in [first, most] for which the monotone predicate `enough` holds;
    None where none does."""
    low, high = first, first
    while not enough(high):
        if high >= most:
            return None
        low, high = high + 1, min(2 * high, most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
