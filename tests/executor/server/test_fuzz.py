"""Thousands of generated requests from a real client to a real `quantkit serve`: no 5xx, every refusal in
one shape, and it answers afterwards."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter

import httpx
import pytest
from hostile_requests import KEY, request
from sample_sizes import sized

REQUESTS, CLIENTS = sized(800, 3000), 24
ASKED = {"prompt": "What is 2+3?", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
SERVE = "from quantkit.cli import main; main()"


@pytest.fixture(scope="module")
def url(tiny_checkpoint):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = f"--device cpu --port {port} --max-batch 8 --max-model-len 256 --max-queue 64".split()
    command = [sys.executable, "-c", SERVE, "serve", str(tiny_checkpoint), *options]
    process = subprocess.Popen(command, env={**os.environ, "QUANTKIT_API_KEY": KEY})
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, process)
        yield address
        process.terminate()
        assert process.wait(40) == 0
    finally:
        process.kill()


def _wait(url, process):
    until = time.monotonic() + 90
    while True:
        try:
            httpx.get(f"{url}/health")
            return
        except httpx.ConnectError:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.1)


def ask(url):
    answer = httpx.post(
        f"{url}/v1/completions", json=ASKED, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def send(client, one):
    """Status and fault of one request's answer; the fault is empty where the answer is as it should
    be."""
    headers = {name: value.encode("latin-1") for name, value in one.headers.items()}
    async with client.stream(one.method, one.path, content=one.content, headers=headers) as answer:
        if one.leaves:
            async for _ in answer.aiter_bytes():
                return answer.status_code, ""
        body = await answer.aread()
    return answer.status_code, "" if one.method == "HEAD" else fault(answer, body)


def fault(answer, body):
    if answer.status_code >= 500:
        return body.decode(errors="replace")[:300]
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        ended = (
            body.endswith(b"data: [DONE]\n\n")
            or b"event: response.completed" in body
            or b"event: response.incomplete" in body
        )
        return "" if ended and b'{"error":' not in body else body[-300:].decode(errors="replace")
    if kind.startswith("text/plain") and answer.url.path == "/metrics":
        return ""
    value = json.loads(body)
    if answer.status_code == 200:
        return (
            ""
            if {"choices", "data", "status", "tokens", "prompt", "version", "id"} & set(value)
            else str(value)[:300]
        )
    error = value.get("error", {})
    right = set(error) == {"message", "type", "param", "code"} and all(
        isinstance(error[key], str) for key in ("message", "type", "code")
    )
    return (
        "" if right and 0 < len(error["message"]) < 1000 else f"not OpenAI's shape: {body[:300]!r}"
    )


async def send_all(url, requests):
    places = asyncio.Semaphore(CLIENTS)

    async def send_one(client, one):
        async with places:
            try:
                return await send(client, one)
            except (httpx.WriteError, httpx.RemoteProtocolError) as refused:
                # A server may close while a body that it refused is on its way.
                return (413, "") if len(one.content) > 1 << 20 else (0, repr(refused))

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        return await asyncio.gather(*(send_one(client, one) for one in requests))


def test_generated_requests(url):
    draw = random.Random(20261122)
    requests = [request(draw) for _ in range(REQUESTS)]
    before = ask(url)
    answers = asyncio.run(send_all(url, requests))
    wrong = [
        (one.method, one.path, one.content[:300], *answer)
        for one, answer in zip(requests, answers)
        if answer[1]
    ]
    assert not wrong, f"{len(wrong)} of {REQUESTS}; the first: {wrong[0]}"
    statuses = Counter(status for status, _ in answers)
    assert {200, 400, 401, 404, 405, 415} <= set(statuses), statuses
    assert min(statuses[200], statuses[400]) > REQUESTS // 5, f"{statuses}: too much of one kind"
    assert ask(url) == before
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    _settles(url)


def _settles(url):
    """Nothing is left of clients that went."""
    wanted = [
        "quantkit_requests_running 0",
        "quantkit_requests_waiting 0",
        "quantkit_cache_usage_ratio 0",
    ]
    until = time.monotonic() + 20
    while not set(wanted) <= set(httpx.get(f"{url}/metrics").text.splitlines()):
        assert time.monotonic() < until, httpx.get(f"{url}/metrics").text
        time.sleep(0.05)
