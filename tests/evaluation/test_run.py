import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refused import refused
from replay_server import ReplayServer, Reply

from quantkit.common.assets import builtin_model
from quantkit.evaluation.generation import PROBE_TOKENS, expected_length, silent
from quantkit.evaluation.options import EvaluateOptions
from quantkit.evaluation.run import run_evaluation

TASK = """
name: sums
version: 1
title: Sums
summary: Small sums.
data: {files: [sums.jsonl]}
optional: {id: id}
fields: {problem: question, answer: answer}
grader: integer
protocols:
  r1: {prompt: "{{ problem }}", generation: {max_tokens: 64}}
  evalscope: {prompt: "{{ problem }} Box it."}
"""


@pytest.fixture
def task(tmp_path):
    rows = [{"id": f"s{n}", "question": f"{n} + {n}", "answer": str(2 * n)} for n in range(10, 20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(TASK)
    return str(tmp_path / "sums.yaml")


def solve(question, body):
    """Right, except for sums of 13 and, on odd seeds, of 14."""
    left = int(question.split()[0])
    wrong = left == 13 or (left == 14 and body.get("seed", 0) % 2)
    return f"{left}... \\boxed{{1}}\n</think>\n\nIt is \\boxed{{{2 * left + bool(wrong)}}}."


def run(
    server,
    task,
    progress=None,
    notice=silent,
    **options,
):
    options = EvaluateOptions(data_dir=Path(task).parent, **options)
    return run_evaluation(server.url, [task], options, progress=progress, notice=notice)


def figures(results):
    return results.to_json()["results"]["sums"]


def written(out):
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def asked(server):
    """Requests for samples, without those that ask who is there."""
    return [
        body
        for body in server.requests
        if body["temperature"] > 0 or body.get("max_tokens") != PROBE_TOKENS
    ]


def test_the_straight_line(task, tmp_path):
    events = []
    with ReplayServer(solve) as server:
        results = run(server, task, out=tmp_path / "out", limit=4, progress=events.append)
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert told == json.loads(json.dumps(results.to_json()))
    sums = told["results"]["sums"]
    assert (sums["accuracy"], sums["n"], sums["unfinished"], sums["no_answer"], sums["strict"]) == (
        0.75,
        4,
        0.0,
        0.0,
        0.75,
    )
    assert sums["stderr"] == pytest.approx(0.25)
    assert sums["reasons"] == {"right": 3, "wrong": 1}
    assert (told["model"], sums["protocol"], sums["facts"]["generation"]["max_tokens"]) == (
        "replayed",
        "r1",
        64,
    )
    rows = written(tmp_path / "out")
    assert [(row["problem"], row["answer"], row["gold"]) for row in rows] == [
        ("s10", "20", "20"),
        ("s11", "22", "22"),
        ("s12", "24", "24"),
        ("s13", "27", "26"),
    ]
    assert (events[0].done, events[-1].done, events[-1].total) == (0, 4, 4)
    assert events[-1].tokens == sum(row["completion_tokens"] for row in rows)


def test_growing_a_run_asks_only_what_is_new(task, tmp_path):
    out = tmp_path / "out"
    with ReplayServer(solve) as server:
        run(server, task, out=out, limit=4, repeats=2)
        assert len(asked(server)) == 8
        first = (out / "samples.jsonl").read_text()
        run(server, task, out=out, limit=4, repeats=2, concurrency=2)
        assert len(asked(server)) == 8
        assert (out / "samples.jsonl").read_text() == first
        grown = run(server, task, out=out, limit=6, repeats=3)
        assert len(asked(server)) == 18
        assert grown.tasks["sums"].reused == 8
        seeds = [body["seed"] for body in asked(server)]
        assert len(set(seeds)) == 18


def test_a_killed_run_resumes_and_ends_the_same(task, tmp_path):
    class Killed(Exception):
        pass

    def kill(event):
        if event.stage == "generate" and event.done == 5:
            raise Killed

    with ReplayServer(solve) as server:
        whole = figures(run(server, task, out=tmp_path / "whole"))
        with pytest.raises(Killed):
            run(server, task, out=tmp_path / "cut", concurrency=1, progress=kill)
        assert not (tmp_path / "cut" / "results.json").exists()
        resumed = figures(run(server, task, out=tmp_path / "cut"))
    assert resumed["reused"] == 5
    for name in ("accuracy", "stderr", "reasons", "tokens", "interval"):
        assert resumed[name] == whole[name]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"temperature": 0.9}, "generation"),
        ({"seed": 5}, "seed"),
        ({"protocol": "evalscope"}, "prompt"),
    ],
)
def test_a_changed_setting_is_noticed_and_nothing_old_is_reused(task, tmp_path, changed, named):
    with ReplayServer(solve) as server:
        run(server, task, out=tmp_path / "out", limit=3)
        again = run(server, task, out=tmp_path / "out", limit=3, **changed)
        assert len(asked(server)) == 6
        assert named in again.tasks["sums"].notes[0]
        back = run(server, task, out=tmp_path / "out", limit=3)
        assert (back.tasks["sums"].reused, len(asked(server))) == (3, 6)


