"""The verdict on these very problems: how often it is wrong, and what a sequential plan of it
takes. Replies are drawn from logistic problems, as in benchmarks/verdicts.py."""

import itertools
from collections import Counter

import numpy as np
import pytest
import verdicts

from quantkit.evaluation.statistics import sampling
from quantkit.evaluation.statistics.power import POWER


@pytest.mark.parametrize("loss", [0.0, 0.065])
@pytest.mark.parametrize(("stored", "tokens"), [(None, 0.85), (64, 0.6)])
def test_a_sequential_plan_errs_as_fixed_repeats_do_and_takes_fewer_tokens(loss, stored, tokens):
    runs = [
        verdicts.sequential_run(seed, 30, 0.8, 2.5, loss, 0.065, stored=stored)
        for seed in range(40)
    ]
    fixed, staged = (Counter(one[place] for one in runs) for place in (0, 1))
    right, wrong = ("lost", "held") if loss else ("held", "lost")
    assert max(fixed[wrong], staged[wrong]) <= 0.08 * len(runs)
    assert staged[right] >= fixed[right] - 0.2 * len(runs)
    assert np.mean([one[2] for one in runs]) < tokens


def test_boundaries_spend_the_error():
    bounds = sampling.boundaries(sampling.STAGES, 0.025)
    assert bounds == sorted(bounds, reverse=True)
    t = np.asarray(sampling.STAGES) / sampling.STAGES[-1]
    steps = np.random.default_rng(5).standard_normal((100_000, len(t)))
    walk = (steps * np.sqrt(np.diff(t, prepend=0))).cumsum(axis=1) / np.sqrt(t)
    assert (walk >= bounds).any(axis=1).mean() == pytest.approx(0.025, abs=0.002)


def test_repeats_go_where_answers_vary_and_are_short():
    other = {"sure": [1, 1, 1, 1], "varies": [1, 0, 1, 0], "long": [1, 0, 1, 0]}
    lengths = {"sure": 100.0, "varies": 100.0, "long": 10_000.0}
    assert set(sampling.repeats_of_stage(other, lengths, 16, 0).values()) == {sampling.PILOT}
    found = [sampling.repeats_of_stage(other, lengths, 16, stage) for stage in (1, 3, 6)]
    assert all(one["varies"] > one["sure"] >= sampling.PILOT for one in found[1:])
    assert all(one["varies"] > one["long"] for one in found[1:])
    assert all(a[name] <= b[name] for a, b in itertools.pairwise(found) for name in other)


def test_the_margin_that_repeats_decide():
    needed = sampling.repeats_for_margin(0.2, 30, 0.05)
    assert sampling.decidable_margin(0.2, 30, needed) <= 0.05
    assert sampling.decidable_margin(0.2, 30, needed - 1) > 0.05
    p = np.full(30, 0.887)  # 2 p (1 - p) is 0.2
    rng = np.random.default_rng(1)
    said = Counter(
        sampling.compare_sampling(
            verdicts.table(rng, p, needed), verdicts.table(rng, p, needed), margin=0.05
        ).verdict
        for _ in range(200)
    )
    assert said["held"] / 200 == pytest.approx(POWER, abs=0.08)
