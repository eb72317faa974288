"""The server over loopback, driven by the real openai client, httpx and bare sockets."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from running_server import KEY, MESSAGES, Running, idle, load, wait_for

from quantkit import SamplingParams

ASKED = {"model": "tiny", "temperature": 0, "max_tokens": 5}
ON = {"extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def peer(tiny_checkpoint):
    """An engine of our own, to know what the server must say."""
    return load(tiny_checkpoint)


def expected(peer, prompt, params):
    return next(iter(peer.generate([prompt], params))).text.rstrip("\ufffd")


def test_chat_whole_and_streamed(running, peer):
    """The template opens <think>, so it is all reasoning."""
    client, ids = running.client(), peer.tokenizer.encode_chat(MESSAGES)
    asked = ASKED | ON | {"messages": MESSAGES, "max_tokens": 20}
    whole = client.chat.completions.create(**asked)
    text = expected(peer, ids, SamplingParams(max_new_tokens=20, ignore_eos=True)).lstrip("\n")
    message, usage = whole.choices[0].message, whole.usage
    assert (message.reasoning_content.rstrip("\ufffd"), message.content) == (text, "")
    assert whole.choices[0].finish_reason == "length"
    assert usage.prompt_tokens == len(ids)
    assert usage.completion_tokens == usage.completion_tokens_details.reasoning_tokens == 20
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    thought = [getattr(one.delta, "reasoning_content", None) or "" for one in choices]
    assert "".join(thought).rstrip("\ufffd") == text
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].usage == usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_prompts_choices_stop_and_seed(running, peer):
    client = running.client()
    drawn = {"temperature": 0.9, "top_p": 0.95}
    asked = ASKED | ON | drawn | {"max_tokens": 12, "seed": 11}
    both = client.completions.create(prompt=["one", "two"], n=2, **asked)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    prompts = [peer.tokenizer.encode(prompt) for prompt in ("one", "one", "two", "two")]
    params = [
        SamplingParams(max_new_tokens=12, seed=seed, ignore_eos=True, **drawn)
        for seed in (11, 12, 11, 12)
    ]
    # Together, as the server computes them: sums over other numbers of rows differ in their last
    # bits, and a draw may be close.
    for done in peer.generate(prompts, params):
        assert both.choices[done.index].text.rstrip("\ufffd") == done.text.rstrip("\ufffd")
    assert both.usage.prompt_tokens == 6
    text = both.choices[0].text
    stopped = client.completions.create(prompt="one", stop=[text[3:6]], **asked).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(text[3:6])], "stop")
    ids, same = (
        client.completions.create(prompt=prompt, **ASKED).choices[0].text
        for prompt in (running.engine.tokenizer.encode("one"), "one")
    )
    assert ids == same


def test_no_alternative_is_lost(running):
    """Of 320 tokens 128 are parts of characters, with one text: of a text whole, streamed and
    echoed, of a prompt, of a chat."""
    client, asked = running.client(), ASKED | {"temperature": 1, "seed": 1}
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20}
    said = client.chat.completions.create(**asked, **chat).choices[0].logprobs.content
    chunks = client.chat.completions.create(**asked, **chat, stream=True)
    shown = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    assert [token for one in shown if one for token in one.content] == said
    found = [[{(one.token, *one.bytes) for one in token.top_logprobs} for token in said]]
    asked |= {"prompt": [5, 6, 200, 201]}
    scored = client.completions.create(**asked, extra_body={"prompt_logprobs": 20})
    found.append(scored.choices[0].prompt_logprobs[1:])
    for form in ({}, {"stream": True}, {"echo": True}):
        answer = client.completions.create(**asked, logprobs=20, **form)
        shown = [chunk.choices[0].logprobs for chunk in (answer if "stream" in form else [answer])]
        found.append([place for one in shown if one for place in one.top_logprobs if place])
    assert all(len(places) >= 3 and min(map(len, places)) >= 20 for places in found)


def test_parts_of_characters_are_told_by_their_bytes(running):
    text, client = "é😀a你b", running.client()
    forced = ASKED | {"max_tokens": 30, "extra_body": {"guided_regex": text}, "logprobs": 1}
    old = client.completions.create(prompt="one", **forced).choices[0]
    assert old.text == text
    offsets = old.logprobs.text_offset
    places = zip(old.logprobs.tokens, offsets, strict=True)
    whole = [(token, text[at]) for token, at in places if "\ufffd" not in token]
    assert whole == [("a", "a"), ("b", "b")]
    assert max(offsets) == len(text) - 1
    chunks = client.completions.create(prompt="one", echo=True, stream=True, **forced)
    shown = [chunk.choices[0].logprobs for chunk in chunks]
    streamed = [at for one in shown if one for at in one.text_offset or []]
    assert streamed == [*range(3), *(3 + at for at in offsets)]
    asked = ASKED | {"messages": MESSAGES, "max_tokens": 30, "logprobs": True}
    asked["extra_body"] = {"separate_reasoning": False}
    said = client.chat.completions.create(**asked).choices[0]
    tokens = said.logprobs.content
    assert "\ufffd" in "".join(token.token for token in tokens)
    told = b"".join(bytes(token.bytes or []) for token in tokens).decode(errors="replace")
    assert told.rstrip("\ufffd") == said.message.content  # of the last character the rest lacks


def test_a_stream_cut_by_the_end_of_the_grace_says_so(tiny_checkpoint, monkeypatch):
    engine = load(tiny_checkpoint)
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.05), step())[1])
    running = Running(engine)
    running.server.config.timeout_graceful_shutdown = 1
    url, body = f"{running.url}/v1/completions", {"prompt": "one", "max_tokens": 900}
    body |= {"ignore_eos": True}
    with ThreadPoolExecutor() as threads:
        whole = threads.submit(httpx.post, url, json=body, timeout=60)
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            wait_for(lambda: running.service.open == 2)
            running.server.should_exit = True
            rest = [line for line in lines if line]
        refused = whole.result()
    assert rest[-1] == "data: [DONE]"
    for error in (json.loads(rest[-2].removeprefix("data: ")), refused.json()):
        assert error["error"]["message"] == "the server is stopping"
    assert refused.status_code == 503
    running.stop()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_stops_the_work(running, stream):
    asked = {"messages": MESSAGES, "max_tokens": 900, "stream": stream, "ignore_eos": True}
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    before = running.service.finished.values.get("cancelled", 0)
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(head.encode() + body)
        wait_for(lambda: any(len(one.generated) > 2 for one in running.engine.scheduler.running))
    wait_for(lambda: idle(running), 5)
    assert running.service.finished.values["cancelled"] == before + 1


def test_200_at_once_with_a_queue_limit(tiny_checkpoint, peer):
    """4 run, 60 wait, the rest is told so at once; a cache for two of them makes everybody wait for
    room. None is lost."""
    running = Running(load(tiny_checkpoint, max_model_len=64, cache_tokens=128), max_queue=60)

    async def ask(client, index):
        body = {"prompt": f"number {index}", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        return await client.post(f"{running.url}/v1/completions", json=body)

    async def ask_all():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(200)))

    answers = asyncio.run(ask_all())
    answered = [index for index, answer in enumerate(answers) if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(answered) + len(refused) == 200
    assert len(answered) >= 64
    assert refused, "nobody was refused: the limit does nothing"
    assert refused[0].json()["error"]["code"] == "queue_full"
    assert refused[0].headers["retry-after"] == "1"
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    for index in answered[::7]:
        text = expected(peer, peer.tokenizer.encode(f"number {index}"), params)
        assert answers[index].json()["choices"][0]["text"].rstrip("\ufffd") == text
    wait_for(lambda: idle(running))
    running.stop()


def test_metrics_count_what_happened(running):
    def read():
        lines = httpx.get(f"{running.url}/metrics").text.splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name.removeprefix("quantkit_"): float(value) for name, _, value in pairs}

    before = read()
    running.client().completions.create(prompt="one", **ASKED | ON)
    after = read()
    for name, count in (
        ("generated_tokens_total", 5),
        ("prompt_tokens_total", 3),
        ("time_to_first_token_seconds_count", 1),
    ):
        assert after[name] - before[name] == count
    assert after["requests_running"] == after["cache_usage_ratio"] == 0


def test_a_broken_engine_is_told_to_everybody(tiny_checkpoint, monkeypatch):
    engine = load(tiny_checkpoint)
    running = Running(engine)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def broken():
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine, "step", broken)
    body = {"prompt": "one", "max_tokens": 5}
    first = httpx.post(f"{running.url}/v1/completions", json=body, timeout=20)
    assert first.status_code == 503
    assert "device lost" in first.json()["error"]["message"]
    assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 503
    assert httpx.get(f"{running.url}/health").status_code == 503
    running.stop()


SERVE = """
import sys
from quantkit import Engine
from quantkit.tokenizer.chat import TextStream
from quantkit.executor.server.options import ServerOptions
from quantkit.executor.server.serve import serve
from quantkit.common.bind import bind
engine = Engine.load(sys.argv[1], device="cpu", dtype="float32", max_batch=4, max_model_len=1024)
print("loaded", flush=True)
with bind("127.0.0.1", int(sys.argv[2])) as sockets:
    serve(engine, "tiny", ServerOptions(port=int(sys.argv[2])), sockets)
"""


@contextmanager
def served(path):
    """A server in a process of its own, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(path), str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _answers(url), 180)
        yield process, url
    finally:
        process.kill()
        process.communicate()


LONG = {"prompt": "one", "max_tokens": 120, "stream": True, "ignore_eos": True}
LONG["stream_options"] = {"include_usage": True}


def test_told_to_stop_it_finishes_what_runs(tiny_checkpoint):
    with served(tiny_checkpoint) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 120
        assert process.wait(20) == 0
        assert not _answers(url)


def test_told_twice_it_stops_at_once_and_in_order(tiny_checkpoint):
    with served(tiny_checkpoint) as (process, url), httpx.Client(timeout=60) as client:
        answer = client.send(
            client.build_request("POST", f"{url}/v1/completions", json=LONG | {"max_tokens": 900}),
            stream=True,
        )
        lines = answer.iter_lines()  # which closes the answer when it is let go of
        next(lines)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        told = process.stderr.read().decode()
        assert "Traceback" not in told, told
        assert "terminate called" not in told, told


def _answers(url):
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.ConnectError:
        return False