def test_lost_replies_are_told_loudly(task, tmp_path):
    def answer(question, body):
        left = int(question.split()[0])
        if left < 13:
            return Reply(f"let me think \\boxed{{{2 * left}}}", "length")
        return Reply("</think>I cannot say." if left < 15 else f"</think>that is {2 * left}")

    with ReplayServer(answer) as server:
        told = figures(run(server, task, max_tokens=23))
    assert (told["accuracy"], told["strict"], told["unfinished"], told["no_answer"]) == (
        0.5,
        0.0,
        0.3,
        0.2,
    )
    text = " ".join(told["warnings"])
    assert (
        "30% of replies did not finish their reasoning (max_tokens 23): they count as wrong; raise "
        "--max-tokens" in text
    )
    assert "20% of replies give no answer (95 % 2.5 to " in text
    assert "50% of replies are right but not in the requested format" in text


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (Reply("", reasoning="let me think"), "reasoning parser does not fit the model"),
        (Reply("<think>let me think"), "ended by themselves inside their reasoning"),
    ],
)
def test_what_no_limit_cut_is_not_cured_by_max_tokens(task, tmp_path, reply, cause):
    with ReplayServer(lambda question, body: reply) as server:
        results = run(server, task, limit=2)
    told = figures(results)
    assert (told["unfinished"], told["no_answer"]) == (1, 0)
    assert told["no_answer_interval"][0] == 0 < told["no_answer_interval"][1]
    warning = told["warnings"][0]
    assert warning.startswith("100% of replies")
    assert cause in warning
    assert "--max-tokens" not in warning


def test_replies_that_the_context_cut_are_not_cured_by_max_tokens(task, tmp_path):
    with ReplayServer(lambda question, body: Reply("let me think and think", "length")) as server:
        results = run(server, task, max_tokens=10**6)
    (told, *_) = results.tasks["sums"].warnings()
    assert re.search(
        r"\(max_tokens 1000000, but the context ended them at \d+ or before\): .*; a longer "
        r"context is needed",
        told,
    ), told


def test_failed_requests_are_left_out_and_asked_again(task, tmp_path):
    broken = True

    def answer(question, body):
        return (
            Reply("bad prompt", status=400)
            if broken and question.startswith("12")
            else solve(question, body)
        )

    with ReplayServer(answer) as server:
        first = figures(run(server, task, out=tmp_path / "out", limit=4))
        assert (first["n"], first["errors"], first["planned"], first["accuracy"]) == (
            3,
            1,
            4,
            pytest.approx(2 / 3),
        )
        assert "1 of 4 samples failed" in first["warnings"][0]
        broken = False
        second = figures(run(server, task, out=tmp_path / "out", limit=4))
        assert (second["n"], second["errors"], second["reused"]) == (4, 0, 3)


