"""An endpoint is asked and read. One that misbehaves: what is whole is read, what is not fails its own
sample, and no other one."""

import gc
import itertools
import threading
import time
import tracemalloc

import pytest
from faulty_server import (
    BROKEN,
    DONE,
    END,
    TEXT,
    WHOLE,
    FaultyServer,
    chunk,
    event,
    refuse,
    stream,
)
from refused import refused
from replay_server import ReplayServer, Reply

from quantkit.evaluation.generators.endpoint import Endpoint, request_body
from quantkit.evaluation.generators.generator import Generation, Prompt
from quantkit.evaluation.generators.openai_server import OpenAIServer, base_url
from quantkit.evaluation.options import EvaluateOptions


def chat(text, seed=0):
    return Prompt(messages=({"role": "user", "content": text},), seed=seed)


def ask(
    server,
    prompts,
    parameters=None,
    **options,
):
    endpoint = Endpoint(server.url, **{"backoff_s": 0.01} | options)
    return sorted(
        endpoint.generate(prompts, parameters or Generation()),
        key=lambda completion: completion.index,
    )


@pytest.mark.parametrize(
    "tail", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/completions"]
)
def test_any_form_of_the_address_will_do(tail):
    assert base_url(f"http://h:8000{tail}") == "http://h:8000/v1"


def test_replies_come_back_whole_and_in_their_place():
    def text(question, body=None):
        return f"你好 {question}\n</think>\n\n\\boxed{{{question}}}"

    with ReplayServer(text, delay_s=0.1) as server:
        replies = ask(server, [chat(str(n)) for n in range(12)], concurrency=4)
    assert [r.text for r in replies] == [text(n) for n in range(12)]
    for reply in replies:
        assert (reply.finish_reason, reply.prompt_tokens) == ("stop", 11)
        assert reply.completion_tokens == len(reply.text)
        assert (reply.think_open, reply.reasoning, reply.error) == (None, None, None)
    assert 1 < server.most_at_once <= 4


def test_fields_are_sent_renamed_and_left_out():
    """extra_body and its like decide over every field; a server that wants max_completion_tokens
    says so to the requests that are under way."""

    def answer(question, body):
        if "max_tokens" in body:
            message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return Reply(status=400, text=message)
        return "4"

    options = EvaluateOptions(
        extra_body='{"top_k": 20, "stream_options": null}',
        chat_template_kwargs='{"enable_thinking": false}',
        reasoning_effort="low",
        no_seed=True,
    )
    with ReplayServer(answer, delay_s=0.05) as server:
        replies = ask(
            server,
            [chat(str(number)) for number in range(8)],
            Generation(temperature=0.6, max_tokens=7),
            fields=options.request_fields,
            concurrency=4,
            retries=0,
        )
        first, sent = server.requests[0], server.requests[-1]
    assert [reply.text for reply in replies] == ["4"] * 8
    assert first["max_tokens"] == sent["max_completion_tokens"] == 7
    assert sent["top_k"] == 20
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert sent["reasoning_effort"] == "low"
    assert not {"max_tokens", "seed", "stream_options"} & sent.keys()
    with refused("--extra-body"):
        _ = EvaluateOptions(extra_body="top_k=20").request_fields


def test_a_reply_is_asked_for_within_the_servers_context():
    with ReplayServer(lambda question, body: "4") as server:
        endpoint = Endpoint(server.url)
        endpoint.context = 4096
        prompt = chat("问" * 100)
        next(endpoint.generate([prompt], Generation(max_tokens=32768)))
        next(endpoint.generate([prompt], Generation(max_tokens=100)))
        next(endpoint.generate([chat("7" * 3000)], Generation(max_tokens=32768)))
        first, second, digits = server.requests
    assert 3500 < first["max_tokens"] <= 4096 - 200
    assert second["max_tokens"] == 100
    assert digits["max_tokens"] <= 4096 - 3000, "a digit can be a token"


def test_the_request_says_what_was_asked():
    asked = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 7, "stop": ["\n"], "seed": 5}
    given = {name: value for name, value in asked.items() if name not in ("seed", "stop")}
    prompts = [chat("q", seed=5), Prompt(text="raw", seed=6)]
    with ReplayServer(lambda question, body: Reply("x", "length")) as server:
        replies = ask(server, prompts, Generation(stop=("\n",), **given), concurrency=1)
    first, second = server.requests
    assert (asked | {"model": "replayed"}).items() <= first.items()
    assert second["prompt"] == "raw"
    assert "messages" not in second
    assert [r.finish_reason for r in replies] == ["length", "length"]
    assert not {"max_tokens", "seed"} & request_body("m", chat("q"), Generation()).keys()


@pytest.mark.parametrize(
    "fault",
    [
        Reply("busy", status=503),
        Reply("slow down", status=429, headers={"Retry-After": "0"}),
        Reply("ab", fault="cut"),
        Reply("ab", fault="error"),
    ],
)
def test_passing_faults_are_retried(fault):
    tries = itertools.count()
    with ReplayServer(lambda question, body: fault if next(tries) < 2 else "fine") as server:
        (reply,) = ask(server, [chat("q")])
    assert (reply.text, reply.error, len(server.requests)) == ("fine", None, 3)


def test_a_server_that_goes_away_ends_the_run():
    server = ReplayServer(lambda question, body: "fine")
    with server:
        endpoint = Endpoint(server.url, backoff_s=0.01)
    with refused("the server is not reachable any more; start it and repeat the command"):
        list(endpoint.generate([chat("q") for _ in range(50)], Generation()))


