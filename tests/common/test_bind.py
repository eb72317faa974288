"""Addresses of servers: bound before a model is loaded, with an error if they cannot be."""

import shutil
import socket

import pytest
from commands import typed
from edited import edited
from refused import refused

from quantkit.common.bind import bind, url_address


def test_an_ipv6_host_has_brackets():
    assert (url_address("::1", 8000), url_address("127.0.0.1", 80), url_address("box", 1)) == (
        "[::1]:8000",
        "127.0.0.1:80",
        "box:1",
    )
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listening:
        port = listening.getsockname()[1]
        with refused(rf"cannot serve on \[::1\]:{port}"), bind("::1", port):
            pass


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize(
    ("host", "said"),
    [("203.0.113.7", "Cannot assign requested address"), ("no host", "cannot serve on no host:1")],
)
def test_an_address_of_another_machine(host, said):
    with refused(said), bind(host, 1):
        pass


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    for name in ("executor.engine.Engine", "playground.play.Playground"):
        monkeypatch.setattr(
            f"quantkit.{name}.open", lambda *_, **__: pytest.fail("a model is loaded")
        )


@pytest.mark.parametrize("line", ["serve tiny-r1", "playground tiny-r1"])
@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_port_in_use_is_reported_before_a_model_is_loaded(line, taken):
    answer = typed(f"{line} --port {taken}")
    assert (answer.code, answer.errors) == (1, 1)
    assert answer.error.startswith(
        f"error: cannot serve on 127.0.0.1:{taken}: Address already in use; choose another --port"
    )


@pytest.mark.usefixtures("nothing_is_loaded")
def test_an_unusable_option_is_reported_before_a_model_is_loaded(tmp_path):
    (tmp_path / "broken.jinja").write_text("{% for x in %}")
    for asked, said, code in (
        ("--tool-parser x", "there is no tool parser 'x'", 2),
        (f"--chat-template {tmp_path}/broken.jinja", "is not a template: Expected", 1),
    ):
        answer = typed(f"serve tiny-r1 {asked}")
        assert answer.code == code
        assert said in answer.error


def test_a_server_without_a_chat_template_says_so_when_it_comes_up(
    tiny_checkpoint, tmp_path, monkeypatch
):
    """Whoever started it heard of it from a client's first chat."""
    monkeypatch.setattr("quantkit.executor.server.serve.serve", lambda *_: None)
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    told = "has no chat template: chats and responses are refused"
    asked = f"serve {model} --device cpu --max-batch 1 --port 18437"
    assert told not in typed(asked).err
    with edited(model / "tokenizer_config.json") as settings:
        del settings["chat_template"]
    assert told in typed(asked).err


def test_connections_are_refused_before_the_server_listens():
    with bind("127.0.0.1", 0) as (one,):
        url_address = one.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(url_address, timeout=5)
        one.listen()
        socket.create_connection(url_address, timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(url_address, timeout=5)
