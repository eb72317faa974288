"""Clients as they come: what they send that is nothing, how they send it, and what is left of their
requests once they go."""

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from proxied_servers import ASKED, PLACE, Answering, answering, in_thread, running
from running_server import wait_for

from quantkit.deploy import proxy

CLOSE = b"Connection: close\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n%b\r\n%b"


@pytest.fixture
def digits() -> Iterator[None]:
    """Python's own limit of a number's digits, as in a proxy's process: libraries of other tests
    lift it."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)
    yield
    sys.set_int_max_str_digits(before)


@pytest.fixture
def dead() -> Iterator[str]:
    """An address without a listening server. Its port is bound, so that no other server gets it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any, str]]:
    with answering() as first, answering() as second, running([first.url], [second.url]) as url:
        yield first, second, url


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def heard(sent: bytes, url: str) -> bytes:
    with connected(url) as client:
        client.sendall(sent)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1",
        b"null",
        b"[]",
        b'"a"',
        b"1",
        b"\xff\xfe",
        b'{"prompt": "\xe9"}',
        b"[" * 100_000,
        b'{"a": ' + b"1" * 5000 + b"}",
        b"{}x",
    ],
    ids=lambda content: repr(content[:12]),
)
@pytest.mark.usefixtures("digits")
def test_a_body_that_is_no_object_is_the_clients_fault(
    pair: tuple[Any, Any, str], content: bytes
) -> None:
    first, _, url = pair
    before = len(first.asked)
    answer = httpx.post(
        f"{url}/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "the body of the request is not a JSON object",
    )
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(first.asked) == before


