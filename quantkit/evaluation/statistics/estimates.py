"""Estimates from repeated, graded samples, and bounds on the mean of a bounded quantity. Problems
are the unit; repeats are noise within a problem.

A score table is a list over problems of lists over repeats of 0/1, ragged where requests failed.
Intervals are 95 %.

Bounds are Gaffke's (Gaffke 2005; Learned-Miller and Thomas 2019, arXiv:1905.06208): with n values
in [minimum, maximum], the upper bound at level 1 - alpha is the (1 - alpha) quantile of sum_i W_i
x_i + W_(n+1) maximum, with weights uniform on the simplex (Dirichlet of ones). That is the Bayesian
bootstrap with one more, unseen problem at the worst end; for the lower bound it is at `minimum`. So
the number of problems limits the bound: n equal values leave room for a share of 1 - alpha^(1/n) of
others, whatever the number of repeats of each value. For values of 0 and 1 it is Clopper and
Pearson's exact bound; in general its coverage is conjectured, and no simulation found it short.

Weights of equal values are drawn together, as Dirichlet(counts), so the cost does not grow with the
number of problems.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from quantkit.common.result import JsonObject

Verdict = Literal["held", "lost", "cannot tell"]
Scores = Collection[Sequence[float]]  # problems x repeats, ragged, no empty row
Table = dict[str, list[float]]  # the same by problem id


@dataclass(frozen=True, kw_only=True)
class Difference(ABC):
    """Candidate against baseline on `n` shared problems; differences are shares (0.01 is one
    point). [low, high] has confidence `level`. p_held tests that `margin` or more is lost, p_lost
    that nothing is lost."""

    verdict: Verdict
    difference: float
    low: float
    high: float
    level: float
    margin: float
    n: int
    p_held: float
    p_lost: float

    @abstractmethod
    def sentence(self) -> str:
        """The verdict in words."""

    @property
    def seen(self) -> str:
        span = f"{100 * self.level:.3g} %: {100 * self.low:+.1f} to {100 * self.high:+.1f}"
        return f"{100 * self.difference:+.1f} points ({span})"

    def to_json(self) -> JsonObject:
        return asdict(self) | {"sentence": self.sentence()}


def problem_means(table: Scores) -> np.ndarray:
    """[n] float64."""
    return np.array([sum(row) / len(row) for row in table], dtype=np.float64)


def accuracy(table: Scores) -> float:
    """Mean over problems of the mean over repeats."""
    return float(problem_means(table).mean())


def clustered_stderr(table: Scores) -> float | None:
    """Standard error of the accuracy over the draw of problems: sample deviation of the problem
    means / sqrt(n); None for one problem.

    With one repeat this is the value that lm-evaluation-harness prints.
    """
    means = problem_means(table)
    return float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None


def sampling_stderr(table: Scores) -> float | None:
    """Standard error of the accuracy on these problems from sampling alone: sqrt(sum_i p_i (1 -
    p_i) / (k_i - 1)) / n; None where a problem has a single repeat."""
    if any(len(row) < 2 for row in table):
        return None
    variance = sum(p * (1 - p) / (len(row) - 1) for p, row in zip(problem_means(table), table))
    return math.sqrt(variance) / len(table)


def reply_variance(table: Scores) -> float | None:
    """Variance of one reply's score, mean over the problems with several; None where none has."""
    found = [np.var(row, ddof=1) for row in table if len(row) > 1]
    return float(np.mean(found)) if found else None


def interval(table: Scores) -> tuple[float, float]:
    """95 % interval of the accuracy over problems; with one repeat it is Clopper and Pearson's."""
    return mean_bounds(problem_means(table), 0, 1).interval()


def figures(table: Scores) -> JsonObject:
    """Accuracy, its interval and the number of problems."""
    return {"accuracy": accuracy(table), "interval": list(interval(table)), "n": len(table)}


FIRST_RANGE = 16  # tokens


