"""An endpoint that misbehaves: what is whole is read, what is not fails its own sample, and no
other one."""

import itertools
import threading
import time
import tracemalloc

import pytest
from faulty_server import (
    BROKEN,
    DONE,
    END,
    STOP,
    TEXT,
    WHOLE,
    FaultyServer,
    chunk,
    event,
    refuse,
    stream,
)
from refused import refused

from quantkit.evaluation.generators import endpoint
from quantkit.evaluation.generators.endpoint import Endpoint
from quantkit.evaluation.generators.generator import Generation, Prompt


def ask(behaviour, count=1, **options):
    """Replies to the prompts "0", "1", ..."""
    settings = {"backoff_s": 0.001, "retries": 1, "timeout_s": 0.5} | options
    with FaultyServer(behaviour) as server:
        prompts = [Prompt(messages=({"role": "user", "content": str(n)},)) for n in range(count)]
        return sorted(
            Endpoint(server.url, **settings).generate(prompts, Generation()),
            key=lambda reply: reply.index,
        )


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_whole_is_read_whole(name):
    (reply,) = ask(WHOLE[name], timeout_s=5.0)
    assert (reply.text, reply.finish_reason, reply.error) == (TEXT, "stop", None)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_fails_its_own_sample(name):
    def one_of_three(wire, body):
        (BROKEN[name] if body["messages"][0]["content"] == "1" else WHOLE["plain"])(wire, body)

    first, broken, last = ask(one_of_three, 3)
    assert (first.text, last.text) == (TEXT, TEXT)
    assert broken.error
    assert broken.text == ""


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 4100 tokens",
        "Input is too long for requested model",
        "the request exceeds the available context size, try increasing the context window",
        "context_length_exceeded",
        "input length and `max_tokens` exceed context limit: 5000 + 100 > 4096",
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096",
    ],
)
def test_a_refused_context_is_a_miss_with_its_name(message):
    (reply,) = ask(refuse(400, message))
    assert (reply.finish_reason, reply.error) == ("context", None)
    assert reply.refusal
    assert message in reply.refusal


def test_a_context_refused_inside_the_stream_is_a_miss_too():
    (reply,) = ask(stream(event({"error": {"message": "maximum context length is 4096 tokens"}})))
    assert (reply.finish_reason, reply.error) == ("context", None)


def test_a_time_to_wait_that_is_no_number_costs_no_sample():
    busy = iter(["²", "soon", "-5", "Mon, 01 Jan 1990 00:00:00 GMT"])

    def answer(wire, body):
        if (told := next(busy, None)) is None:
            return WHOLE["plain"](wire, body)
        wire.head(429, "application/json", Retry_After=told)

    assert ask(answer, retries=4)[0].text == TEXT


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("length", "length"),
        ("MAX_TOKENS", "length"),
        ("eos", "stop"),
        ("content_filter", "content_filter"),
        ("bananas", "bananas"),
    ],
)
def test_finish_reasons_are_read_or_kept(sent, read):
    (reply,) = ask(stream(chunk("4", finish_reason=sent), DONE))
    assert (reply.text, reply.finish_reason) == ("4", read)


def test_a_slow_reply_is_not_a_silent_one():
    (reply,) = ask(stream(*[chunk("x")] * 8, END, every_s=0.1), retries=0)
    assert (reply.text, reply.error) == ("x" * 8, None)


@pytest.mark.parametrize("sent", [b"", b": wait\n\n"], ids=["nothing", "comments"])
def test_a_server_that_says_nothing_is_left(sent):
    (reply,) = ask(stream(*[sent] * 8, every_s=0.2), retries=0)
    assert "no answer in time" in (reply.error or "")


@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [
        (["a word "] * 6, range(6, 13)),
        (["a piece of some ten words, as drafts make them at once"] * 6, range(48, 97)),
        (["讲一讲你好吗"] * 10, range(20, 80)),
    ],
)
def test_tokens_under_way_are_known_within_a_factor_of_two(pieces, tokens):
    """However many a piece holds: the time left comes of it."""
    ended = threading.Event()

    def answer(wire, body):
        wire.stream(b"".join(chunk(piece) for piece in pieces))
        ended.wait(20)
        wire.write(END)

    with FaultyServer(answer) as server:
        endpoint = Endpoint(server.url)
        asked = threading.Thread(
            target=lambda: list(endpoint.generate([Prompt(text="x")], Generation()))
        )
        asked.start()
        while not ((found := endpoint.open_tokens()) and found[0] >= tokens[0]):
            assert asked.is_alive()
            time.sleep(0.01)
        ended.set()
        asked.join()
    assert found[0] in tokens


def test_a_reply_without_end_is_cut_off(monkeypatch):
    monkeypatch.setattr(endpoint, "LARGEST_REPLY", 100_000)
    tracemalloc.start()
    (reply,) = ask(stream(*itertools.repeat(chunk("x" * 10_000), 5_000)), retries=0)
    assert tracemalloc.get_traced_memory()[1] < 30e6
    tracemalloc.stop()
    assert "a reply of more than" in (reply.error or "")


def test_a_line_without_end_is_cut_off(monkeypatch):
    monkeypatch.setattr("quantkit.evaluation.openai_server.LONGEST_LINE", 100_000)
    (reply,) = ask(
        stream(b"data: ", *itertools.repeat(b"x" * 10_000, 5_000)),
        retries=0,
    )
    assert "a line of more than" in (reply.error or "")


@pytest.mark.parametrize(
    ("fault", "retries", "requests"), [("500", 0, 1), ("500", 2, 3), ("400", 2, 1)]
)
def test_retries_are_as_many_as_asked_for(fault, retries, requests):
    with FaultyServer(BROKEN[fault]) as server:
        endpoint = Endpoint(server.url, backoff_s=0.0, retries=retries)
        list(endpoint.generate([Prompt(text="x")], Generation()))
        assert len(server.requests) == requests


def test_a_server_that_refuses_everything_ends_the_run():
    with FaultyServer(BROKEN["403"]) as server:
        endpoint = Endpoint(server.url, concurrency=4)
        with refused("HTTP 403: not this prompt; check the address"):
            list(endpoint.generate([Prompt(text=str(n)) for n in range(200)], Generation()))
        assert len(server.requests) <= 8


def test_a_server_that_fails_at_everything_ends_the_run():
    """Each sample would be tried again, with longer and longer pauses, to the last."""
    with FaultyServer(BROKEN["500"]) as server:
        endpoint = Endpoint(server.url, concurrency=4, retries=1, backoff_s=0.001)
        with refused(
            r"none of the first [4-8] requests got a reply; last error: HTTP 500",
        ):  # 3 are under way
            list(endpoint.generate([Prompt(text=str(n)) for n in range(200)], Generation()))
        assert len(server.requests) <= 20


def test_prompts_that_are_refused_one_by_one_do_not():
    replies = ask(BROKEN["400"], 20, concurrency=4)
    assert all(reply.error for reply in replies)


def test_large_replies_are_whole():
    text = "x" * 3_000_000
    (reply,) = ask(
        stream(chunk(text), STOP, event({"usage": {"completion_tokens": 9}}), DONE),
        timeout_s=20.0,
    )
    assert (len(reply.text), reply.completion_tokens) == (3_000_000, 9)
