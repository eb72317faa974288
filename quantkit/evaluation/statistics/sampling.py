"""The verdict on these very problems, where the draw of replies is the only noise, and a plan that
reaches it with fewer tokens.

The difference d is the mean over the given problems of the difference between two probabilities of
a right reply. Its variance is sum_i p_i (1 - p_i) / (k_i - 1) / n^2 of each model, and two more
discordant replies (as Agresti and Coull's interval), so that problems without a miss leave room for
one. Both tests are normal, with the variance that their hypothesis implies (score tests): a model that
is right oftener by chance also seems to vary less. d says nothing of other problems: for those see comparison.py.

A sequential plan asks PILOT repeats first, then stages up to the information of the asked number of
repeats. Repeats go where answers vary and are short: k_i ~ sqrt(variance_i / tokens_i) (Neyman), with
both figures from the replies of the *other* model, so that no model's number of repeats depends on
its own answers and every mean stays unbiased. After every stage the run ends if d is decided, or if
the last stage would hardly decide it. Levels of the looks spend the error as ERROR * t^1.5 of the
information t (Lan and DeMets 1983); boundaries are computed from simulated Brownian paths.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from quantkit.evaluation.statistics.estimates import (
    ONE_SIDED,
    Difference,
    Scores,
    Verdict,
    problem_means,
)
from quantkit.evaluation.statistics.power import POWER

PILOT = 2  # repeats of every problem before the first look
STAGES = (0.125, 0.25, 0.4, 0.55, 0.7, 0.85, 1.15)
"""Information at the looks, as shares of that of the asked repeats; the surplus pays for looking."""
SPENT = 0.85
"""Share of the error that the looks may spend; the rest is for what normal tests of few replies miss."""
HOPELESS = 0.05  # probability of a verdict at the last look below which a run ends
_PATHS = 200_000  # simulated ones
_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class SamplingComparison(Difference):
    """On these problems alone. decidable: the loss that as many replies detect with probability
    POWER; hopeless: more stages would hardly decide."""

    decidable: float
    stage: int | None = None
    hopeless: bool = False

    def sentence(self) -> str:
        said = f"on these {self.n} problems alone, {self.verdict}: {self.seen}"
        if self.verdict == "cannot tell":
            said += f"; so many replies can detect a loss of {100 * self.decidable:.1f} points"
        return said


def mean_variance(table: Scores, unseen: float = 0.0) -> float:
    """Variance of the accuracy on these problems from the draw of replies alone, where misses that
    lower it by `unseen` did not show. A problem with one reply is taken to vary as all of them
    together do, which is never too little."""
    p, k = problem_means(table), np.array([len(row) for row in table])
    own = np.where(k > 1, p * (1 - p) / np.maximum(k - 1, 1), p.mean() * (1 - p.mean()))
    n, each = len(table), float(np.mean(1 / k))
    return float(own.sum() + 2 * each**2) / n**2 + max(unseen, 0.0) * each / n


def compare_sampling(
    candidate: Mapping[str, Sequence[float]],
    baseline: Mapping[str, Sequence[float]],
    *,
    margin: float,
    error: float = ONE_SIDED,
    stage: int | None = None,
) -> SamplingComparison:
    """Two runs on the problems they share, each problem id -> 0/1 per repeat. error: of either side.
    stage: index into STAGES of a sequential plan, whose looks then share `error`."""
    shared = [problem for problem in candidate if problem in baseline]
    ours, theirs = [candidate[p] for p in shared], [baseline[p] for p in shared]
    d = float(problem_means(ours).mean() - problem_means(theirs).mean())
    bounds = [-_NORMAL.inv_cdf(error)] if stage is None else boundaries(STAGES, SPENT * error)
    bound = bounds[stage or 0]

    def deviation(tested: float) -> float:
        """Of d where d is `tested` and the way to it, shared by variance, was not seen."""
        own = mean_variance(ours), mean_variance(theirs)
        moves = [(d - tested) * variance / sum(own) for variance in own]
        return math.sqrt(mean_variance(ours, moves[0]) + mean_variance(theirs, -moves[1]))

    if_held, if_lost = deviation(-margin), deviation(0.0)
    z_held, z_lost = (d + margin) / if_held, -d / if_lost
    verdict: Verdict = "held" if z_held >= bound else "lost" if z_lost >= bound else "cannot tell"
    t = 1.0 if stage is None else STAGES[stage] / STAGES[-1]
    reach = max(_conditional_power(z, t, bounds[-1]) for z in (z_held, z_lost))
    return SamplingComparison(
        verdict=verdict,
        difference=d,
        low=d - bound * if_held,
        high=d + bound * if_lost,
        level=1 - 2 * (1 - _NORMAL.cdf(bound)),
        margin=margin,
        n=len(shared),
        p_held=1 - _NORMAL.cdf(z_held),
        p_lost=1 - _NORMAL.cdf(z_lost),
        decidable=(bound + _NORMAL.inv_cdf(POWER)) * if_lost,
        stage=stage,
        hopeless=reach < HOPELESS,
    )


def _conditional_power(z: float, t: float, bound: float) -> float:
    """Probability that a path at `z`, at the share `t` of its information, ends above `bound` if it
    goes on as it began."""
    if t >= 1:
        return 0.0
    return _NORMAL.cdf((z / math.sqrt(t) - bound) / math.sqrt(1 - t))


@cache
def boundaries(fractions: tuple[float, ...], error: float) -> list[float]:
    """The z of every look that spends `error` * t^1.5 by the information t; the last is 1."""
    t = np.asarray(fractions) / fractions[-1]
    steps = np.sqrt(np.diff(t, prepend=0.0))
    walk = np.random.default_rng(0).standard_normal((_PATHS, len(t))) * steps
    walk = walk.cumsum(axis=1) / np.sqrt(t)
    found, spent = [], 0.0
    for look, share in enumerate(t):
        due = error * share**1.5 - spent
        found.append(float(np.quantile(walk[:, look], 1 - due * _PATHS / len(walk))))
        walk, spent = walk[walk[:, look] < found[-1]], error * share**1.5
    return found


def repeats_of_stage(
    other: Mapping[str, Sequence[float]],
    tokens: Mapping[str, float],
    repeats: int,
    stage: int,
    *,
    complete: bool = False,
) -> dict[str, int]:
    """Repeats of every problem after `stage` for the model that is not `other`. Together with those
    of `other`, which are as many, they have the information of STAGES[stage] * `repeats` of both.

    other: scores of the other model so far; tokens: mean length of its replies, by problem.
    complete: they are all there will be, as those of a run that is stored.
    """
    if stage == 0:
        return dict.fromkeys(other, PILOT)
    p = problem_means(other.values())
    k = np.array([len(row) for row in other.values()])
    right, wrong = k * p + p.mean(), k * (1 - p) + 1 - p.mean()  # a prior of one reply
    variance = right * wrong / ((k + 1) * (k + 2)) + 1e-9
    length = np.array([max(tokens[name], 1.0) for name in other])
    weight = np.sqrt((variance + variance.mean() / 4) / length)
    target = variance.sum() / repeats / STAGES[stage]
    if complete:
        target = 2 * target - float((variance / k).sum())
    low, high = 0.0, 1e9
    for _ in range(100):
        scale = (low + high) / 2
        counts = np.clip(scale * weight, PILOT, 4 * repeats)
        low, high = (low, scale) if (variance / counts).sum() <= target else (scale, high)
    return dict(zip(other, np.ceil(counts - 1e-6).astype(int).tolist()))


def decidable_margin(sampling: float, problems: int, repeats: float) -> float:
    """The loss that `repeats` of both models detect on these problems, with probability
    POWER. sampling: variance that one repeat of both models adds to one problem."""
    factor = -_NORMAL.inv_cdf(ONE_SIDED) + _NORMAL.inv_cdf(POWER)
    return factor * math.sqrt(sampling / (problems * repeats))


def repeats_for_margin(sampling: float, problems: int, margin: float) -> int:
    """Repeats of both models that detect a loss of `margin` on these problems."""
    return math.ceil((decidable_margin(sampling, problems, 1) / margin) ** 2)
