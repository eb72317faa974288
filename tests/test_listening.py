"""Addresses of servers: taken before a model is loaded, and told where they cannot be."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import command

from quantkit.errors import QuantkitError
from quantkit.listening import bound


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_nobody_connects_before_somebody_listens() -> None:
    with bound("127.0.0.1", 0) as (one,):
        address = one.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        one.listen()
        socket.create_connection(address, timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)


@pytest.mark.parametrize(("host", "said"), [("203.0.113.7", "Cannot assign requested address"), ("no host", "cannot serve on no host:1")])
def test_an_address_of_another_machine(host: str, said: str) -> None:
    with pytest.raises(QuantkitError, match=said), bound(host, 1):
        pass


@pytest.mark.parametrize(
    "arguments", [("serve", "tiny-r1"), ("playground", "tiny-r1"), ("proxy", "--prefill", "http://a", "--decode", "http://b")]
)
def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(
    arguments: tuple[str, ...], taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.executor.engine.Engine.open", lambda *_: pytest.fail("a model is loaded"))
    monkeypatch.setattr("quantkit.playground.play.Playground.open", lambda *_, **__: pytest.fail("a model is loaded"))
    answer = command(*arguments, "--port", str(taken))
    assert answer.code == 1
    assert answer.error.startswith(f"error: cannot serve on 127.0.0.1:{taken}: Address already in use; choose another --port")
    assert answer.errors == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [(("--tool-parser", "x"), "there is no tool parser 'x'"), (("--chat-template", "nowhere.jinja"), "nowhere.jinja does not exist")],
)
def test_what_a_server_cannot_use_is_told_before_a_model_is_loaded(
    asked: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.executor.engine.Engine.open", lambda *_: pytest.fail("a model is loaded"))
    answer = command("serve", "tiny-r1", *asked)
    assert answer.code == 1
    assert said in answer.error
