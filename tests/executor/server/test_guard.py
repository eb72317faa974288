"""A server without a key on loopback answers this machine's names alone; faults that nothing
foresaw are one line of the log and an error to the client."""

import itertools
import json
import logging

import httpx
import pytest
from running_server import MESSAGES, Running, load
from starlette.datastructures import Headers

from quantkit.common.errors import UsageError
from quantkit.executor.server.answers import ChatAnswer
from quantkit.executor.server.app import Limits
from quantkit.executor.server.asgi import is_local
from quantkit.executor.server.options import ServerOptions
from quantkit.executor.server.responses import ResponseAnswer

LOCAL = ("127.0.0.1", "localhost", "LOCALHOST", "localhost.", "[::1]", "127.1.2.3")
FOREIGN = (
    *(
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example.localhost.x",
    ),
    *("0.0.0.0", "[::]", "10.0.0.1", "169.254.169.254", "2130706433", "", "localhost@evil.example"),
    *("evil.example#localhost", "[::1", "localhost\\.evil.example", "null", "local host"),
    *("localhost/", "a@localhost", "localhost:x", "::1", "[::1%lo]", "127.1", "//localhost"),
)
PORTS = ("", ":80", ":8000")


@pytest.mark.parametrize("port", PORTS)
def test_names_of_this_machine_and_others(port):
    def told(host, *origins):
        raw = [(b"host", (host + port).encode()), *((b"origin", one.encode()) for one in origins)]
        return is_local(Headers(raw=raw))

    assert all(map(told, LOCAL))
    assert not any(map(told, FOREIGN))
    for host, name, scheme in itertools.product(LOCAL, (*LOCAL, *FOREIGN), ("http", "https")):
        assert told(host, f"{scheme}://{name}{port}") == (name in LOCAL), (host, name)
    for origin in ("null", "file://", "localhost", "//localhost", "app://localhost", ""):
        assert not told("localhost", origin), origin
    assert not told("localhost", "http://localhost", "http://evil.example")
    assert not is_local(Headers(raw=[]))
    assert not is_local(Headers(raw=[(b"host", b"localhost"), (b"host", b"evil.example")]))


@pytest.mark.parametrize("key", ["", " a", "a\n", "\x7f", "\u00e9"])
def test_a_key_that_no_client_can_send_is_refused(key):
    with pytest.raises(UsageError, match="API key"):
        ServerOptions(api_key=key)


@pytest.fixture(scope="module")
def running(tiny_checkpoint):
    server = Running(
        load(tiny_checkpoint), local=True, limits=Limits(max_body=100_000, max_bodies=150_000)
    )
    yield server
    server.stop()


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/v1/chat/completions"])
def test_a_page_of_another_site_is_refused(running, path):
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        answer = httpx.request("GET", running.url + path, headers=headers)
        assert answer.status_code == 403
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(
        running.url + path, headers={"Origin": "http://localhost:3000"}
    ).status_code in (200, 405)


@pytest.mark.parametrize("kind", [ChatAnswer, ResponseAnswer])
def test_a_fault_is_an_event_and_one_line(running, kind, monkeypatch, caplog):
    async def events(self, stream):
        yield {"type": "x", "choices": []}
        yield {"type": "x", "value": float("inf")}

    async def whole(self, stream):
        raise ValueError("of\nseveral lines")

    monkeypatch.setattr(kind, "events", events)
    monkeypatch.setattr(kind, "whole", whole)
    path, asked = (
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2})
        if kind is ResponseAnswer
        else ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2})
    )
    with caplog.at_level(logging.ERROR, "uvicorn.error"):
        streamed = httpx.post(running.url + path, json={**asked, "stream": True})
        refused = httpx.post(running.url + path, json=asked)
    assert streamed.status_code == 200
    last = [line for line in streamed.text.splitlines() if line.startswith("data: {")][-1]
    assert "internal error: ValueError" in last
    assert refused.status_code == 500
    assert refused.json()["error"]["code"] == "internal_error"
    lines = [record.getMessage() for record in caplog.records if record.exc_info is None]
    assert len(caplog.records) == len(lines) == 2
    assert not any("\n" in line for line in lines)


def test_bodies_that_are_being_read_have_a_sum(running):
    def slow(size):
        yield b'{"prompt": "' + b"x" * size
        inner.append(httpx.post(f"{running.url}/v1/completions", json=second).status_code)
        yield b'", "max_tokens": 1, "nonsense": 1}'

    inner = []
    second = {"prompt": "y" * 90_000, "nonsense": 1}
    headers = {"Content-Type": "application/json"}
    for size, status in ((90_000, 429), (10, 400), (90_000, 429)):
        answer = httpx.post(
            f"{running.url}/v1/completions", content=slow(size), headers=headers, timeout=60
        )
        assert (answer.status_code, inner.pop()) == (400, status), json.dumps(answer.json())