def test_a_baseline_that_is_a_model_or_a_folder_gives_the_same_comparison(task, tmp_path):
    good = ReplayServer(lambda question, body: f"</think>\\boxed{{{2 * int(question.split()[0])}}}")
    with good, ReplayServer(solve) as worse:
        live = run(worse, task, out=tmp_path / "a", baseline=good.url, repeats=3)
        run(good, task, out=tmp_path / "b", repeats=3)
        kept = run(worse, task, out=tmp_path / "a", baseline=str(tmp_path / "b"), repeats=3)
        other = run(worse, task, baseline=str(tmp_path / "b"), repeats=3, temperature=0.9)
    comparison = live.tasks["sums"].comparison
    assert comparison == kept.tasks["sums"].comparison
    assert (comparison.n, comparison.lost, comparison.gained, comparison.repeats) == (10, 2, 0, 3)
    sampled = [body for body in worse.requests if body.get("temperature")][
        :30
    ]  # who answers is asked greedily, before
    odd = sum(body["seed"] % 2 for body in sampled if body["messages"][0]["content"] == "14 + 14")
    assert comparison.difference == pytest.approx(-(3 + odd) / 30)
    assert figures(live)["comparison"]["sentence"].startswith("cannot tell")
    assert "not directly comparable" in other.tasks["sums"].notes[0]
    assert (tmp_path / "a" / "baseline" / "completions").is_dir()


def test_everything_is_refused_before_a_model_is_asked(task, tmp_path):
    nobody = "http://127.0.0.1:9"
    for wrong, told in [
        ({"tasks": ["nope"]}, "task 'nope' is not known"),
        ({"tasks": [task, task]}, "named twice"),
        ({"tasks": []}, "no task"),
        ({"tasks": ["", ""]}, "no task given; name one with --tasks"),
        ({"tasks": [task, ""]}, "a name is empty in --tasks .*sums.yaml,; leave out the comma"),
        ({"temperature": float("inf")}, "--temperature is inf; use 0"),
        ({"timeout": float("inf")}, "--timeout is inf; give seconds, 1,000,000 at most"),
        (
            {"api_key": "key\n"},
            "--api-key contains a character that is not valid in an HTTP header",
        ),
        ({"api_key": "ключ"}, "--api-key contains a character"),
        ({"limit": 0}, "--limit is 0"),
        ({"repeats": 2, "temperature": 0.0}, "greedy"),
        ({"protocol": "lm-eval"}, "does not define protocol"),
        ({"data_dir": tmp_path / "nowhere"}, "not a directory"),
        ({"format": "helm", "out": tmp_path / "x"}, "--format evalscope"),
        ({"baseline": str(tmp_path / "results.json")}, "does not exist"),
        ({"tasks": ["tiny-math"], "margin": 0}, "--margin"),
    ]:
        options = {"tasks": [task], "data_dir": tmp_path, **wrong}
        with refused(told):
            run_evaluation(nobody, options.pop("tasks"), EvaluateOptions(**options))


def test_a_missing_model_is_found_before_its_baseline_is_run(task, tmp_path):
    with ReplayServer(solve) as server:
        for model, told in [
            ("http://127.0.0.1:9", "does not answer"),
            ("no-such-model", "no-such-model does not exist"),
        ]:
            with refused(told):
                run_evaluation(
                    model,
                    [task],
                    EvaluateOptions(data_dir=tmp_path, protocol="r1", baseline=server.url),
                )
            with refused(told):
                run(server, task, baseline=model)
        assert server.requests == []


def test_running_the_models_programs_needs_consent(tmp_path):
    row = {
        "task_id": "own/0",
        "prompt": "def two() -> int:\n",
        "entry_point": "two",
        "test": "def check(c):\n    assert c() == 2\n",
    }
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(row) + "\n")
    with ReplayServer(
        lambda question, body: "hm\n</think>\n```python\ndef two():\n    return 2\n```"
    ) as server:
        with refused("--allow-code-exec"):
            run_evaluation(server.url, ["humaneval"], EvaluateOptions(data_dir=tmp_path, repeats=1))
        assert server.requests == []
        told = run_evaluation(
            server.url,
            ["humaneval"],
            EvaluateOptions(data_dir=tmp_path, repeats=2, allow_code_exec=True),
        ).to_json()
    assert told["sandbox"] in ("namespaces", "rlimits")
    assert told["results"]["humaneval"]["reasons"] == {"passed": 2}


def test_a_local_model_answers_in_process(tmp_path):
    told = run_evaluation(
        "tiny-r1", ["tiny-math"], EvaluateOptions(limit=4, out=tmp_path / "out")
    ).to_json()
    math = told["results"]["tiny-math"]
    assert (math["n"], math["protocol"], math["facts"]["generation"]["temperature"]) == (
        4,
        "r1",
        0.0,
    )
    rows = written(tmp_path / "out")
    assert all(row["finish_reason"] == "length" or "</think>" in row["text"] for row in rows)
    assert math["accuracy"] >= 0.5
    assert len(told["identity"]["checkpoint"]) == 64
    again = run_evaluation(
        str(builtin_model("tiny-r1")), ["tiny-math"], EvaluateOptions(limit=4, out=tmp_path / "out")
    )
    assert again.tasks["tiny-math"].reused == 4


