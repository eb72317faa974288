"""Bounds on the mean of a bounded quantity over the population that the problems of a task
represent.

Gaffke's bound (Gaffke 2005; Learned-Miller and Thomas 2019, arXiv:1905.06208): with n values in
[least, most], the upper bound at level 1 - alpha is the (1 - alpha) quantile of sum_i W_i x_i +
W_(n+1) most, the weights uniform on the simplex (Dirichlet of ones). It is the Bayesian bootstrap
with one more problem, unseen, at the worst end; for the lower bound that problem is at `least`. So
what was not seen
counts problems: n equal values leave room for a share of 1 - alpha^(1/n) of others, whatever the
number of repeats of each value. For values of 0 and 1 it is Clopper and Pearson's exact bound;
in general its coverage is conjectured, and in no simulation was it found short.

Weights of equal values are drawn together, as Dirichlet(counts), so the cost does not grow with the
number of problems.
"""

from dataclasses import dataclass

import numpy as np

DRAWS = 10_000
_AT_A_TIME = 2_000_000  # weights held in memory
ONE_SIDED = 0.025  # each end of a 95 % interval


@dataclass(frozen=True)
class MeanBounds:
    """Draws of the mean with the unseen problem at the lower and at the upper end, [DRAWS] float64
    each, ascending."""

    lower: np.ndarray
    upper: np.ndarray

    def interval(self, one_sided: float = ONE_SIDED) -> tuple[float, float]:
        """(low, high): each end is passed by the true mean with probability `one_sided` at most."""
        return float(np.quantile(self.lower, one_sided)), float(
            np.quantile(self.upper, 1 - one_sided)
        )

    def p_at_most(self, mean: float) -> float:
        """p-value of the hypothesis that the true mean is `mean` or less."""
        return _share(int(np.searchsorted(self.lower, mean, side="right")), len(self.lower))

    def p_at_least(self, mean: float) -> float:
        """p-value of the hypothesis that the true mean is `mean` or more."""
        return _share(
            len(self.upper) - int(np.searchsorted(self.upper, mean, side="left")), len(self.upper)
        )


def mean_bounds(
    values: np.ndarray, least: float, most: float, seed: int = 0, draws: int = DRAWS
) -> MeanBounds:
    """values: [n], in [least, most]."""
    rng = np.random.default_rng(seed)
    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    total, mass = np.empty(draws), np.empty(draws)
    unseen = rng.standard_exponential(draws)
    rows = max(1, _AT_A_TIME // len(distinct))
    for start in range(0, draws, rows):
        part = slice(start, min(start + rows, draws))
        weights = rng.standard_gamma(counts, (part.stop - start, len(counts)))
        total[part], mass[part] = weights @ distinct, weights.sum(axis=1) + unseen[part]
    return MeanBounds(
        np.sort((total + unseen * least) / mass), np.sort((total + unseen * most) / mass)
    )


def _share(count: int, draws: int) -> float:
    return float((count + 1) / (draws + 1))