def test_a_request_larger_than_a_proxy_should_hold(
    pair: tuple[Any, Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, url = pair
    monkeypatch.setattr(proxy, "LARGEST_BODY", 1 << 16)
    assert (
        httpx.post(f"{url}/v1/completions", content=b'"' + b"a" * (1 << 16) + b'"').status_code
        == 413
    )
    assert (
        httpx.post(f"{url}/v1/completions", json=ASKED | {"prompt": "a" * 60_000}).status_code
        == 200
    )


def test_unknown_paths_have_errors_in_the_servers_shape(pair: tuple[Any, Any, str]) -> None:
    *_, url = pair
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/", 404),
    ):
        answer = httpx.request(method, url + path)
        assert answer.status_code == status
        assert f": {method} {path}" in answer.json()["error"]["message"]


def test_keys_and_names_of_any_bytes_go_on(pair: tuple[Any, Any, str]) -> None:
    first, _, url = pair
    content = json.dumps(ASKED).encode()
    told = heard(
        POST
        % (len(content), CLOSE + b"Authorization: Bearer \xe9\r\nX-Request-Id: \xfc\r\n", content),
        url,
    )
    assert told.startswith(b"HTTP/1.1 200")
    assert first.asked[-1][1]["Authorization"] == "Bearer \xe9"
    assert first.asked[-1][1]["X-Request-Id"] == "\xfc"


def test_consecutive_requests_on_one_connection(pair: tuple[Any, Any, str]) -> None:
    """Three sent at once, the second of them nothing; then httpx, whose client keeps its
    connection."""
    *_, url = pair
    content = json.dumps(ASKED).encode()
    told = heard(
        POST % (len(content), b"", content)
        + POST % (2, b"", b"[]")
        + POST % (len(content), CLOSE, content),
        url,
    )
    assert [told.count(part) for part in (b"HTTP/1.1 200", b"HTTP/1.1 400", b"data: [DONE]")] == [
        2,
        1,
        2,
    ]
    with httpx.Client() as client:
        for _ in range(3):
            assert client.post(f"{url}/v1/completions", json=ASKED).text.endswith(
                "data: [DONE]\n\n"
            )


class Slow(Answering):
    """Answers nothing until its client goes; `left` is set then. A decode server says the head and
    one event first."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.asked.append((self.path, dict(self.headers), body))
        if "do_remote_decode" not in body["kv_transfer_params"]:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b"data: 1\n\n")
        self.connection.settimeout(20)
        try:
            rest = self.connection.recv(1)
        except ConnectionError:
            rest = b""
        except TimeoutError:
            rest = b"it stayed"
        if not rest:
            server.left.set()
        self.close_connection = True


@contextmanager
def slow() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    server.asked, server.left, server.url = (
        [],
        threading.Event(),
        f"http://127.0.0.1:{server.server_port}",
    )
    with in_thread(server):
        yield server


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_of_a_disconnected_client_are_cancelled(role: str) -> None:
    """Otherwise an engine continues with answers that no client reads."""
    content = json.dumps(ASKED | {"stream": True}).encode()
    with ExitStack() as open_ones:
        quick, server = open_ones.enter_context(answering()), open_ones.enter_context(slow())
        roles = (server, quick) if role == "prefill" else (quick, server)
        url = open_ones.enter_context(running(*([one.url] for one in roles)))
        with connected(url) as client:
            client.sendall(POST % (len(content), b"", content))
            wait_for(lambda: server.asked)
            if role == "decode":
                assert client.recv(9).startswith(b"HTTP/1.1")
        assert server.left.wait(10), "the server was not notified that the client had disconnected"
        assert len(quick.asked) == (0 if role == "prefill" else 1)
        assert httpx.post(f"{url}/v1/completions", content=b"[]").status_code == 400, "it serves on"


def test_a_client_that_goes_before_its_request_is_whole(pair: tuple[Any, Any, str]) -> None:
    first, _, url = pair
    before = len(first.asked)
    with connected(url) as client:
        client.sendall(POST % (1000, b"", b'{"prompt": '))
    assert httpx.post(f"{url}/v1/completions", json=ASKED).status_code == 200
    assert len(first.asked) == before + 1


def test_a_request_that_never_gets_whole_is_refused(
    pair: tuple[Any, Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, url = pair
    monkeypatch.setattr(proxy, "BODY_SECONDS", 0.3)
    with connected(url) as client:
        client.sendall(POST % (1000, CLOSE, b'{"prompt": '))
        told = b"".join(iter(lambda: client.recv(65536), b""))
    assert told.startswith(b"HTTP/1.1 408")
    assert b"the request was not complete after 0.3 s" in told


def test_status_requests_do_not_advance_the_turn(dead: str) -> None:
    """A probe between two requests sent all of them to the same of two servers."""
    with answering() as first, answering() as other, answering() as second:
        with running([first.url, other.url], [dead, second.url]) as url:
            for _ in range(4):
                assert httpx.post(f"{url}/v1/completions", json=ASKED).status_code == 200
                assert httpx.get(f"{url}/health").status_code == 200
            assert (len(first.asked), len(other.asked)) == (2, 2)
            told = httpx.get(f"{url}/health").json()
            assert told["prefill"] == {first.url: 200, other.url: 200}
            assert told["decode"][second.url] == 200
            assert "onnect" in told["decode"][dead]
            assert httpx.get(f"{url}/v1/models").json() == {"data": []}
        with running([first.url], [dead]) as url:
            assert httpx.get(f"{url}/health").status_code == 503
            assert (
                f"no decode server answers ({dead}: "
                in httpx.get(f"{url}/v1/models").json()["error"]["message"]
            )


def test_a_server_that_says_nothing_holds_up_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "STATUS_SECONDS", 0.3)
    with answering() as first, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        where = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with running([first.url], [where]) as url:
            told = httpx.get(f"{url}/health", timeout=10)
            assert (told.status_code, told.json()["decode"]) == (
                503,
                {where: "no answer within 0.3 s"},
            )


def test_an_unreachable_server_is_tried_last_for_a_while(dead: str) -> None:
    servers = proxy.RoleServers("decode", [dead, "http://a", "http://b"])
    servers._lost[dead] = time.monotonic()
    assert [servers.in_turn()[-1] for _ in range(3)] == [dead] * 3
    servers._lost[dead] -= proxy.RETRY_SECONDS + 1
    assert [servers.in_turn()[0] for _ in range(3)] == [dead, "http://a", "http://b"]


def test_a_prefill_server_that_is_none_is_named() -> None:
    class Page(Answering):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._say(b"<html>", kind="text/html")

    page: Any = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    where = f"http://127.0.0.1:{page.server_port}"
    with in_thread(page), answering() as second, running([where], [second.url]) as url:
        answer = httpx.post(f"{url}/v1/completions", json=ASKED)
        assert (answer.status_code, where in answer.json()["error"]["message"]) == (502, True)


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_only_a_stream_gets_an_error_event(kind: str) -> None:
    """JSON that is cut stays cut: an event in it would be neither."""

    class Stopping(Answering):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"id": ')

    second: Any = ThreadingHTTPServer(("127.0.0.1", 0), Stopping)
    where, content = [f"http://127.0.0.1:{second.server_port}"], json.dumps(ASKED).encode()
    with in_thread(second), answering() as first, running([first.url], where) as url:
        told = heard(POST % (len(content), CLOSE, content), url)
        assert (b"stopped while it answered" in told) == (kind == "text/event-stream")
        assert not told.endswith(b"0\r\n\r\n"), "the body has no end"


def test_a_server_that_refuses_before_it_has_read_everything() -> None:
    """Its words go on, whatever of the body it left unread."""

    class Refusing(Answering):
        def do_POST(self) -> None:
            self._say(b'{"error": {"message": "too much"}}', 413)
            self.wfile.flush()
            time.sleep(0.2)

    first: Any = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    where = [f"http://127.0.0.1:{first.server_port}"]
    with in_thread(first), running(where, where) as url:
        answer = httpx.post(
            f"{url}/v1/completions", json=ASKED | {"prompt": "a" * (8 << 20)}, timeout=30
        )
        assert (answer.status_code, answer.json()["error"]["message"]) == (413, "too much")


def test_many_clients_at_once_get_their_own_answers() -> None:
    """Sixty-four, half of which go in the middle; each other one's text is its own."""

    class Echoing(Answering):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "do_remote_decode" in body["kv_transfer_params"]:
                return self._say(json.dumps({"kv_transfer_params": PLACE}).encode())
            return self._say(f"data: {body['prompt']}\n\n".encode() * 50, kind="text/event-stream")

    class Many(ThreadingHTTPServer):
        request_queue_size = 128

    servers: list[Any] = [Many(("127.0.0.1", 0), Echoing) for _ in range(3)]
    urls = [f"http://127.0.0.1:{server.server_port}" for server in servers]
    wrong: list[str] = []

    def client(number: int, url: str) -> None:
        content = json.dumps(ASKED | {"prompt": f"client {number}", "stream": True}).encode()
        with connected(url) as one:
            one.sendall(POST % (len(content), CLOSE, content))
            if number % 2:
                one.recv(5)
                return
            told = b"".join(iter(lambda: one.recv(65536), b""))
        if told.count(f"data: client {number}\n\n".encode()) != 50:
            wrong.append(told[:200].decode())

    with ExitStack() as open_ones:
        for server in servers:
            open_ones.enter_context(in_thread(server))
        url = open_ones.enter_context(running(urls[:1], urls[1:]))
        clients = [threading.Thread(target=client, args=(number, url)) for number in range(64)]
        for one in clients:
            one.start()
        for one in clients:
            one.join(60)
        assert not wrong
