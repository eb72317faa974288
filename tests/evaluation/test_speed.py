"""The definitions of the speed figures, the engine as a target, and a real HTTP server as the
other."""

import itertools
import json
import shutil
import threading
import time

import numpy as np
import pytest
from commands import typed
from edited import edited
from faulty_server import BROKEN, DONE, STOP, WHOLE, FaultyServer, chunk, event, stream
from refused import refused

from quantkit import Engine
from quantkit.evaluation.results.published import published_speeds_for
from quantkit.evaluation.speed.measure import (
    RequestTimes,
    Workload,
    measure_grid,
    now,
    read_prompts,
    summarize,
    write_report,
)
from quantkit.evaluation.speed.targets import EndpointTarget, EngineTarget

DELAY_S = 0.15
GAP_S = 0.02


def test_definitions_by_hand():
    """Two requests, one after the other: 1 s to the first token, then 10 ms (20 ms) for each of 100
    more."""
    times = [
        RequestTimes(0.0, 1.0, 2.0, 5, 101),
        RequestTimes(2.0, 3.0, 5.0, 7, 101),
        RequestTimes(0, 0, 0, 0, 0, error="HTTP 503"),
    ]
    row = summarize(times, input_len=6, concurrency=1)
    assert (row.requests, row.failed, row.first_error) == (2, 1, "HTTP 503")
    assert (row.ttft_s, row.latency_s, row.prompt_tokens) == (1.0, 2.5, 6)
    rates = (row.tpot_ms, row.tps, row.system_tps, row.to_json()["tpot_ms_p50"])
    assert rates == pytest.approx((15, 1000 / 15, 202 / 5, 15))


def test_percentiles_are_those_of_the_requests_and_left_out_where_they_are_too_few():
    row = summarize([RequestTimes(0, first, 10, 3, 5) for first in (3, 1, 4, 1, 5, 9, 2)], 3, 7)
    assert row.percentiles["ttft_s_p50"] == 3
    assert "ttft_s_p90" not in row.to_json()
    assert {"ttft_s_p90", "ttft_s_p99", "tpot_ms_p90"} <= set(row.left_out)
    many = summarize([RequestTimes(0, first, 200, 3, 5) for first in range(100)], 3, 7)
    assert many.left_out == []
    assert many.percentiles["ttft_s_p99"] == pytest.approx(98.01)


