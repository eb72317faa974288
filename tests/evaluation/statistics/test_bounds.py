import math

import numpy as np
import pytest

from quantkit.evaluation.statistics.estimates import mean_bounds


def binomial_tail(n, least, p):
    """P(X >= least)."""
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(least, n + 1))


@pytest.mark.parametrize(("n", "right"), [(5, 5), (20, 17), (200, 190), (164, 3)])
def test_of_zeros_and_ones_it_is_clopper_and_pearsons(n, right):
    low, high = mean_bounds(np.array([1.0] * right + [0.0] * (n - right)), 0, 1).interval()
    assert binomial_tail(n, right, low) == pytest.approx(0.025, abs=0.003)
    assert right == n or 1 - binomial_tail(n, right + 1, high) == pytest.approx(0.025, abs=0.003)
    assert right < n or high == 1.0


@pytest.mark.parametrize("n", [5, 30, 368, 2000])
def test_what_was_not_seen_counts_problems(n):
    """n equal differences leave room for a share of 1 - 0.025^(1/n) of problems lost whole."""
    low, high = mean_bounds(np.zeros(n), -1, 1).interval()
    assert low == pytest.approx(-(1 - 0.025 ** (1 / n)), rel=0.03)
    assert high == pytest.approx(-low, rel=0.03)


def test_p_values_agree_with_the_interval():
    values = np.random.default_rng(0).choice([-1.0, 0.0, 0.5], 300, p=[0.1, 0.85, 0.05])
    bounds = mean_bounds(values, -1, 1)
    low, high = bounds.interval(0.01)
    assert bounds.p_at_most(low) == pytest.approx(0.01, abs=0.001)
    assert bounds.p_at_least(high) == pytest.approx(0.01, abs=0.001)
    assert bounds.p_at_most(-1.0) < 1e-4 < bounds.p_at_most(0.0)
    assert low < values.mean() < high
