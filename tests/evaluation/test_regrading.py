"""What is kept is graded and compared again without a model or a server."""

import json
import os
import shutil

import pytest
from refused import refused
from replay_server import ReplayServer
from two_runs import TASK, write_runs

from quantkit.evaluation.options import EvaluateOptions, RegradeOptions
from quantkit.evaluation.regrading import regrade
from quantkit.evaluation.results.baseline import compare_runs, write_page
from quantkit.evaluation.run import run_evaluation


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two finished runs, good and poor, of ten sums; the poor one's last problem has no reply.
    Where they ran, and a copy."""
    folder, kept = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("kept") / "runs"
    write_runs(folder)
    shutil.copytree(folder, kept)
    return folder, kept


@pytest.fixture
def runs(finished):
    """The finished runs as they ended: a run remembers by their paths what it was of."""
    folder, kept = finished
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)
    return folder


def test_regrading_gives_the_same_grades_and_no_request(runs):
    before = (runs / "good" / "samples.jsonl").read_text()
    (runs / "good" / "samples.jsonl").unlink()
    told = []
    results = regrade(runs / "good", notice=told.append)
    assert told == [f"sums: 20 replies reused from {runs / 'good'}, none generated"]
    assert (runs / "good" / "samples.jsonl").read_text() == before
    assert (results.model, results.tasks["sums"].to_json()["accuracy"]) == ("good", 1.0)


def test_a_grader_that_changed_grades_anew(runs):
    (runs / "sums.yaml").write_text(TASK.replace("grader: integer", "grader: number"))
    assert regrade(runs / "good").tasks["sums"].setting.grader == "number"


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("sums.yaml", "{{ problem }}", "{{ problem }}!", "prompt"),
        ("sums.jsonl", "20", "21", "data"),
    ],
)
def test_replies_to_something_else_are_refused(runs, file, old, new, named):
    (runs / file).write_text((runs / file).read_text().replace(old, new))
    with refused(f"{named} of sums changed since"):
        regrade(runs / "good")


def test_data_that_moved_are_found(runs):
    (runs / "moved").mkdir()
    (runs / "sums.jsonl").rename(runs / "moved" / "sums.jsonl")
    assert (
        regrade(runs / "good", RegradeOptions(data_dir=runs / "moved")).tasks["sums"].reused == 20
    )


def test_a_run_that_never_ended_is_graded_too(runs):
    (runs / "good" / "results.json").unlink()
    journal = next((runs / "good" / "completions").glob("*.jsonl"))
    journal.write_text("\n".join(journal.read_text().split("\n")[:9]) + "\n{cut")
    results = regrade(runs / "good", RegradeOptions(baseline=None))
    assert (results.model, results.tasks["sums"].planned) == ("good", 7)


def test_a_run_with_too_many_errors_has_no_verdict(runs):
    """As a baseline, regraded or not; what failed is not kept."""
    lost = "2 of 20 samples of sums failed with the baseline poor: no verdict"
    table = compare_runs([runs / "good", runs / "poor"], margin=0.01)
    assert table["runs"][1]["results"]["sums"]["comparison"] is None
    assert table["runs"][1]["notes"] == [lost]
    results = regrade(runs / "good", RegradeOptions(baseline=runs / "poor"))
    assert (results.tasks["sums"].comparison, results.faults) == (None, [lost])
    other = regrade(runs / "poor", RegradeOptions(baseline=runs / "good"))
    assert other.tasks["sums"].comparison is not None


def test_finished_runs_are_compared_without_a_server(runs):
    regrade(runs / "poor")
    table = compare_runs([runs / "good", runs / "poor"], margin=0.01)
    found = table["runs"][1]["results"]["sums"]["comparison"]
    assert (found["n"], found["difference"]) == (9, pytest.approx(-1 / 9))
    assert found["sentence"].startswith("cannot tell: -11.1 points")
    write_page(runs / "page", table)
    page = (runs / "page" / "comparison.html").read_text()
    assert "cannot tell" in page
    assert page.count("<svg") == 2
    assert json.loads((runs / "page" / "comparison.json").read_text())["baseline"] == "good"


@pytest.mark.parametrize("folders", [["good"], ["good", "nowhere"], ["nowhere", "good"]])
def test_what_cannot_be_compared_is_refused(runs, folders):
    with refused(r"cannot be compared|holds no results"):
        compare_runs([runs / name for name in folders], margin=0.01)


def test_groups_have_their_own_figures_beside_the_baselines(runs):
    regrade(runs / "poor", RegradeOptions(baseline=runs / "good"))
    told = json.loads((runs / "poor" / "results.json").read_text())["results"]["sums"]["groups"]
    assert list(told) == ["1", "2"]
    first = told["1"]
    assert first["n"] == 5
    assert first["difference"] == pytest.approx(first["accuracy"] - first["baseline_accuracy"])
    assert first["low"] <= first["difference"] <= first["high"]


def test_accuracy_is_told_by_the_length_of_the_baselines_replies(runs):
    """Its replies to the first five problems are made long."""
    path = runs / "good" / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["completion_tokens"] = 10 if row["problem"] >= "s15" else 100 + 20 * row["repeat"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    regrade(runs / "poor", RegradeOptions(baseline=runs / "good"))
    task = json.loads((runs / "poor" / "results.json").read_text())["results"]["sums"]
    short, long = task["lengths"].items()
    assert (short[0], long[0], long[1]["n"]) == ("1 to 16", "65 to 128", 5)
    assert sum(one["n"] for one in task["lengths"].values()) == task["n"]
    for one in (short[1], long[1]):
        change = one["accuracy"] - one["baseline_accuracy"]
        assert one["difference"] == pytest.approx(change)
        assert one["low"] <= change <= one["high"]
    page = (runs / "poor" / "report.html").read_text()
    assert page.index("baseline&#39;s replies</h3>") < page.index("<td>65 to 128</td>")
    assert page.count("<svg") == 5


def test_the_last_run_is_graded_whatever_the_times_of_the_files(runs):
    """As after a copy without times, or a clock that was set back."""
    folder, asked = runs / "good", {"repeats": 1, "temperature": 0.1, "trust_kept": True}
    with ReplayServer(lambda question, body: "</think>\\boxed{0}", models=("good",)) as server:
        options = EvaluateOptions(data_dir=runs, out=folder, **asked)
        run_evaluation(server.url, [str(runs / "sums.yaml")], options)
    one, other = journals = sorted((folder / "completions").glob("*-*.jsonl"))
    for newest in journals:
        for journal in (one, other):
            os.utime(journal, (1e9 + (journal == newest),) * 2)
        told = []
        results = regrade(folder, notice=told.append)
        assert results.tasks["sums"].to_json()["accuracy"] == 0.0
        assert "replies of 2 runs" in told[1]
        assert "temperature 0.1" in told[1]
