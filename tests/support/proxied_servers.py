"""Servers of this process behind `quantkit proxy`, in place of vLLM's;
tests/judges/vllm_topologies.py runs it before vLLM itself."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import uvicorn
from running_server import wait_for

from quantkit.deploy.proxy import proxy

PLACE = {"remote_engine_id": "p", "remote_block_ids": [1, 2], "do_remote_prefill": True}
ASKED = {"model": "m", "prompt": "a", "max_tokens": 9, "min_tokens": 4, "logprobs": 2}
KEY = {"Authorization": "Bearer k"}


class Answering(BaseHTTPRequestHandler):
    """Keeps what it is asked. A prefill server says where the cache is; a decode server streams two
    events, or stops after the first."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._say(b'{"data": []}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.asked.append((self.path, dict(self.headers), body))
        if server.says == "refuse":
            return self._say(b'{"error": {"message": "too long"}}', 400)
        if server.says == "stop":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"data: 1\n\n")
            return None
        if "do_remote_decode" in body.get("kv_transfer_params", {}):
            return self._say(json.dumps({"kv_transfer_params": PLACE}).encode())
        return self._say(b"data: 1\n\ndata: [DONE]\n\n", kind="text/event-stream")

    def _say(self, content: bytes, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def in_thread(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextmanager
def answering(says: str = "") -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.asked, server.says, server.url = [], says, f"http://127.0.0.1:{server.server_port}"
    with in_thread(server):
        yield server


@contextmanager
def running(prefill: list[str], decode: list[str]) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(proxy(prefill, decode), port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