def doubling_range(number: float) -> tuple[int, int]:
    """First and last number of the range that holds the token `number` (from 1 on): 1 to 16, then
    each range as long as all before it."""
    last = FIRST_RANGE
    while last < number:
        last *= 2
    return (1 if last == FIRST_RANGE else last // 2 + 1), last


def pass_at_k(table: Scores, k: int) -> float | None:
    """Probability that one of k samples is right, over problems with m >= k repeats, c of them
    right: mean of 1 - C(m - c, k) / C(m, k) (Chen et al. 2021); None where no problem has."""
    values = [
        1 - math.comb(len(row) - round(sum(row)), k) / math.comb(len(row), k)
        for row in table
        if len(row) >= k
    ]
    return sum(values) / len(values) if values else None


def majority(votes: Sequence[tuple[str | None, bool]]) -> float:
    """Score of one problem by majority vote over (answer, right). Replies without an answer do
    not vote; a tie counts as the share of the winning answers that is right."""
    counts = Counter(answer for answer, _ in votes if answer is not None)
    if not counts:
        return 0.0
    top = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == top]
    right = {answer for answer, correct in votes if correct}
    return sum(answer in right for answer in winners) / len(winners)


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided McNemar p-value from the numbers of problems that only one side solved."""
    total = gained + lost
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, i) for i in range(min(gained, lost) + 1)) / 2**total
    return min(1.0, 2 * tail)


DRAWS = 10_000
_MAX_WEIGHTS = 2_000_000  # weights held in memory
ONE_SIDED = 0.025  # each end of a 95 % interval


@dataclass(frozen=True)
class MeanBounds:
    """Draws of the mean with the unseen problem at the lower and at the upper end: [DRAWS]
    float64 each."""

    lower: np.ndarray
    upper: np.ndarray

    def interval(self, one_sided: float = ONE_SIDED) -> tuple[float, float]:
        """(low, high); each end is exceeded by the true mean with probability at most
        `one_sided`."""
        low, high = np.quantile(self.lower, one_sided), np.quantile(self.upper, 1 - one_sided)
        return float(low), float(high)

    def p_at_most(self, mean: float) -> float:
        """p-value of the hypothesis that the true mean is at most `mean`."""
        return float((np.sum(self.lower <= mean) + 1) / (len(self.lower) + 1))

    def p_at_least(self, mean: float) -> float:
        """p-value of the hypothesis that the true mean is at least `mean`."""
        return float((np.sum(self.upper >= mean) + 1) / (len(self.upper) + 1))


def mean_bounds(values: np.ndarray, minimum: float, maximum: float, seed: int = 0) -> MeanBounds:
    """values: [n], in [minimum, maximum]."""
    total, seen, unseen = _draws(np.asarray(values, dtype=np.float64)[:, None], seed)
    mass, (total,) = seen + unseen, total
    return MeanBounds((total + unseen * minimum) / mass, (total + unseen * maximum) / mass)


def ratio_bounds(ours: np.ndarray, theirs: np.ndarray, seed: int = 0) -> MeanBounds:
    """Draws of mean(ours) / mean(theirs), paired shares [n] in [0, 1]: the unseen problem is solved
    by the other side alone. A ratio r is below the lower bound where `mean_bounds` of ours - r
    theirs excludes 0 (Fieller's construction), and likewise above the upper one. Infinite where
    theirs is 0."""
    (ours, theirs), _, unseen = _draws(np.stack([ours, theirs], axis=1).astype(np.float64), seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        return MeanBounds(ours / (theirs + unseen), (ours + unseen) / theirs)


def _draws(values: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of values [n, c] the weighted sums [c, DRAWS], and the weights of all and of the unseen
    problem [DRAWS]."""
    rng = np.random.default_rng(seed)
    distinct, counts = np.unique(values, axis=0, return_counts=True)
    total, mass = np.empty((values.shape[1], DRAWS)), np.empty(DRAWS)
    unseen = rng.standard_exponential(DRAWS)
    rows = max(1, _MAX_WEIGHTS // len(distinct))
    for start in range(0, DRAWS, rows):
        part = slice(start, min(start + rows, DRAWS))
        weights = rng.standard_gamma(counts, (part.stop - start, len(counts)))
        total[:, part], mass[part] = (weights @ distinct).T, weights.sum(axis=1)
    return total, mass, unseen
