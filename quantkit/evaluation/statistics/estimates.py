"""Statistics of repeated, graded samples: problems are the unit, repeats are noise within a
problem.

`table` is [n, k] in spirit but ragged in practice (a failed request leaves a gap), so a score table
is a list over problems of lists over repeats of 0/1. Intervals are 95 %.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from quantkit.evaluation.statistics.bounds import mean_bounds

Scores = Sequence[Sequence[float]]  # problems x repeats, ragged, no empty row


def problem_means(table: Scores) -> np.ndarray:
    """[n] float64."""
    return np.array([sum(row) / len(row) for row in table], dtype=np.float64)


def accuracy(table: Scores) -> float:
    """Mean over problems of the mean over repeats."""
    return float(problem_means(table).mean())


def clustered_stderr(table: Scores) -> float:
    """Standard error of the accuracy over the draw of problems: sample deviation of the problem
    means / sqrt(n).

    At one repeat this is the figure lm-evaluation-harness prints. Not defined for one problem
    (nan).
    """
    means = problem_means(table)
    return float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan


def sampling_stderr(table: Scores) -> float:
    """Standard error of the accuracy on these very problems, from sampling alone: sqrt(sum_i p_i (1
    - p_i) / (k_i - 1)) / n.

    nan where a problem has a single repeat: one draw does not show its own spread.
    """
    if any(len(row) < 2 for row in table):
        return math.nan
    variance = sum(p * (1 - p) / (len(row) - 1) for p, row in zip(problem_means(table), table))
    return math.sqrt(variance) / len(table)


def interval(table: Scores) -> tuple[float, float]:
    """95 % interval of the accuracy over problems: Gaffke's bounds, which at one repeat are Clopper
    and Pearson's."""
    return mean_bounds(problem_means(table), 0, 1).interval()


def pass_at_k(table: Scores, k: int) -> float:
    """Probability that one of k samples is right, over problems with m >= k repeats, c of them
    right.

    Mean of 1 - C(m - c, k) / C(m, k) (Chen et al. 2021).
    """
    values = [
        1 - math.comb(len(row) - round(sum(row)), k) / math.comb(len(row), k)
        for row in table
        if len(row) >= k
    ]
    return sum(values) / len(values) if values else math.nan


def majority(votes: Sequence[tuple[str | None, bool]]) -> float:
    """Score of one problem by majority over (answer, right).

    Replies without an answer don't vote; a tie counts as the share of the winners that is right.
    """
    counts = Counter(answer for answer, _ in votes if answer is not None)
    if not counts:
        return 0.0
    top = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == top]
    right = {answer for answer, correct in votes if correct}
    return sum(answer in right for answer in winners) / len(winners)


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided McNemar p-value from the problems only one side solved."""
    total = gained + lost
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, i) for i in range(min(gained, lost) + 1)) / 2**total
    return min(1.0, 2 * tail)