def test_gaps_rates_and_goodput_by_hand():
    """Three requests a second apart; the second's TTFT and the third's latency pass their
    limits."""
    times = [
        RequestTimes(0.0, 0.1, 1.1, 5, 3, gaps=(0.25, 0.75)),
        RequestTimes(1.0, 1.5, 2.1, 5, 3, gaps=(0.3, 0.3)),
        RequestTimes(2.0, 2.1, 4.0, 5, 1),
    ]
    row = summarize(times, 5, 1, rate=1.0, limits={"ttft": 200, "e2el": 1500, "tpot": 600})
    assert row.itl_ms == pytest.approx(400)
    assert row.request_rate == pytest.approx(3 / 4)
    assert row.goodput == pytest.approx(1 / 4)
    assert row.offered_rate == 1.0
    assert summarize(times, 5, 1).goodput is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "p.jsonl",
            '{"prompt": "one"}\n\n{"messages": [{"role": "system", "content": "s"}, {"role": '
            '"user", "content": "two\u2028"}]}\n',
        ),
        (
            "p.json",
            '[{"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": '
            '"x"}]}, {"text": "two"}, {"id": 3}]',
        ),
        ("p.txt", "one\n\ntwo\n"),
        ("p.CSV", "id,prompt\n1,one\n2,two\n"),
        ("p.ndjson", '{"text": "one"}\n{"text": "two"}\n'),
    ],
)
def test_prompts_are_read_from_files(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    assert read_prompts(tmp_path / name) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.json", "{}"),
        ("p.jsonl", '{"answer": 1}\n'),
        ("p.txt", "\n"),
        ("p.bin", ""),
    ],
)
def test_a_file_without_prompts_is_refused(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with refused(name):
        read_prompts(tmp_path / name)


def test_engine_grid(tiny_checkpoint):
    engine = Engine.load(tiny_checkpoint, device="cpu", max_batch=2, max_model_len=64)
    target, seen = EngineTarget(engine, "tiny", max_batch=2), []
    rows = measure_grid(target, [16, 8], [2, 1], output_len=5, on_row=seen.append)
    assert [(row.input_len, row.concurrency) for row in rows] == [(8, 1), (8, 2), (16, 1), (16, 2)]
    assert seen == rows
    for row in rows:
        assert row.output_len == 5, "the end-of-answer token must not end a benchmark request"
        assert row.requests == 2 * row.concurrency
        assert 0 < row.ttft_s < row.latency_s
        assert None not in (row.tpot_ms, row.itl_ms)
    for lengths, at_once, said in (
        ([8, 60], [1], "60 input and 5 output tokens exceed the context of 64"),
        ([8], [3], "concurrency 3"),
    ):
        with refused(said):
            measure_grid(target, lengths, at_once, output_len=5)
    load = {"rates": [50.0], "num_prompts": 5, "limits": {"e2el": 1e9}, "warmup": 1}
    (given,) = measure_grid(target, [], [2], 4, prompts=["1 + 1", "7"], **load)
    assert (given.input_len, given.requests, given.offered_rate) == (0, 5, 50.0)
    assert given.goodput == pytest.approx(given.request_rate)


def test_given_prompts_are_counted_in_tokens(tiny_checkpoint, tmp_path):
    """A prompt of more characters than the model's context has tokens was refused."""
    model, prompts = shutil.copytree(tiny_checkpoint, tmp_path / "model"), tmp_path / "prompts.txt"
    with edited(model / "config.json") as config:
        config |= {"max_position_embeddings": 100, "rope_scaling": None}
    prompts.write_text("<\uff5cUser\uff5c>" * 30)  # one token each
    asked = f"bench {model} --prompts {prompts} --num-prompts 2 --warmup 0 --device cpu"
    assert typed(f"{asked} --concurrency 1 --output-len 4").code == 0
    refused = typed(f"{asked} --concurrency 1 --output-len 100")
    assert refused.code == 2
    assert "tokens was requested, the model has 100" in refused.error


def test_report_shows_ours_and_the_published_apart(tmp_path):
    rows = [
        summarize([RequestTimes(0, 1, 1 + c, 8, 11)], input_len, c).to_json()
        for input_len in (8, 64)
        for c in (1, 4)
    ]
    result = {"target": "tiny", "hardware": "this machine", "output_len": 11, "rows": rows}
    result |= {"goodput_limits_ms": {}}
    pages = []
    for name in ("tiny", "DeepSeek-R1-0528-awq-w4a16"):
        write_report(tmp_path / name, result | {"published": published_speeds_for(name)})
        pages.append((tmp_path / name / "bench.html").read_text())
    assert "Published by others" not in pages[0]
    assert pages[1].count("<svg") == 3
    ours, _, published = pages[1].partition("Published by others")
    assert ["100.00" in ours, "400.00" in ours, "910B1" in ours] == [True, True, False]
    assert "910B1" in published
    assert json.loads((tmp_path / "tiny" / "bench.json").read_text())["rows"] == rows


def slowly(wire, body):
    """max_tokens tokens: a role-only chunk at once, the first token after DELAY_S, the others GAP_S
    apart."""
    count = body["max_tokens"]
    wire.stream(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
    time.sleep(DELAY_S)
    wire.write(*[chunk("x")] * count, every_s=GAP_S)
    usage = {"prompt_tokens": 12, "completion_tokens": count}
    wire.write(STOP, event({"choices": [], "usage": usage}), DONE)


@pytest.fixture
def server():
    with FaultyServer(slowly) as faulty:
        yield faulty.url


def test_endpoint_times_and_usage(server):
    target = EndpointTarget(server)
    assert target.model == "faulty"
    times = list(target.run(Workload(10, 5, requests=4, concurrency=2)))
    assert len(times) == 4
    for one in times:
        assert one.error is None
        assert (one.prompt_tokens, one.output_tokens) == (12, 5)
        assert one.ttft_s >= DELAY_S, "the role-only chunk is not a token"
        assert one.tpot_ms >= 1e3 * GAP_S * 0.9
        assert len(one.gaps) == 4
        assert sum(one.gaps) == pytest.approx(one.last_token - one.first_token)


def test_requests_that_arrive_wait_for_room(server):
    """Four at once, one at a time: each waits for those before it, and its wait counts."""
    target = EndpointTarget(server)
    times = target.run(Workload(4, 2, requests=4, concurrency=1, rate=1e6))
    assert max(one.ttft_s for one in times) >= 3 * (DELAY_S + GAP_S)
    work, before = Workload(4, 1, requests=4, concurrency=4, rate=8.0, seed=2), now()
    sent = sorted(one.sent - before for one in target.run(work))
    assert all(at >= due - 0.01 for at, due in zip(sent, work.arrivals(), strict=True))


def test_requests_arrive_as_a_poisson_process():
    """Gaps between arrivals are exponential: their mean is 1 / rate, and so is their deviation."""
    gaps = np.diff(list(Workload(1, 1, 4000, 1, rate=4.0).arrivals()))
    assert (gaps.mean(), gaps.std()) == pytest.approx((0.25, 0.25), rel=0.1)
    assert set(Workload(1, 1, 3, 1).arrivals()) == {0.0}


def test_no_prompt_is_sent_twice():
    """Not by a warm-up, not in a later cell, not in a later run: a server may keep what it
    computed, and would answer faster than it is."""
    sent = []

    def note(wire, body):
        sent.append(body["messages"][0]["content"])
        WHOLE["separators inside text"](wire, body)

    with FaultyServer(note) as faulty:
        for _ in range(2):
            measure_grid(EndpointTarget(faulty.url), [24, 48], [1, 3], output_len=2, requests=1)
    assert len(sent) == 2 * 2 * 2 * (1 + 3)
    assert len({words[: len(" time" * 20)] for words in sent}) == len(sent)


@pytest.mark.parametrize("name", ["data null", "HTML", "cut between lines", "reset"])
def test_a_broken_reply_is_one_failed_request(name):
    count = itertools.count()

    def second_is_broken(wire, body):
        (BROKEN[name] if next(count) == 1 else WHOLE["separators inside text"])(wire, body)

    with FaultyServer(second_is_broken) as faulty:
        times = list(EndpointTarget(faulty.url).run(Workload(4, 2, requests=3, concurrency=1)))
    assert sum(one.error is not None for one in times) == 1


@pytest.mark.parametrize(
    "tokens", ["2", 2.5, True, float("nan"), 10**400], ids=lambda value: str(value)[:5]
)
def test_a_count_that_is_none_is_the_requests_fault(tokens):
    usage = event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}})
    with (
        FaultyServer(stream(chunk("a"), chunk("b"), usage, DONE)) as faulty,
        refused(r"all 1 .*completion_tokens is not a token count"),
    ):
        measure_grid(EndpointTarget(faulty.url), [4], [1], output_len=2, num_prompts=1)


