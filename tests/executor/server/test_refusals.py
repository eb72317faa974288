"""Requests that the server refuses, and what it says of them."""

import json
import re
import socket
import sys

import httpx
import openai
import pytest
from running_server import KEY, MESSAGES, Running, idle, load, wait_for

from quantkit.executor.server.app import Limits
from quantkit.executor.server.protocol import HARMLESS, NEUTRAL


def post(running, path, kind="application/json", **body):
    headers = {"Authorization": f"Bearer {KEY}"} | ({"Content-Type": kind} if kind else {})
    return httpx.post(f"{running.url}/v1/{path}", headers=headers, **body)


def read_case(line):
    change, answered = line.split(" -> ")
    return json.loads(change), answered


REFUSED = """
{"model": "other"} -> 404 'tiny' is
{"max_tokens": 0} -> 400 max_tokens
{"max_tokens": 901} -> 400 at most 900
{"max_tokens": 1020} -> 400 the context holds 1024
{"messages": []} -> 400 messages
{"messages": "hi"} -> 400 messages: Input should be an array
{"messages": ["hi"]} -> 400 messages.0: Input should be an object
{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]} -> 400 image_url
{"messages": [{"content": "x"}]} -> 400 no role
{"messages": [{"role": "user", "text": "x"}]} -> 400 a message of role user has no content
{"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": null}]} -> 400 of role tool has no content
{"temperature": -1} -> 400 temperature
{"stop": [""]} -> 400 stop string is empty
{"tools": [{"type": "function"}]} -> 400 tools.0 is no function
{"tools": [{"type": "function", "function": {"name": "f"}}]} -> 400 the model's chat template shows it no tools
{"n": 1000} -> 400 n:
{"top_logprobs": 2} -> 400 top_logprobs asks
{"temperature": "1"} -> 400 temperature:
{"n": true} -> 400 n:
{"max_completion_tokens": 5} -> 400 differ
{"stop": 5} -> 400 stop: Input should be a valid string
{"messages": [{"role": "user", "content": [["text"]]}]} -> 400 content parts
{"messages": [{"role": "user", "content": [{"type": ["text"]}]}]} -> 400 content parts
{"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]} -> 400 no text
{"messages": [{"role": "user", "content": 5}]} -> 400 neither text
{"chat_template_kwargs": {"messages": []}} -> 400 holds messages
{"tool_choice": "required"} -> 400 tools holds none
{"response_format": {"type": "grammar"}} -> 400 response_format.type
{"response_format": {"type": "json_schema"}} -> 400 json_schema is missing
{"response_format": {"type": "json_object"}, "guided_regex": "a"} -> 400 in two forms
{"response_format": {"type": "json_object"}, "min_tokens": 2} -> 400 min_new_tokens forbids it
{"structured_outputs": {"whitespace_pattern": "x"}} -> 400 structured_outputs.whitespace_pattern is not supported
{"guided_json": {"type": "nothing"}} -> 400 cannot be used
{"guided_grammar": "no"} -> 400 cannot be used
{"guided_json": {"$ref": "#"}} -> 400 allows no first token
{"guided_choice": []} -> 400 guided_choice
{"logit_bias": {"x": 1}} -> 400 logit_bias has the key 'x'
{"logit_bias": {"5": 101}} -> 400 logit_bias
{"logit_bias": {"320": 1}} -> 400 outside 0..319
{"stop_token_ids": [320]} -> 400 outside 0..319
{"presence_penalty": 2.5} -> 400 presence_penalty
{"repetition_penalty": 0} -> 400 repetition_penalty
{"min_p": 1.1} -> 400 min_p
{"prompt_logprobs": 21} -> 400 prompt_logprobs
{"best_of": 2} -> 400 best_of is not supported
{"echo": true} -> 400 echo is not supported
{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]} -> 400 no call of a function
{"prompt": "x"} -> 400 prompt is not supported
{"invented_tomorrow": 1} -> 400 invented_tomorrow is not supported
"""
"""What is changed in a request, the status and what is said."""
LARGE = [
    ({"messages": [{"role": "user", "content": "x" * 700}]}, "400 at most 600"),
    ({"top_k": 2**63}, "400 top_k:"),
    ({"temperature": 10**400}, "400 temperature:"),
    ({"stop": ["x"] * 17}, "400 stop: List should have at most 16 items"),
    ({"stop": ["x", "x" * 257]}, "400 stop.1: String should have at most 256 characters"),
    ({"messages": [{}] * 4097}, "400 messages"),
    ({"guided_regex": "(" * 70}, "400 brackets"),
    ({"guided_regex": "x" * 140_000, "padding": ""}, "413 larger than 100000 bytes"),
    ({"padding": "x" * 100_000}, "413 larger than 100000 bytes"),
]