def test_another_model_under_the_same_name_is_told_before_anything_is_asked(task, tmp_path):
    def other(question, body):
        return f"No idea. {solve(question, body)}"

    told = []
    out = tmp_path / "out"
    with ReplayServer(solve) as before:
        run(before, task, out=out, limit=3, repeats=2)
    with ReplayServer(other) as now:
        with refused(
            r"replayed is not the model whose 6 replies are stored in .*--trust-kept uses",
        ) as fault:
            run(now, task, out=out, limit=4, repeats=2)
        assert "No idea" in str(fault.value)
        assert asked(now) == []
        own = run(now, task, out=out, limit=4, repeats=2, model_revision="second")
        assert (own.tasks["sums"].reused, own.identity) == (
            0,
            {"model": "replayed", "revision": "second"},
        )
        kept = run(now, task, out=out, limit=4, repeats=2, trust_kept=True, notice=told.append)
        assert kept.tasks["sums"].reused == 6
    assert f"sums: 6 replies reused from {out}, 2 to generate" in told


def test_a_server_that_samples_when_asked_greedily_is_told(task, tmp_path):
    count = itertools.count()
    told = []
    with ReplayServer(lambda question, body: f"{next(count)} {solve(question, body)}") as server:
        for _ in range(2):
            run(server, task, out=tmp_path / "out", limit=3, notice=told.append)
    assert any("gives different replies at temperature 0" in said for said in told)


def test_too_many_errors_leave_no_verdict(task, tmp_path):
    def answer(question, body):
        return (
            Reply("this prompt is not allowed", status=403)
            if question.startswith("12")
            else solve(question, body)
        )

    with ReplayServer(solve) as whole, ReplayServer(answer) as server:
        good = run(whole, task, out=tmp_path / "good", repeats=2)
        results = run(
            server,
            task,
            out=tmp_path / "out",
            baseline=str(tmp_path / "good"),
            repeats=2,
            concurrency=1,
        )
        beside = run(whole, task, baseline=str(tmp_path / "out"), repeats=2)
    assert results.tasks["sums"].comparison is None
    assert good.faults == []
    assert results.faults == [
        "2 of 20 samples of sums failed: no verdict. The first: HTTP 403: this prompt is not "
        "allowed"
    ]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["faults"] == results.faults
    assert "No verdict." in (tmp_path / "out" / "report.html").read_text()
    assert beside.tasks["sums"].comparison is None
    assert beside.faults == [
        "2 of 20 samples of sums failed with the baseline replayed: no verdict"
    ]


def test_a_refused_context_counts_as_a_miss(task, tmp_path):
    def answer(question, body):
        return (
            Reply("maximum context length is 16", status=400)
            if question.startswith("12")
            else solve(question, body)
        )

    with ReplayServer(answer) as server:
        results = run(server, task, out=tmp_path / "out", limit=4, concurrency=1)
    told = figures(results)
    assert (told["n"], told["errors"], told["accuracy"], told["reasons"]["context"]) == (
        4,
        0,
        0.5,
        1,
    )
    assert any("longer than the model's context" in warning for warning in told["warnings"])
    refusing = ReplayServer(
        lambda question, body: Reply("maximum context length is 16", status=400)
    )
    with (
        refusing,
        refused(
            "refused as too long: HTTP 400: maximum context length is 16; lower --max-tokens",
        ),
    ):
        run(refusing, task, limit=4)


def test_a_grown_run_is_looked_at_with_more_care(task, tmp_path):
    with (
        ReplayServer(
            lambda question, body: f"</think>\\boxed{{{2 * int(question.split()[0])}}}"
        ) as good,
        ReplayServer(solve) as worse,
    ):
        run(good, task, out=tmp_path / "good", repeats=3)
        looks = []
        for repeats in (2, 2, 3):
            results = run(
                worse, task, out=tmp_path / "out", repeats=repeats, baseline=str(tmp_path / "good")
            )
            looks.append(results.tasks["sums"].comparison)
    assert [(look.look, look.level) for look in looks if look] == [(1, 0.95), (1, 0.95), (2, 0.975)]
    assert "97.5 %" in looks[2].sentence()


