import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refused import refused
from replay_server import ReplayServer, Reply
from two_runs import write_task

from quantkit.common.assets import builtin_model
from quantkit.evaluation.generation import PROBE_TOKENS, expected_length, silent
from quantkit.evaluation.options import EvaluateOptions
from quantkit.evaluation.run import run_evaluation


@pytest.fixture
def task(tmp_path):
    return write_task(tmp_path)


def solve(question, body):
    """Right, except for sums of 13 and, on odd seeds, of 14."""
    left = int(question.split()[0])
    wrong = left == 13 or (left == 14 and body.get("seed", 0) % 2)
    return f"{left}... \\boxed{{1}}\n</think>\n\nIt is \\boxed{{{2 * left + bool(wrong)}}}."


def right(question, body):
    return f"</think>\\boxed{{{2 * int(question.split()[0])}}}"


def refusing(*reply, **facts):
    """As `solve`, but that 12 + 12 is refused."""

    def answer(question, body):
        return Reply(*reply, **facts) if question.startswith("12") else solve(question, body)

    return answer


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
    figures = {"accuracy": 0.75, "n": 4, "unfinished": 0.0, "no_answer": 0.0, "strict": 0.75}
    assert figures.items() <= sums.items()
    assert sums["stderr"] == pytest.approx(0.25)
    assert sums["reasons"] == {"right": 3, "wrong": 1}
    assert (told["model"], sums["protocol"]) == ("replayed", "r1")
    assert sums["facts"]["generation"]["max_tokens"] == 64
    rows = written(tmp_path / "out")
    assert [row["problem"] for row in rows] == ["s10", "s11", "s12", "s13"]
    assert [row["answer"] for row in rows] == ["20", "22", "24", "27"]
    assert [row["gold"] for row in rows] == ["20", "22", "24", "26"]
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


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"temperature": 0.9}, "generation"),
        ({"seed": 5}, "seed"),
        ({"protocol": "evalscope"}, "prompt"),
    ],
)
def test_a_changed_setting_is_noticed_and_nothing_old_is_reused(task, tmp_path, changed, named):
    asked_for = {"out": tmp_path / "out", "limit": 3}
    with ReplayServer(solve) as server:
        for more, counts in (({}, (0, 3)), (changed, (0, 6)), ({}, (3, 6))):
            found = run(server, task, **asked_for, **more).tasks["sums"]
            assert (found.reused, len(asked(server))) == counts
            assert not more or named in found.notes[0]


def test_lost_replies_are_told_loudly(task, tmp_path):
    def answer(question, body):
        left = int(question.split()[0])
        if left < 13:
            return Reply(f"let me think \\boxed{{{2 * left}}}", "length")
        return Reply("</think>I cannot say." if left < 15 else f"</think>that is {2 * left}")

    with ReplayServer(answer) as server:
        told = figures(run(server, task, max_tokens=23))
    lost = {"accuracy": 0.5, "strict": 0.0, "unfinished": 0.3, "no_answer": 0.2}
    assert lost.items() <= told.items()
    text = " ".join(told["warnings"])
    assert "30% of replies did not finish their reasoning (max_tokens 23): they count as" in text
    assert "20% of replies give no answer (95 % 2.5 to " in text
    assert "50% of replies are right but not in the requested format" in text


@pytest.mark.parametrize(
    ("reply", "options", "cause"),
    [
        (Reply("", reasoning="let me think"), {}, "reasoning parser does not fit the model"),
        (Reply("<think>let me think"), {}, "ended by themselves inside their reasoning"),
        (Reply("let me think", "length"), {"max_tokens": 10**6}, "a longer context is needed"),
    ],
)
def test_what_no_limit_cut_is_not_cured_by_max_tokens(task, tmp_path, reply, options, cause):
    with ReplayServer(lambda question, body: reply) as server:
        told = figures(run(server, task, limit=2, **options))
    assert (told["unfinished"], told["no_answer"]) == (1, 0)
    assert told["no_answer_interval"][0] == 0 < told["no_answer_interval"][1]
    assert told["warnings"][0].startswith("100% of replies")
    assert cause in told["warnings"][0]
    assert "--max-tokens" not in told["warnings"][0]


