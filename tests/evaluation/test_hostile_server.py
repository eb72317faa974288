"""A server that says anything: names, reasons and numbers of its choice. The evaluation ends with
results and a page all the same, and what was answered is kept and can be graded again."""

import json
import random

import pytest
from hostile_results import TEXTS
from replay_server import ReplayServer, Reply
from sample_sizes import sized
from two_runs import write_task

from quantkit.evaluation.options import EvaluateOptions
from quantkit.evaluation.regrading import regrade
from quantkit.evaluation.results import report
from quantkit.evaluation.run import run_evaluation

WORDS = (*TEXTS, "\ud800", "\udc00\ud800", "a\x00b", "\x9b2J", "length\n", "é" * 200, "_", "..")


@pytest.mark.parametrize("seed", range(sized(8, 60)))
def test_the_run_ends_with_results(tmp_path, seed):
    draw, tasks = random.Random(seed), [write_task(tmp_path, range(2))]

    def answer(question, body):
        said = draw.choice(("\\boxed{4}", *WORDS))
        reason = draw.choice(("stop", "length", *WORDS))
        return Reply(f"</think>{said}", reason, reasoning=draw.choice((None, *WORDS[:6])))

    out, name = tmp_path / "out", draw.choice(WORDS)
    with ReplayServer(answer, models=(name,)) as server:
        options = EvaluateOptions(data_dir=tmp_path, out=out, repeats=1, format="evalscope")
        run_evaluation(server.url, tasks, options)
    assert json.loads((out / "results.json").read_text())["results"]["sums"]["n"] == 2
    page = (out / "report.html").read_text()
    assert "<b>evil" not in page
    assert "\x1b" not in page
    assert all(path.is_relative_to(out / "evalscope") for path in out.rglob("sums.json"))
    assert len(list(out.rglob("evalscope/reports/*/sums.json"))) == 1
    assert regrade(out).tasks["sums"].reused == 2


def test_a_page_that_fails_is_a_notice(tmp_path, monkeypatch):
    tasks, notices = [write_task(tmp_path, range(2))], []
    monkeypatch.setattr(report, "bars_plot", lambda *rows: [][1])
    with ReplayServer(lambda question, body: "</think>\\boxed{4}") as server:
        options = EvaluateOptions(data_dir=tmp_path, out=tmp_path / "out", repeats=1)
        run_evaluation(server.url, tasks, options, notice=notices.append)
    assert (tmp_path / "out" / "results.json").exists()
    assert any("report.html could not be made (IndexError" in notice for notice in notices)
