"""Verdicts: what they mean, how often they are wrong where the truth is known (benchmarks/verdicts.py has
the whole table), and what a sequential plan of one on these very problems takes."""

import itertools
from collections import Counter

import numpy as np
import pytest
import verdicts

from quantkit.evaluation.statistics import sampling
from quantkit.evaluation.statistics.comparison import compare, holm_corrected
from quantkit.evaluation.statistics.power import POWER, plan

LINES = {f"{line.name}, {line.n} x {line.repeats}": line for line in verdicts.LINES}
CHEAP = [name for name, line in LINES.items() if line.n <= 400]


@pytest.mark.parametrize("name", CHEAP)
def test_false_verdicts_are_rare(name):
    line, runs = LINES[name], 60
    counts = Counter(one.verdict for one in verdicts.verdicts(line, runs, seed=1))
    assert counts["held" if line.loss else "lost"] <= 0.05 * runs


def test_a_run_that_grows_until_it_tells_is_rarely_wrong():
    assert verdicts.ever_said(LINES["the same model, 30 x 64"], "lost", 20, seed=2) <= 0.05
    assert verdicts.ever_said(LINES["whole problems lost, 30 x 64"], "held", 20, seed=3) <= 0.05


def loses(count):
    """The verdict on 60 problems of which so many are lost."""
    right = {str(i): [1.0] for i in range(60)}
    return compare({name: [float(int(name) >= count)] for name in right}, right)


def test_several_tasks_are_corrected():
    """Forty tasks that each by itself are lost at 4 % are not, and one that is lost beyond doubt
    stays so."""
    small, clear = loses(6), loses(40)
    assert small.verdict == "lost"
    after = holm_corrected({str(task): small for task in range(40)} | {"clear": clear})
    assert (after["clear"].verdict, after["clear"].tasks) == ("lost", 41)
    assert {after[str(task)].verdict for task in range(40)} == {"cannot tell"}
    told = "by itself it would be lost, among 41 tasks it is not"
    assert told in after["0"].sentence()
    assert "None" not in after["0"].sentence()
    assert after["0"].p_lost >= small.p_lost
    assert holm_corrected({"one": small})["one"].p_lost == small.p_lost


@pytest.mark.parametrize(("n", "repeats"), [(5, 64), (30, 1), (300, 64)])
def test_held_is_never_said_on_a_handful(n, repeats):
    same = {str(i): [1.0] * repeats for i in range(n)}
    told = compare(same, same)
    assert told.verdict == "cannot tell"
    assert told.low < -0.01
    assert told.repeats_needed is None, "no number of repeats makes up for problems"


def test_what_it_asks_for_tells_in_four_runs_of_five():
    asked, told = verdicts.advised(LINES["the same model, 200 x 4"], 12, seed=6)
    assert asked >= 8
    assert told >= 0.75


def test_greedy_runs_ask_for_problems_not_repeats():
    ours = {str(i): [float(i % 10 != 0)] for i in range(50)}
    theirs = {str(i): [float(i % 7 != 0)] for i in range(50)}
    told = compare(ours, theirs, greedy=True)
    assert told.repeats_needed is None
    assert told.problems_needed > 50
    assert "problems would" in told.sentence()


def test_only_shared_problems_count_and_mcnemar_needs_single_repeats():
    told = compare({"a": [1.0], "b": [0.0], "x": [1.0]}, {"a": [0.0], "b": [0.0], "y": [1.0]})
    assert (told.n, told.gained, told.lost, told.mcnemar_p) == (2, 1, 0, 1.0)
    assert compare({"a": [1.0, 0.0]}, {"a": [1.0, 1.0]}).mcnemar_p is None
    assert compare({"a": [1.0]}, {"b": [1.0]}) is None


def test_a_plan_keeps_its_word():
    """Runs of the size planned say held where nothing is lost, and lost where the margin is, in
    four of five."""
    row = next(row for row in plan(0.9, 0.05) if row.repeats == 4)
    same = verdicts.Line(
        "the same", lambda rng, n: (np.full(n, 0.9), np.full(n, 0.9)), row.held, 4, 0
    )
    worse = verdicts.Line("worse", verdicts.whole(0.05 / 0.9, 0.9), row.lost, 4, 5)
    rng = np.random.default_rng(7)
    assert sum(compare(*same.run(rng), margin=0.05).verdict == "held" for _ in range(20)) >= 12
    assert sum(compare(*worse.run(rng), margin=0.05).p_lost <= 0.025 for _ in range(20)) >= 14
    assert row.held < next(row for row in plan(0.9, 0.05) if row.repeats == 1).held


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