def test_failed_requests_are_left_out_and_asked_again(task, tmp_path):
    out = tmp_path / "out"
    with ReplayServer(refusing("not allowed", status=403)) as server:
        results = run(server, task, out=out, limit=4)
    first, fault = figures(results), "1 of 4 samples of sums failed: no verdict. "
    assert (first["n"], first["errors"], first["planned"]) == (3, 1, 4)
    assert first["accuracy"] == pytest.approx(2 / 3)
    assert "1 of 4 samples failed" in first["warnings"][0]
    assert results.faults == [f"{fault}The first: HTTP 403: not allowed"]
    assert json.loads((out / "results.json").read_text())["faults"] == results.faults
    assert "No verdict." in (out / "report.html").read_text()
    with ReplayServer(solve) as server:
        second = figures(run(server, task, out=out, limit=4))
    assert (second["n"], second["errors"], second["reused"]) == (4, 0, 3)


def test_a_baseline_that_is_a_model_or_a_folder_gives_the_same_comparison(task, tmp_path):
    ours, folder = tmp_path / "a", str(tmp_path / "b")
    with ReplayServer(right) as good, ReplayServer(solve) as worse:
        live = run(worse, task, out=ours, baseline=good.url, repeats=3)
        run(good, task, out=tmp_path / "b", repeats=3)
        kept = run(worse, task, out=ours, baseline=folder, repeats=3)
        other = run(worse, task, baseline=folder, repeats=3, temperature=0.9)
    comparison = live.tasks["sums"].comparison
    assert comparison == kept.tasks["sums"].comparison
    assert (comparison.n, comparison.lost, comparison.gained, comparison.repeats) == (10, 2, 0, 3)
    assert comparison.difference == pytest.approx(figures(live)["accuracy"] - 1)
    assert figures(live)["comparison"]["sentence"].startswith("cannot tell")
    assert "not directly comparable" in other.tasks["sums"].notes[0]
    assert (ours / "baseline" / "completions").is_dir()


PROGRAM = {"task_id": "0", "prompt": "def f(): ", "entry_point": "f", "test": "def check(c): pass"}


def test_everything_is_refused_before_a_model_is_asked(task, tmp_path):
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(PROGRAM) + "\n")
    for wrong, told in [
        ({"tasks": ["humaneval"], "repeats": 1}, "--allow-code-exec"),
        ({"tasks": ["nope"]}, "task 'nope' is not known"),
        ({"tasks": [task, task]}, "named twice"),
        ({"tasks": ["", ""]}, "no task given; name one with --tasks"),
        ({"tasks": [task, ""]}, "a name is empty in --tasks .*sums.yaml,; leave out the comma"),
        ({"temperature": float("inf")}, "--temperature is inf; use 0"),
        ({"timeout": float("inf")}, "--timeout is inf; give seconds, 1,000,000 at most"),
        ({"api_key": "ключ"}, "--api-key contains a character"),
        ({"limit": 0}, "--limit is 0"),
        ({"repeats": 2, "temperature": 0.0}, "greedy"),
        ({"protocol": "lm-eval"}, "does not define protocol"),
        ({"data_dir": tmp_path / "nowhere"}, "not a directory"),
        ({"baseline": str(tmp_path / "results.json")}, "does not exist"),
        ({"tasks": ["tiny-math"], "margin": 0}, "--margin"),
    ]:
        options = {"tasks": [task], "data_dir": tmp_path, **wrong}
        with refused(told):
            run_evaluation("http://127.0.0.1:9", options.pop("tasks"), EvaluateOptions(**options))


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


