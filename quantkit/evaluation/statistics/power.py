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
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from quantkit.evaluation.statistics.estimates import ONE_SIDED

POWER = 0.8
POWER_OF_NO_LOSS = 0.88  # a look may reject no loss as implausible; overall this gives 80 %
MAX_REPEATS = 1024
MAX_PROBLEMS = 10_000_000
_NORMAL = NormalDist()


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


def chances(
    difference: float,
    variance: float,
    problems: int,
    margin: float,
    uncertainty: float | None = None,
    one_sided: float = ONE_SIDED,
) -> tuple[float, float]:
    """Probabilities of held and of lost where the observed mean is normal around `difference` with
    the variance `uncertainty`, that of the mean where None; `variance` is that of one problem."""
    deviation = math.sqrt(variance / problems if uncertainty is None else uncertainty)
    held = bound_distance(difference, variance, problems, one_sided) - margin
    lost = -bound_distance(-difference, variance, problems, one_sided)
    above, below = (_normal_cdf(bound, difference, deviation) for bound in (held, lost))
    return 1 - above, below


@dataclass(frozen=True)
class UndecidedLook:
    """An inconclusive look: the difference on `problems`, each sampled `repeats` times from both
    models, with its variances of one problem: `between` problems, and `sampling` of one repeat of
    both."""

    difference: float
    between: float
    sampling: float
    problems: int
    repeats: int
    no_loss_plausible: bool

    def decides(self, problems: int, repeats: int, margin: float, one_sided: float) -> bool:
        """Whether a run of this size, on the same problems where they are as many, gives a verdict
        with probability POWER."""
        variance = self.between + self.sampling / repeats
        drawn = self.sampling if problems == self.problems else variance * repeats
        fresh, doubt = drawn / (repeats * problems), drawn / (self.repeats * self.problems)

        def power(difference: float, uncertainty: float) -> float:
            return min(
                1.0, sum(chances(difference, variance, problems, margin, uncertainty, one_sided))
            )

        if self.no_loss_plausible and power(0.0, fresh) < POWER_OF_NO_LOSS:
            return False
        return power(self.difference, fresh + doubt) >= POWER


def needed(
    seen: UndecidedLook, margin: float, one_sided: float, greedy: bool
) -> tuple[int | None, int | None]:
    """(repeats, None) of both models on the same problems that give a verdict with probability
    POWER, or (None, problems) with the present repeats where no number does."""
    if not greedy:
        repeats = _smallest(
            lambda count: seen.decides(seen.problems, count, margin, one_sided),
            seen.repeats + 1,
            MAX_REPEATS,
        )
        if repeats is not None:
            return repeats, None
    problems = _smallest(
        lambda count: seen.decides(count, seen.repeats, margin, one_sided),
        seen.problems + 1,
        MAX_PROBLEMS,
    )
    return None, problems or MAX_PROBLEMS


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
        same = noise / repeats
        worse = same + margin * (1 - margin)
        enough = (
            lambda count, v=same: chances(0.0, v, count, margin)[0] >= POWER,
            lambda count, v=worse: chances(-margin, v, count, margin)[1] >= POWER,
        )
        rows.append(
            PlannedRow(
                repeats, *(_smallest(one, 1, MAX_PROBLEMS) or MAX_PROBLEMS for one in enough)
            )
        )
    return rows


def repeats_for_held(problems: int, margin: float, sampling: float) -> int | None:
    """Repeats of both models that give `held` on `problems` where nothing is lost, with probability
    POWER; None where there are too few problems."""
    return _smallest(
        lambda repeats: chances(0.0, sampling / repeats, problems, margin)[0] >= POWER,
        1,
        MAX_REPEATS,
    )


def _normal_cdf(bound: float, mean: float, deviation: float) -> float:
    """P(X < bound) for a normal X."""
    return _NORMAL.cdf((bound - mean) / deviation) if deviation > 0 else float(mean < bound)


def _smallest(enough: Callable[[int], bool], first: int, most: int) -> int | None:
    """The smallest integer in [first, most] for which the monotone predicate `enough` holds;
    None where none does."""
    found = bisect_left(range(first, most + 1), True, key=enough)
    return first + found if first + found <= most else None