def test_a_wrong_key_stops_at_once_and_is_told_once(caplog):
    with ReplayServer(lambda question, body: "fine", api_key="sk-1") as server:
        with refused("HTTP 401: wrong key"):
            ask(server, [chat("q") for _ in range(20)], concurrency=2)
        gc.collect()
        assert not [record for record in caplog.records if record.name == "asyncio"]
        assert len(server.requests) <= 6
        with refused(r"\(HTTP 401: wrong key\); give the server's key with --api-key$"):
            OpenAIServer(server.url).models()
        assert ask(server, [chat("q")], api_key="sk-1")[0].text == "fine"


def test_the_model_is_the_only_one_served_or_must_be_named():
    with ReplayServer(lambda question, body: "x", models=("a", "b")) as server:
        with refused("serves 2 models: a, b"):
            Endpoint(server.url)
        assert Endpoint(server.url, model="b").name == "b"
    with refused("does not answer"):
        Endpoint("http://127.0.0.1:9")


def test_stopping_early_cancels_what_is_in_flight():
    with ReplayServer(lambda question, body: "fine", delay_s=0.05) as server:
        replies = Endpoint(server.url, concurrency=2).generate(
            [chat("q") for _ in range(200)], Generation()
        )
        next(replies)
        replies.close()
        sent = len(server.requests)
        time.sleep(0.3)
        assert len(server.requests) <= sent + 2 < 20  # those that were on their way


def replies_to(behaviour, count=1, **options):
    """Replies of a server that behaves so to the prompts "0", "1", ..."""
    settings = {"backoff_s": 0.001, "retries": 1, "timeout_s": 0.5} | options
    with FaultyServer(behaviour) as server:
        return ask(server, [chat(str(n)) for n in range(count)], **settings)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_whole_is_read_whole(name):
    (reply,) = replies_to(WHOLE[name], timeout_s=5.0)
    assert (reply.text, reply.finish_reason, reply.error) == (TEXT, "stop", None)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_fails_its_own_sample(name):
    def one_of_three(wire, body):
        (BROKEN[name] if body["messages"][0]["content"] == "1" else WHOLE["plain"])(wire, body)

    first, broken, last = replies_to(one_of_three, 3)
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
@pytest.mark.parametrize("streamed", [False, True])
def test_a_refused_context_is_a_miss_with_its_name(message, streamed):
    told = stream(event({"error": {"message": message}})) if streamed else refuse(400, message)
    (reply,) = replies_to(told)
    assert (reply.finish_reason, reply.error) == ("context", None)
    assert message in (reply.refusal or "")


def test_a_time_to_wait_that_is_no_number_costs_no_sample():
    busy = iter(["²", "soon", "-5", "Mon, 01 Jan 1990 00:00:00 GMT"])

    def answer(wire, body):
        if (told := next(busy, None)) is None:
            return WHOLE["plain"](wire, body)
        wire.head(429, "application/json", Retry_After=told)

    assert replies_to(answer, retries=4)[0].text == TEXT


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("MAX_TOKENS", "length"),
        ("eos", "stop"),
        ("content_filter", "content_filter"),
        ("bananas", "bananas"),
    ],
)
def test_finish_reasons_are_read_or_kept(sent, read):
    (reply,) = replies_to(stream(chunk("4", finish_reason=sent), DONE))
    assert (reply.text, reply.finish_reason) == ("4", read)


def test_a_slow_reply_is_not_a_silent_one():
    (reply,) = replies_to(stream(*[chunk("x")] * 8, END, every_s=0.1), retries=0)
    assert (reply.text, reply.error) == ("x" * 8, None)


@pytest.mark.parametrize("sent", [b"", b": wait\n\n"], ids=["nothing", "comments"])
def test_a_server_that_says_nothing_is_left(sent):
    (reply,) = replies_to(stream(*[sent] * 8, every_s=0.2), retries=0)
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


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([chunk("x" * 10_000)], "a reply of more than"),
        ([b"data: ", *[b"x" * 10_000] * 5_000], "a line of more than"),
    ],
)
def test_a_reply_without_end_is_cut_off(pieces, said, monkeypatch):
    monkeypatch.setattr("quantkit.evaluation.generators.endpoint.LARGEST_REPLY", 100_000)
    monkeypatch.setattr("quantkit.evaluation.generators.openai_server.LONGEST_LINE", 100_000)
    tracemalloc.start()
    (reply,) = replies_to(stream(*itertools.islice(itertools.cycle(pieces), 5_001)), retries=0)
    assert tracemalloc.get_traced_memory()[1] < 30e6
    tracemalloc.stop()
    assert said in (reply.error or "")


@pytest.mark.parametrize(
    ("fault", "retries", "requests"), [("500", 0, 1), ("500", 2, 3), ("400", 2, 1)]
)
def test_retries_are_as_many_as_asked_for(fault, retries, requests):
    with FaultyServer(BROKEN[fault]) as server:
        endpoint = Endpoint(server.url, backoff_s=0.0, retries=retries)
        list(endpoint.generate([Prompt(text="x")], Generation()))
        assert len(server.requests) == requests


@pytest.mark.parametrize(
    ("fault", "said", "most"),
    [
        ("403", "HTTP 403: not this prompt; check the address", 8),
        # Each sample would be tried again, with longer and longer pauses, to the last.
        ("500", r"none of the first [4-8] requests got a reply; last error: HTTP 500", 20),
    ],
)
def test_a_server_that_refuses_everything_ends_the_run(fault, said, most):
    with FaultyServer(BROKEN[fault]) as server:
        endpoint = Endpoint(server.url, concurrency=4, retries=1, backoff_s=0.001)
        with refused(said):  # 3 are under way
            list(endpoint.generate([Prompt(text=str(n)) for n in range(200)], Generation()))
        assert len(server.requests) <= most


def test_prompts_that_are_refused_one_by_one_do_not():
    replies = replies_to(BROKEN["400"], 20, concurrency=4)
    assert all(reply.error for reply in replies)
