"""Verdicts: what they mean, and how often they are wrong where the truth is known
(benchmarks/verdicts.py has the whole table)."""

from collections import Counter

import numpy as np
import pytest
import verdicts

from quantkit.evaluation.statistics.comparison import compare, holm_corrected, one_sided_error
from quantkit.evaluation.statistics.power import plan

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


def test_the_looks_of_a_run_share_their_errors():
    assert one_sided_error(1) == 0.025
    assert sum(one_sided_error(look) for look in range(1, 10_000)) <= 0.05


def test_several_tasks_are_corrected():
    """Five tasks that each by itself are lost at 4 % are not, and one that is lost beyond doubt
    stays so."""
    small = {str(i): [0.0 if i < 6 else 1.0] for i in range(60)}
    clear = {str(i): [0.0 if i < 40 else 1.0] for i in range(60)}
    right = {str(i): [1.0] for i in range(60)}
    found = {str(task): compare(small, right) for task in range(4)} | {
        "clear": compare(clear, right)
    }
    assert found["0"].verdict == "lost"
    after = holm_corrected(found)
    assert (after["clear"].verdict, after["clear"].tasks) == ("lost", 5)
    assert (
        [after[str(task)].verdict for task in range(4)] == ["cannot tell"] * 4
        if found["0"].p_lost > 0.025 / 4
        else ["lost"] * 4
    )
    assert all(after[name].p_lost >= found[name].p_lost for name in found)
    assert holm_corrected({"one": found["0"]})["one"].p_lost == found["0"].p_lost


def test_a_verdict_that_the_correction_took_is_told():
    lost = {str(i): [0.0 if i < 6 else 1.0] for i in range(60)}
    right = {str(i): [1.0] for i in range(60)}
    found = compare(lost, right)
    after = holm_corrected({str(task): found for task in range(40)})["0"]
    assert (found.verdict, after.verdict) == ("lost", "cannot tell")
    assert "by itself it would be lost, among 40 tasks it is not" in after.sentence()


@pytest.mark.parametrize(("n", "repeats"), [(5, 64), (30, 1), (30, 64), (164, 8), (300, 64)])
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
    assert (told.n, told.gained, told.lost) == (2, 1, 0)
    assert told.mcnemar_p == 1.0
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
