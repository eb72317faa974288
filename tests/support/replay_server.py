"""A real HTTP server that speaks OpenAI's completion API and answers from a function, with faults
on demand.

with ReplayServer(lambda question, body: "so \\boxed{4}") as server:
    Endpoint(server.url)
"""

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    """What one request gets. status other than 200 sends `text` as the error message; `fault`
    breaks a stream: "cut", "error" or "hang"."""

    text: str
    finish_reason: str = "stop"
    reasoning: str | None = None
    status: int = 200
    fault: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    # of a queue of 5, which is the rule, what comes at once is dropped, and sent again after a
    # second
    request_queue_size = 128


class ReplayServer:
    """`requests` collects the bodies as they arrive; `most_at_once` is the highest number of
    requests that were open together. `metrics` is the text of /metrics."""

    def __init__(self, answer, *, models=("replayed",), delay_s=0.0, api_key=None):
        self.answer, self.models, self.delay_s, self.api_key = answer, models, delay_s, api_key
        self.requests, self.metrics = [], ""
        self.most_at_once = self._open = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                if (
                    outer.api_key is not None
                    and self.headers.get("Authorization") != f"Bearer {outer.api_key}"
                ):
                    return outer._send(self, 401, {"error": {"message": "wrong key"}})
                if self.path == "/metrics" and outer.metrics:
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(outer.metrics)))
                    self.end_headers()
                    return self.wfile.write(outer.metrics.encode())
                outer._send(self, 200, {"data": [{"id": name} for name in outer.models]})

            def do_POST(self):
                outer._post(self)

            def log_message(self, *args):
                pass

        self._server = _Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *args):
        self._server.shutdown()
        self._server.server_close()

    def _post(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.requests.append(body)
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
        try:
            time.sleep(self.delay_s)
            if (
                self.api_key is not None
                and handler.headers.get("Authorization") != f"Bearer {self.api_key}"
            ):
                return self._send(handler, 401, {"error": {"message": "wrong key"}})
            question = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
            made = self.answer(question, body)
            reply = Reply(made) if isinstance(made, str) else made
            if reply.status != 200:
                return self._send(
                    handler, reply.status, {"error": {"message": reply.text}}, reply.headers
                )
            self._stream(handler, reply, chat="messages" in body)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            with self._lock:
                self._open -= 1

    def _send(self, handler, status, value, headers=None):
        data = json.dumps(value).encode()
        handler.send_response(status)
        for name, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            handler.send_header(name, text)
        handler.end_headers()
        handler.wfile.write(data)

    def _stream(self, handler, reply, *, chat):
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Connection", "close")
        handler.end_headers()

        def event(value):
            handler.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
            handler.wfile.flush()

        def piece(part, finish=None):
            event(
                {
                    "choices": [
                        {
                            "index": 0,
                            "finish_reason": finish,
                            **({"delta": part} if chat else {"text": part.get("content", "")}),
                        }
                    ]
                }
            )

        if chat:
            piece({"role": "assistant", "content": ""})
        for character in reply.reasoning or "":
            piece({"reasoning_content": character})
        for start in range(0, len(reply.text), 7):
            piece({"content": reply.text[start : start + 7]})
        if reply.fault == "error":
            event({"error": {"message": "out of memory"}})
        if reply.fault == "hang":
            time.sleep(3)
        if reply.fault:
            return
        piece({}, reply.finish_reason)
        event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": len(reply.text)}})
        handler.wfile.write(b"data: [DONE]\n\n")
