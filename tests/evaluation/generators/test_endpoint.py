import gc
import itertools
import time

import httpx
import pytest
from refused import refused
from replay_server import ReplayServer, Reply

from quantkit.evaluation.generators.endpoint import Endpoint, request_body
from quantkit.evaluation.generators.generator import Generation, Prompt
from quantkit.evaluation.openai_server import OpenAIServer, base_url, describe_error
from quantkit.evaluation.options import EvaluateOptions


def chat(text, seed=0):
    return Prompt(messages=({"role": "user", "content": text},), seed=seed)


def ask(
    server,
    prompts,
    parameters=None,
    **options,
):
    endpoint = Endpoint(server.url, backoff_s=0.01, **options)
    return sorted(
        endpoint.generate(prompts, parameters or Generation()),
        key=lambda completion: completion.index,
    )


@pytest.mark.parametrize(
    "tail", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/completions"]
)
def test_any_form_of_the_address_will_do(tail):
    assert base_url(f"http://h:8000{tail}") == "http://h:8000/v1"


@pytest.mark.parametrize(
    ("sent", "read"),
    [("a \ud800 b", "a \ufffd b"), ("\udc00\ud83d", "\ufffd\ufffd"), ("\ud83d\ude00 4", "😀 4")],
)
def test_halves_of_characters_are_joined_or_replaced(sent, read):
    """A server sends a character in two pieces, or only half of it: what is kept can be written to
    a file."""
    with ReplayServer(lambda question, body: sent) as server:
        (reply,) = ask(server, [chat("1")])
    assert reply.text == read
    reply.text.encode()


def test_replies_come_back_whole_and_in_their_place():
    with ReplayServer(
        lambda question, body: f"你好 {question}\n</think>\n\n\\boxed{{{question}}}", delay_s=0.1
    ) as server:
        replies = ask(server, [chat(str(n)) for n in range(12)], concurrency=4)
    assert [r.text for r in replies] == [f"你好 {n}\n</think>\n\n\\boxed{{{n}}}" for n in range(12)]
    assert all(
        r.finish_reason == "stop" and r.prompt_tokens == 11 and r.completion_tokens == len(r.text)
        for r in replies
    )
    assert all(
        r.think_open is None and r.reasoning is None and r.error is None and r.latency_s > 0
        for r in replies
    )
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
    parameters = Generation(temperature=0.6, top_p=0.95, max_tokens=7, stop=("\n",))
    with ReplayServer(lambda question, body: Reply("x", "length")) as server:
        replies = ask(
            server, [chat("q", seed=5), Prompt(text="raw", seed=6)], parameters, concurrency=1
        )
    first, second = server.requests
    assert (
        first["temperature"],
        first["top_p"],
        first["max_tokens"],
        first["stop"],
        first["seed"],
    ) == (0.6, 0.95, 7, ["\n"], 5)
    assert first["model"] == "replayed"
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
    with refused(
        r"the server is not reachable any more; start it and repeat the command",
    ):
        list(endpoint.generate([chat("q") for _ in range(50)], Generation()))


def test_a_wrong_key_stops_at_once_and_is_told_once(caplog):
    with ReplayServer(lambda question, body: "fine", api_key="sk-1") as server:
        with refused("HTTP 401: wrong key"):
            ask(server, [chat("q") for _ in range(20)], concurrency=2)
        gc.collect()
        assert not [record for record in caplog.records if record.name == "asyncio"]
        assert len(server.requests) <= 6
        assert ask(server, [chat("q")], api_key="sk-1")[0].text == "fine"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "HTTP 401: Unauthorized"),
        (b"{}", "HTTP 401: Unauthorized"),
        (b'{"error": null}', "HTTP 401: Unauthorized"),
        (b'{"detail": "no key"}', "HTTP 401: no key"),
        (b'{"error": {"code": 7}}', "HTTP 401: {'code': 7}"),
    ],
)
def test_a_refusal_without_a_message_is_told_by_its_status(body, said):
    answer = httpx.Response(401, content=body, request=httpx.Request("POST", "http://127.0.0.1/v1"))
    with pytest.raises(httpx.HTTPStatusError) as refused:
        answer.raise_for_status()
    assert describe_error(refused.value) == said


def test_a_key_that_is_missing_is_asked_for():
    """It was said to check the address and that a server is up."""
    with ReplayServer(lambda question, body: "fine", api_key="sk-1") as server:
        with refused(r"\(HTTP 401: wrong key\); give the server's key with --api-key$"):
            OpenAIServer(server.url).models()
        assert OpenAIServer(server.url, api_key="sk-1").models()


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
