"""The proxy between servers of this process: the requests that each gets, the client's answers, and
errors when a server is dead."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from commands import command
from proxied_servers import ASKED, KEY, PLACE, Answering, answering, in_thread, running
from running_server import wait_for

from quantkit.deploy.proxy import REMOTE


@pytest.fixture
def dead() -> Iterator[str]:
    """An address without a listening server. Its port is bound, so that no other server gets it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def test_a_request_goes_to_one_of_each(dead: str) -> None:
    with (
        answering() as first,
        answering() as other,
        answering() as second,
        running([first.url, other.url], [dead, second.url]) as url,
    ):
        answers = [httpx.post(f"{url}/v1/completions", json=ASKED, headers=KEY) for _ in range(4)]
        assert [answer.text for answer in answers] == ["data: 1\n\ndata: [DONE]\n\n"] * 4
        assert answers[0].headers["content-type"].startswith("text/event-stream")
        assert len(first.asked) == len(other.asked) == 2, "they take turns"
        assert len(second.asked) == 4, "a server that cannot be reached is passed over"
        path, headers, body = first.asked[0]
        assert (path, headers["Authorization"]) == ("/v1/completions", "Bearer k")
        assert body == {
            "model": "m",
            "prompt": "a",
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": REMOTE,
        }
        _, headers_then, body_then = second.asked[0]
        assert body_then == ASKED | {"kv_transfer_params": PLACE}
        assert headers_then["X-Request-Id"] == headers["X-Request-Id"]
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models", headers=KEY).json() == {"data": []}


@pytest.mark.parametrize(
    ("asked", "alone"),
    [
        ({"prompt": ["a", "b"]}, True),
        ({"prompt": [[1, 2], [3]]}, True),
        ({"n": 2}, True),
        ({"n": "2"}, True),
        ({"best_of": 3}, True),
        ({"use_beam_search": True}, True),
        ({"prompt_logprobs": 0}, True),
        ({"echo": True, "logprobs": 1}, True),
        ({"prompt": ["a"]}, False),
        ({"prompt": [1, 2]}, False),
        ({"n": 1, "best_of": None, "echo": False, "prompt_logprobs": None}, False),
    ],
    ids=str,
)
def test_what_one_cache_is_not_enough_for_goes_to_decode_alone(
    asked: dict[str, Any], alone: bool
) -> None:
    with answering() as first, answering() as second, running([first.url], [second.url]) as url:
        sent = ASKED | asked | {"kv_transfer_params": {"remote_block_ids": [9]}}
        assert httpx.post(f"{url}/v1/completions", json=sent, headers=KEY).text.endswith(
            "data: [DONE]\n\n"
        )
        assert len(first.asked) == (0 if alone else 1)
        ((_, headers, body),) = second.asked
    assert headers["Authorization"] == "Bearer k"
    assert body == ASKED | asked | ({} if alone else {"kv_transfer_params": PLACE})


def test_errors_that_name_unreachable_servers(dead: str) -> None:
    with answering() as alive:
        for role, prefill, decode in (("prefill", dead, alive.url), ("decode", alive.url, dead)):
            with running([prefill], [decode]) as url:
                answer = httpx.post(f"{url}/v1/chat/completions", json=ASKED)
                assert answer.status_code == 503
                assert f"no {role} server answers ({dead}: " in answer.json()["error"]["message"]
                assert httpx.get(f"{url}/health").status_code == 503
                assert httpx.post(f"{url}/v1/completions", content=b"[1").status_code == 400


def test_a_server_that_stops_while_it_answers_is_named() -> None:
    heard: list[bytes] = []

    def listen(url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=ASKED | {"stream": True}) as answer:
            heard.extend(answer.iter_raw())

    with (
        answering() as first,
        answering("stop") as second,
        running([first.url], [second.url]) as url,
    ):
        with pytest.raises(httpx.RemoteProtocolError):
            listen(url)
        events = [
            event.removeprefix(b"data: ") for event in b"".join(heard).split(b"\n\n") if event
        ]
        assert events[0] == b"1"
        assert "stopped while it answered" in json.loads(events[1])["error"]["message"]


def test_a_piece_goes_on_before_the_next_is_there() -> None:
    """The server sends its second piece, in chunks, only once the client has the first."""
    heard = threading.Event()

    class Waiting(Answering):
        protocol_version = "HTTP/1.1"

        def _say(self, content: bytes, status: int = 200, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            first, _, rest = content.partition(b"\n\n")
            self.wfile.write(b"%x\r\n%b\n\n\r\n" % (len(first) + 2, first))
            assert heard.wait(10), "the client never got the first piece"
            self.wfile.write(
                b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (rest[:5], len(rest) - 5, rest[5:])
            )

    second: Any = ThreadingHTTPServer(("127.0.0.1", 0), Waiting)
    second.asked, second.says, where = [], "", [f"http://127.0.0.1:{second.server_port}"]
    asked = ASKED | {"stream": True}
    with (
        answering() as first,
        in_thread(second),
        running([first.url], where) as url,
        httpx.stream("POST", f"{url}/v1/completions", json=asked) as answer,
    ):
        pieces = answer.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        heard.set()
        assert b"".join(pieces) == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "wrong",
    [
        "10.0.0.1:8100",
        "http://",
        "http://a:99999",
        "ftp://a",
        "",
        "http://a b",
        "http://a/?x=1",
        "http://a..b",
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_listens(wrong: str) -> None:
    said = command(
        "proxy", "--prefill", f"http://127.0.0.1:8100,{wrong}", "--decode", "http://[::1]:8200"
    )
    assert (said.code, said.errors) == (1, 1)
    assert (
        f"{wrong!r} is not the URL of a server; give one such as http://10.0.0.1:8100" in said.error
    )


def test_the_command_says_where_it_listens_and_ends(dead: str) -> None:
    with socket.socket(socket.AF_INET6) as free:
        free.bind(("::1", 0))
        port = free.getsockname()[1]
    asked = [
        "proxy",
        "--prefill",
        f"{dead},{dead}/",
        "--decode",
        dead,
        "--host",
        "::1",
        "--port",
        str(port),
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "quantkit", *asked], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert (
            process.stderr.readline()
            == f"proxy for 2 prefill and 1 decode servers on http://[::1]:{port}/v1\n"
        )
        wait_for(lambda: is_up(f"http://[::1]:{port}/health"))
        process.terminate()
        assert process.wait(30) == 143


def is_up(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).status_code == 503
    return False


def test_an_address_with_an_api_path_is_refused() -> None:
    said = command(
        "proxy", "--prefill", "http://127.0.0.1:8100/v1/", "--decode", "http://127.0.0.1:8200"
    )
    assert (
        "http://127.0.0.1:8100/v1/ is the base of a server's API; give http://127.0.0.1:8100"
        in said.error
    )


def test_a_refusal_of_prefill_is_the_answer() -> None:
    with (
        answering("refuse") as first,
        answering() as second,
        running([first.url], [second.url]) as url,
    ):
        answer = httpx.post(f"{url}/v1/completions", json=ASKED)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too long")
        assert not second.asked
