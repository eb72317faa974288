"""Connections on which nothing is asked end, answers do not, and who asks finds a place."""

import asyncio
import resource
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import uvicorn
from running_server import wait_for

from quantkit.executor.server.serve import HttpServer

SECONDS = 0.5
"""That the answer takes."""


async def answer(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"first", "more_body": True})
    await asyncio.sleep(SECONDS)
    await send({"type": "http.response.body", "body": b" last"})


@contextmanager
def served(**options):
    server = HttpServer(
        uvicorn.Config(answer, port=0, log_level="error", lifespan="off"), **options
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_who_says_nothing_is_not_waited_for_and_an_answer_goes_on(said):
    with (
        served(silent_s=SECONDS / 5) as (_, port),
        socket.create_connection(("127.0.0.1", port), timeout=10) as silent,
    ):
        silent.sendall(said)
        assert httpx.get(f"http://127.0.0.1:{port}/").text == "first last"
        assert silent.recv(1) == b""


def test_a_connection_is_kept_for_its_next_request():
    with served(silent_s=10) as (_, port), httpx.Client() as client:
        texts = [client.get(f"http://127.0.0.1:{port}/").text for _ in range(2)]
        assert texts == ["first last"] * 2


@pytest.mark.parametrize("said", [b"", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"])
def test_who_asks_finds_a_place_among_many_who_do_not(said):
    with served(places=10) as (server, port), ExitStack() as opened:

        def connected():
            made = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            made.sendall(said)
            return made

        first = connected()
        wait_for(lambda: len(server._since) == 1)
        for _ in range(39):
            connected()
        wait_for(lambda: len(server._since) == 10)
        assert httpx.get(f"http://127.0.0.1:{port}/").text == "first last"
        assert first.recv(1) == b""


def test_a_server_has_as_many_descriptors_as_the_system_gives():
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4096)
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
        "from quantkit.executor.server.serve import raise_descriptors\n"
        "print(raise_descriptors(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert told.split() == [str(hard)] * 3