def test_a_local_model_answers_in_process(tmp_path):
    options = EvaluateOptions(limit=4, out=tmp_path / "out")
    results = run_evaluation("tiny-r1", ["tiny-math"], options)
    math = results.to_json()["results"]["tiny-math"]
    assert (math["n"], math["protocol"]) == (4, "r1")
    assert math["facts"]["generation"]["temperature"] == 0.0
    rows = written(tmp_path / "out")
    assert all(row["finish_reason"] == "length" or "</think>" in row["text"] for row in rows)
    assert math["accuracy"] >= 0.5
    assert len(results.identity["checkpoint"]) == 64
    again = run_evaluation(str(builtin_model("tiny-r1")), ["tiny-math"], options)
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
            r"replayed is not the model whose 6 replies are stored in .*--trust-kept uses"
        ):
            run(now, task, out=out, limit=4, repeats=2)
        assert asked(now) == []
        own = run(now, task, out=out, limit=4, repeats=2, model_revision="second")
        assert own.tasks["sums"].reused == 0
        assert own.identity == {"model": "replayed", "revision": "second"}
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


def test_a_refused_context_counts_as_a_miss(task, tmp_path):
    refusal = "maximum context length is 16"
    with ReplayServer(refusing(refusal, status=400)) as server:
        told = figures(run(server, task, out=tmp_path / "out", limit=4, concurrency=1))
    assert (told["n"], told["errors"], told["accuracy"]) == (4, 0, 0.5)
    assert told["reasons"]["context"] == 1
    assert any("longer than the model's context" in warning for warning in told["warnings"])
    with (
        ReplayServer(lambda question, body: Reply(refusal, status=400)) as server,
        refused(f"refused as too long: HTTP 400: {refusal}; lower --max-tokens"),
    ):
        run(server, task, limit=4)


def test_a_grown_run_is_looked_at_with_more_care(task, tmp_path):
    with ReplayServer(right) as good, ReplayServer(solve) as worse:
        run(good, task, out=tmp_path / "good", repeats=3)
        asked = {"out": tmp_path / "out", "baseline": str(tmp_path / "good")}
        looks = [
            run(worse, task, repeats=repeats, **asked).tasks["sums"].comparison
            for repeats in (2, 2, 3)
        ]
    assert [(look.look, look.level) for look in looks if look] == [(1, 0.95), (1, 0.95), (2, 0.975)]
    assert "97.5 %" in looks[2].sentence()


@pytest.mark.parametrize(
    ("mean", "spread", "limit", "at_once", "rate"),
    [
        (10_000, 0.6, 32_768, 64, 25),  # AIME
        (200, 0.0, 256, 20, 1),  # a slow machine, replies cut by the limit
        (150, 0.5, None, 8, 10),
    ],
)
def test_the_tokens_left_are_known_after_a_minute(mean, spread, limit, at_once, rate):
    """Replies of these lengths, `at_once` of them at `rate` tokens/s each: after 60 s the mean
    length is known within a factor of two."""
    noise = np.random.default_rng(0).normal(-(spread**2) / 2, spread, 2000)
    drawn = np.minimum(mean * np.exp(noise), limit or np.inf)
    lengths, finished, running = iter(drawn.astype(int).tolist()), [], []
    for _ in range(at_once):  # each slot for 60 s
        left = 60 * rate
        while (length := next(lengths)) <= left:
            finished.append(length)
            left -= length
        running.append(left)
    assert drawn.mean() / 2 < expected_length(finished, running, limit) < 2 * drawn.mean()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quantkit_%s_tokens_total", ("drafted", "accepted")),
        ("vllm:spec_decode_num_%s_tokens_total", ("draft", "accepted")),
    ],
)
def test_the_accepted_length_is_that_of_the_runs_own_tokens(task, name, words):
    """Also on a server that has drafted nothing yet."""

    def metrics(drafted):
        counts = zip(words, (drafted, drafted // 2))
        return "# HELP\n" + "".join(f'{name % word}{{engine="0"}} {n}.0\n' for word, n in counts)

    def answer(question, body):
        server.metrics = metrics(4 * len(server.requests))
        return Reply("</think>" + "x" * 12)

    with ReplayServer(answer) as server:
        server.metrics = metrics(0)
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
    with refused("give --baseline and --out"):
        run_evaluation("http://x", [task], replace(options, out=None))