@pytest.mark.parametrize("name", ["not streamed", "JSON lines", "chunks without an end", "gzip"])
def test_a_whole_reply_is_one_however_it_is_sent(name):
    """But one that is not streamed, of which it is not known when its tokens came."""
    with FaultyServer(WHOLE[name]) as faulty:
        (times,) = EndpointTarget(faulty.url).run(Workload(4, 2, requests=1, concurrency=1))
    assert times.error == ("the reply had no streamed text" if name == "not streamed" else None)
    assert times.prompt_tokens >= 0


def test_pieces_that_nobody_counted_are_told():
    """vLLM with an MTP layer sends two tokens in a piece; without a usage nothing says so."""
    found = []
    for name in ("usage null", "plain"):
        with FaultyServer(WHOLE[name]) as faulty:
            target = EndpointTarget(faulty.url)
            found += measure_grid(target, [4], [1], output_len=2, num_prompts=3)
            asked = f"bench {faulty.url} --input-len 4 --concurrency 1 --output-len 2 --warmup 0"
            told = " ".join(typed(asked).err.split())
        assert ("no token count for 2 replies" in told) == (name == "usage null")
    assert [(row.output_len, row.uncounted) for row in found] == [(2, 3), (2, 0)]


def test_a_reply_without_an_end_is_left():
    left = threading.Event()

    def endless(wire, body):
        wire.head()
        try:
            while True:
                wire.write(chunk("a "))
        except OSError:
            left.set()

    with FaultyServer(endless) as faulty:
        (times,) = EndpointTarget(faulty.url).run(Workload(4, 2, requests=1, concurrency=1))
        assert times.error == "the reply does not end: more than 72 chunks for 2 requested tokens"
        assert left.wait(10)
