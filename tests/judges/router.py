"""vllm-router between doubles of vLLM's prefill and decode servers, started by the script that
`quantkit deploy` prints for it.

    PYTHONPATH=.:tests/support python tests/judges/router.py .venv-router     (`make test-router`)
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
from make_model import random_tensors, tiny_config
from packed_model import write_packed

from quantkit.checkpoint.formats import compressed_int8
from quantkit.deploy.launch import Network, deploy
from quantkit.deploy.script import API_KEY
from quantkit.grids.int_groups import IntGrid

KEY = "the key of this run"
CACHE = {"remote_engine_id": "p", "remote_block_ids": [1, 2], "do_remote_prefill": True}
REQUEST = {"model": "m", "prompt": "a", "max_tokens": 9, "logprobs": 2}
HEADERS = {"Authorization": f"Bearer {KEY}"}
# Addresses of loopback that no other run has: ports are those of the printed scripts.
PREFILL, DECODE = (f"127.{61 + os.getpid() % 64}.{os.getpid() // 64 % 256}.{n}" for n in (1, 2))
URL = f"http://{PREFILL}:8000"
EVENTS = [b"data: 1\n\n", b"data: [DONE]\n\n"]


class Double(BaseHTTPRequestHandler):
    """A server of vLLM: it refuses other keys, keeps requests, hands over a cache or streams
    `server.events`. Between them it waits for `server.goes_on`; `server.left` is set where the
    client has gone by then."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._json(200 if self.path != "/v1/models" or self._has_key() else 401, {"data": []})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        if not self._has_key():
            return self._json(401, {"error": {"message": "key"}})
        server.requests.append((self.path, body))
        if "do_remote_decode" in body["kv_transfer_params"]:
            return self._json(200, {"kv_transfer_params": CACHE})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, event in enumerate(server.events(body)):
            if number and not server.goes_on.wait(20):
                raise TimeoutError("the client has not read the first event")
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")
        return None

    def _has_key(self):
        return self.headers.get("Authorization") == f"Bearer {KEY}"

    def _json(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A client that has gone is not an error."""
        self.left.set()

    def __init__(self, address):
        super().__init__(address, Double)
        self.requests = []
        self.goes_on, self.left = threading.Event(), threading.Event()
        self.goes_on.set()
        self.events = lambda body: EVENTS


@contextmanager
def served(address, port):
    server = Server((address, port))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def router_launch(folder):
    config = tiny_config()
    model = write_packed(
        folder / "model",
        config,
        random_tensors(config),
        compressed_int8.FORMAT,
        IntGrid(8, None, symmetric=True),
    )
    made = deploy(
        model, "vllm", layout="prefill-decode", devices=1, network=Network([PREFILL, DECODE])
    )
    (launch,) = [launch for launch in made.launches if launch.role == "router"]
    return launch


@contextmanager
def running(script, venv):
    environment = {**os.environ, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}", API_KEY: KEY}
    process = subprocess.Popen(
        ["bash", "-c", script], env=environment, stdout=subprocess.DEVNULL, stderr=sys.stderr
    )
    try:
        for _ in range(600):
            if is_up():
                break
            assert process.poll() is None, "the router has ended"
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(30)


def is_up():
    try:
        return httpx.get(f"{URL}/liveness", headers=HEADERS).status_code == 200
    except httpx.TransportError:
        return False


def post(body, headers=HEADERS, path="completions"):
    return httpx.post(f"{URL}/v1/{path}", json=body, headers=headers, timeout=30)


def keys_are_checked(prefill, decode):
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert post(REQUEST, headers).status_code == 401
    assert not prefill.requests + decode.requests
    assert post(REQUEST).status_code == 200


def a_request_goes_to_both_roles(prefill, decode):
    assert post(REQUEST | {"unknown": 1}).text == "".join(map(bytes.decode, EVENTS))
    (path, first), (_, second) = prefill.requests[-1], decode.requests[-1]
    assert path == "/v1/completions"
    assert (first["max_tokens"], first["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    assert second["kv_transfer_params"] == CACHE
    assert REQUEST.items() <= second.items()
    assert second["unknown"] == 1
    messages = [{"role": "user", "content": "a"}]
    assert post({"model": "m", "messages": messages}, path="chat/completions").status_code == 200
    assert decode.requests[-1][1]["messages"] == messages


def a_client_cannot_name_a_cache(prefill, decode):
    post(REQUEST | {"kv_transfer_params": {"remote_block_ids": [9]}})
    assert decode.requests[-1][1]["kv_transfer_params"] == CACHE


def an_event_is_passed_on_before_the_next(prefill, decode):
    decode.goes_on.clear()
    body = REQUEST | {"stream": True}
    with httpx.stream("POST", f"{URL}/v1/completions", json=body, headers=HEADERS) as reply:
        pieces = reply.iter_raw()
        assert next(pieces) == EVENTS[0]
        decode.goes_on.set()
        assert b"".join(pieces) == EVENTS[1]


def a_request_of_a_client_that_left_is_cancelled(prefill, decode):
    decode.events = lambda body: [b"data: 1\n\n" * 1000] * 10_000
    body = REQUEST | {"stream": True}
    with httpx.stream("POST", f"{URL}/v1/completions", json=body, headers=HEADERS) as reply:
        next(reply.iter_raw())
    assert decode.left.wait(20)
    decode.events = lambda body: EVENTS


CHECKS = (
    keys_are_checked,
    a_request_goes_to_both_roles,
    a_client_cannot_name_a_cache,
    an_event_is_passed_on_before_the_next,
    a_request_of_a_client_that_left_is_cancelled,
)


def main(venv):
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        prefill = opened.enter_context(served(PREFILL, 8100))
        decode = opened.enter_context(served(DECODE, 8200))
        opened.enter_context(running(router_launch(Path(folder)).script(), venv))
        for check in CHECKS:
            check(prefill, decode)
            print(f"ok   {check.__name__.replace('_', ' ')}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
