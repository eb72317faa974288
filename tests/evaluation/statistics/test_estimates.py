import math

import numpy as np
import pytest

from quantkit.evaluation.statistics import estimates as st


def test_accuracy_weighs_problems_not_samples():
    assert st.accuracy([[1, 1, 1, 1], [0]]) == 0.5


def test_stderr_is_the_sample_deviation_over_root_n():
    table = [[1.0], [0.0], [1.0], [1.0]]
    assert st.clustered_stderr(table) == pytest.approx(math.sqrt(0.25 / 4))
    assert st.clustered_stderr([[1.0]]) is None


def test_sampling_stderr_covers_what_repeats_do():
    rng = np.random.default_rng(0)
    p = rng.random(40)
    runs = [
        st.accuracy((rng.random((40, 6)) < p[:, None]).astype(float).tolist()) for _ in range(800)
    ]
    told = np.mean(
        [
            st.sampling_stderr((rng.random((40, 6)) < p[:, None]).astype(float).tolist())
            for _ in range(200)
        ]
    )
    assert told == pytest.approx(np.std(runs), rel=0.1)
    assert st.sampling_stderr([[1.0], [0.0, 1.0]]) is None, "not of one repeat"


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
    assert st.majority([("5", False), ("6", True), ("6", True)]) == 1.0
    assert st.majority([("5", False), ("5", False), ("6", True)]) == 0.0
    assert st.majority([("5", False), ("6", True)]) == 0.5
    assert st.majority([(None, False), (None, False), ("6", True)]) == 1.0
    assert st.majority([(None, False)]) == 0.0


def test_mcnemar_is_the_exact_binomial():
    assert st.mcnemar(0, 0) == 1.0
    assert st.mcnemar(5, 5) == 1.0
    assert st.mcnemar(0, 6) == pytest.approx(2 / 64)
    assert st.mcnemar(1, 9) == pytest.approx(2 * 11 / 1024)