@pytest.mark.parametrize(
    ("mean", "spread", "limit", "at_once", "rate"),
    [
        (10_000, 0.6, 32_768, 64, 25),  # AIME
        (1_000, 0.5, 32_768, 64, 25),  # GSM8K, a limit that no reply reaches
        (400, 0.4, 32_768, 8, 20),
        (200, 0.0, 256, 20, 1),  # a slow machine, replies cut by the limit
        (150, 0.5, None, 8, 10),
    ],
)
def test_the_tokens_left_are_known_after_a_minute(mean, spread, limit, at_once, rate):
    """Replies of these lengths, `at_once` of them at `rate` tokens/s each: after 60 s the mean
    length is known within a factor of two."""
    rng = np.random.default_rng(0)
    drawn = mean * np.exp(rng.normal(-(spread**2) / 2, spread, 2000))
    lengths = iter(np.minimum(drawn, limit or np.inf).astype(int).tolist())
    finished, running = [], []
    for _ in range(at_once):  # each slot for 60 s
        left = 60 * rate
        while (length := next(lengths)) <= left:
            finished.append(length)
            left -= length
        running.append(left)
    truth = float(np.minimum(drawn, limit or np.inf).mean())
    assert truth / 2 < expected_length(finished, running, limit) < 2 * truth


@pytest.mark.parametrize(
    "prefix", ["quantkit_%s_tokens_total", "vllm:spec_decode_num_%s_tokens_total"]
)
def test_the_accepted_length_is_that_of_the_runs_own_tokens(task, prefix):
    """Also on a server that has drafted nothing yet."""

    def answer(question, body):
        drafted = 4 * len(server.requests)
        server.metrics = metrics(drafted, drafted // 2)
        return Reply("</think>" + "x" * 12)

    def metrics(drafted, accepted):
        words = ("drafted", "accepted") if "quantkit" in prefix else ("draft", "accepted")
        lines = (
            f'{prefix % word}{{engine="0"}} {n}.0' for word, n in zip(words, (drafted, accepted))
        )
        return "# HELP\n" + "\n".join(lines) + "\n"

    with ReplayServer(answer) as server:
        server.metrics = metrics(0, 0)
        speed = run(server, task).tasks["sums"].speed
    tokens = 10 * len("</think>" + "x" * 12)
    assert speed["acceptance_rate"] == 0.5
    assert speed["accepted_length"] == pytest.approx(tokens / (tokens - 20))
    assert speed["tokens_per_s"] > 0


def two_models(share):
    """Right nearly always, but `share` of the time in every third sum."""

    def solve(question, body):
        left = int(question.split()[0])
        drawn = random.Random(f"{left} {body.get('seed')} {share}").random()
        wrong = drawn > (share if left % 3 == 0 else 0.97)
        return f"<think>x</think>\\boxed{{{2 * left + wrong}}}"

    return solve


@pytest.mark.parametrize(("share", "verdict"), [(0.6, "held"), (0.1, "lost")])
def test_a_sequential_run_ends_when_its_verdict_is_known(task, tmp_path, share, verdict):
    options = EvaluateOptions(
        data_dir=tmp_path, out=tmp_path / "out", margin=0.2, repeats=16, sequential=True
    )
    told = []
    with ReplayServer(two_models(share)) as one, ReplayServer(two_models(0.65)) as other:
        options = replace(options, baseline=other.url)
        results = run_evaluation(one.url, [task], options, notice=told.append)
        found = results.tasks["sums"].comparison.sampled
        assert (found.verdict, found.n) == (verdict, 10)
        first = len(asked(one))
        assert max(first, len(asked(other))) < 16 * 10
        run_evaluation(one.url, [task], options)
        assert len(asked(one)) == first, "asked twice"
    assert any("16 repeats of both" in line and "points take" in line for line in told)
    speed = figures(results)["speed"]
    assert speed is None or speed["tokens_per_s"] > 0
    with refused("give --baseline and --out"):
        run_evaluation("http://x", [task], replace(options, out=None))