@pytest.mark.parametrize(
    ("change", "answered"),
    [*map(read_case, REFUSED.strip().splitlines()), *LARGE],
    ids=lambda one: str(one)[:60],
)
def test_what_cannot_be_answered_is_refused(running, change, answered):
    status, said = answered.split(" ", 1)
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **change}
    answer = post(running, "chat/completions", json=body)
    assert answer.status_code == int(status)
    assert said in answer.json()["error"]["message"]
    assert idle(running)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", ["guided_regex=a{99999999}", 'guided_grammar=start: "a" start'])
def test_a_grammar_that_cannot_be_followed_is_the_clients(running, asked, stream, caplog):
    form, _, grammar = asked.partition("=")
    body = {"prompt": "a", "max_tokens": 6, "stream": stream, form: grammar}
    answer = post(running, "completions", json=body)
    assert answer.status_code == (200 if stream else 400)
    error = json.loads(re.findall('{"error".*', answer.text)[-1])["error"]
    assert error["type"] == "invalid_request_error"
    assert "grammar" in error["message"]
    assert not caplog.records
    wait_for(lambda: idle(running))


ABSENT = "guided_json response_format invented_tomorrow seed stop n stream temperature"


def test_fields_that_ask_for_nothing_are_accepted(running):
    neutral = {name: values[0] for name, values in NEUTRAL.items()}
    asked = {"model": "tiny", "max_tokens": 2, **neutral, **dict.fromkeys(HARMLESS, "x")}
    asked |= dict.fromkeys(ABSENT.split())
    for path, prompt in (
        ("chat/completions", {"messages": MESSAGES}),
        ("completions", {"prompt": "one"}),
    ):
        answer = post(running, path, json=asked | prompt)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "x", "n": 1, "n": 2}', "n appears twice"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN is not a finite number"),
        (b'{"prompt": "x", "temperature": 1e999}', "1e999 is not a finite number"),
        (b'{"prompt": "\\ud800"}', "half of a character"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"[" * 90_000, "nested too deep"),
        (b'{"n":' + b"[" * 101 + b"]" * 101 + b"}", "nested too deep"),
        (b'{"n":' + b"9" * 5000 + b"}", "not JSON"),
        (b'["prompt"]', "not a JSON object"),
        (b"", "not JSON"),
    ],
)
def test_what_is_no_request_is_refused(running, content, said):
    sys.set_int_max_str_digits(0)  # as libraries do
    answer = post(running, "completions", content=content)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert said in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"]
)
def test_only_json_is_read(running, kind):
    answer = post(running, "completions", kind, content=b'{"prompt": "x"}')
    assert answer.status_code == 415
    assert "Content-Type" in answer.json()["error"]["message"]


def test_a_compressed_body_is_told_as_that(running):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    headers["Content-Encoding"] = "gzip"
    answer = httpx.post(f"{running.url}/v1/completions", content=b"{}", headers=headers)
    assert answer.status_code == 415
    assert "Content-Encoding: gzip" in answer.json()["error"]["message"]


def test_a_body_that_does_not_come_is_not_waited_for(tiny_checkpoint):
    server = Running(load(tiny_checkpoint), limits=Limits(body_s=0.2))
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
                b"application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            said = b"".join(iter(lambda: slow.recv(4096), b""))
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"the request was not whole after 0.2 s" in said
        assert idle(server)
    finally:
        server.stop()


def test_two_keys_are_none(running):
    answer = httpx.get(
        f"{running.url}/v1/models",
        headers=[("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer other")],
    )
    assert answer.status_code == 401


def test_more_answers_than_the_server_ever_holds_are_refused_for_good(running):
    body = {"prompt": ["a"] * 35, "n": 2, "max_tokens": 1}  # 4 run and 64 wait
    answer = post(running, "completions", json=body)
    assert answer.status_code == 400
    assert "70 answers" in answer.json()["error"]["message"]


def test_wrong_key_wrong_path(running):
    url, wrong = f"{running.url}/v1/chat/completions", {"Authorization": "Bearer wrong"}
    refused = httpx.post(url, json={}, headers=wrong).json()["error"]
    assert refused["code"] == "invalid_api_key"
    assert httpx.get(f"{running.url}/v1/models").status_code == 401
    assert httpx.get(f"{running.url}/v2").json()["error"]["message"] == "Not Found: GET /v2"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong", max_retries=0).models.list()
