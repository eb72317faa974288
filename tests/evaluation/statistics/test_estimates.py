import math

import numpy as np
import pytest

from quantkit.evaluation.statistics import estimates as st
from quantkit.evaluation.statistics.estimates import mean_bounds


def test_stderr_is_the_sample_deviation_over_root_n():
    table = [[1.0], [0.0], [1.0], [1.0]]
    assert st.clustered_stderr(table) == pytest.approx(math.sqrt(0.25 / 4))
    assert st.clustered_stderr([[1.0]]) is None


def test_sampling_stderr_covers_what_repeats_do():
    """Problems count, not samples."""
    rng = np.random.default_rng(0)
    p = rng.random((40, 1))
    tables = [(rng.random((40, 6)) < p).astype(float).tolist() for _ in range(800)]
    told = np.mean([st.sampling_stderr(table) for table in tables[:200]])
    assert told == pytest.approx(np.std([st.accuracy(table) for table in tables]), rel=0.1)
    assert st.sampling_stderr([[1.0], [0.0, 1.0]]) is None, "not of one repeat"
    assert st.accuracy([[1, 1, 1, 1], [0]]) == 0.5


def test_interval_covers_the_truth_and_does_not_collapse():
    low, high = st.interval([[1.0]] * 20)
    assert high == 1.0
    assert 0.8 < low < 0.9
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        table = (rng.random((50, 3)) < rng.beta(4, 1, 50)[:, None]).astype(float).tolist()
        low, high = st.interval(table)
        hits += low <= 0.8 <= high
    assert hits / 200 >= 0.94


def test_pass_at_k_counts_every_subset():
    assert st.pass_at_k([[1, 0, 0, 0]], 1) == 0.25
    assert st.pass_at_k([[1, 0, 0, 0]], 2) == 0.5
    assert st.pass_at_k([[1, 1, 0, 0]], 2) == pytest.approx(1 - 1 / 6)
    assert st.pass_at_k([[1.0]], 2) is None


def test_majority():
    right, wrong = ("6", True), ("5", False)
    assert st.majority([wrong, right, right]) == 1.0
    assert st.majority([wrong, right]) == 0.5
    assert st.majority([(None, False), (None, False), right]) == 1.0
    assert st.majority([(None, False)]) == 0.0


def test_mcnemar_is_the_exact_binomial():
    assert st.mcnemar(0, 0) == 1.0
    assert st.mcnemar(5, 5) == 1.0
    assert st.mcnemar(0, 6) == pytest.approx(2 / 64)
    assert st.mcnemar(1, 9) == pytest.approx(2 * 11 / 1024)


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


def test_recovery_is_bounded_where_the_difference_from_its_share_is():
    """Fieller: at a bound r of the ratio, mean(ours - r theirs) is just not excluded to be 0; and on
    average the truth is inside."""
    rng = np.random.default_rng(0)

    def pair(n):
        theirs = (rng.random(n) < 0.8).astype(float)
        return np.where(rng.random(n) < 0.1, rng.random(n) < 0.7, theirs).astype(float), theirs

    ours, theirs = pair(300)
    low, high = st.ratio_bounds(ours, theirs).interval()
    assert low < ours.mean() / theirs.mean() < high
    for r, end in ((low, 0), (high, 1)):
        bounds = mean_bounds(ours - r * theirs, -r, 1).interval()
        assert bounds[end] == pytest.approx(0, abs=0.003)
    found = [st.ratio_bounds(*pair(100)).interval() for _ in range(200)]
    assert sum(low <= 0.79 / 0.8 <= high for low, high in found) >= 188


def test_p_values_agree_with_the_interval():
    values = np.random.default_rng(0).choice([-1.0, 0.0, 0.5], 300, p=[0.1, 0.85, 0.05])
    bounds = mean_bounds(values, -1, 1)
    low, high = bounds.interval(0.01)
    assert bounds.p_at_most(low) == pytest.approx(0.01, abs=0.001)
    assert bounds.p_at_least(high) == pytest.approx(0.01, abs=0.001)
    assert bounds.p_at_most(-1.0) < 1e-4 < bounds.p_at_most(0.0)
    assert low < values.mean() < high
