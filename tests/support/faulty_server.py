"""A real HTTP server that does what servers should not: what it writes is chosen byte by byte.

with FaultyServer(stream(chunk("4"), END)) as server:
    Endpoint(server.url)
"""

import gzip
import json
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STREAM = "text/event-stream"


def chunk(text, **choice):
    """One event with a piece of text."""
    return event(
        {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **choice}]}
    )


def event(value):
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


STOP = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
DONE = b"data: [DONE]\n\n"
END = STOP + USAGE + DONE


class Wire:
    """What one request is answered with."""

    def __init__(self, handler):
        self._handler = handler

    def head(self, status=200, kind=STREAM, **headers):
        self._handler.send_response(status)
        self._handler.send_header("Content-Type", kind)
        self._handler.send_header("Connection", "close")
        for name, value in headers.items():
            self._handler.send_header(name.replace("_", "-"), value)
        self._handler.end_headers()

    def write(self, *pieces, every_s=0.0):
        for piece in pieces:
            self._handler.wfile.write(piece)
            self._handler.wfile.flush()
            time.sleep(every_s)

    def stream(self, *pieces, every_s=0.0):
        self.head()
        self.write(*pieces, every_s=every_s)

    def chunked(self, *pieces, is_ended=True):
        """In chunks of HTTP/1.1, the last one of which may be missing."""
        self.head(200, STREAM, Transfer_Encoding="chunked")
        self.write(
            *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces),
            b"0\r\n\r\n" if is_ended else b"",
        )

    def refuse(self, status, message):
        self.head(status, "application/json")
        self.write(json.dumps({"error": {"message": message}}).encode())

    def reset(self):
        """Close without a word, so that the client sees a reset."""
        self._handler.connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0"
        )
        self._handler.connection.close()


def stream(*pieces, every_s=0.0, held_s=0.0):
    """The answer that is these events, and is held open for a while."""

    def answer(wire, body):
        wire.stream(*pieces, every_s=every_s)
        time.sleep(held_s)

    return answer


def chunked(*pieces, is_ended=True):
    return lambda wire, body: wire.chunked(*pieces, is_ended=is_ended)


def typed(kind, *pieces, **headers):
    """Of another content type, or with more headers."""

    def answer(wire, body):
        wire.head(200, kind, **headers)
        wire.write(*pieces)

    return answer


def refuse(status, message):
    return lambda wire, body: wire.refuse(status, message)


# Replies that are whole, however oddly sent: all say 你好 \u2028 4, with what str.splitlines breaks
# lines at.
TEXT = "你好 \u2028\u2029\u0085\x0b\x0c 4"
_PIECES = [chunk("你好 \u2028\u2029"), chunk("\u0085\x0b\x0c 4")]


def _in_bytes(data):
    return [data[place : place + 1] for place in range(len(data))]


WHOLE = {
    "plain": stream(*_PIECES, END),
    "separators inside text": stream(chunk(TEXT), END),
    "carriage returns": stream(*(piece.replace(b"\n", b"\r\n") for piece in (*_PIECES, END))),
    "no empty lines": stream(
        *(piece.replace(b"\n\n", b"\n") for piece in (*_PIECES, STOP, USAGE, DONE))
    ),
    "no end of the last line": stream(*_PIECES, (STOP + USAGE).rstrip(b"\n")),
    "several lines an event": stream(
        *(
            b"event: x\nid: 1\ndata: "
            + b"\ndata: ".join(json.dumps(json.loads(p[6:]), indent=0).encode().split(b"\n"))
            + b"\n\n"
            for p in _PIECES
        ),
        END,
    ),
    "comments and fields": stream(b": ping\n\nretry: 5\n\n", *_PIECES, b": ping\n\n", END),
    "a byte order mark": stream(b"\xef\xbb\xbf" + _PIECES[0], _PIECES[1], END),
    "odd values": stream(
        event({"choices": None, "usage": None, "error": None}),
        chunk(TEXT[:5], logprobs=None, index="0", finish_reason="null"),
        chunk(TEXT[5:]),
        event({"error": False, "choices": [{"delta": None, "finish_reason": "STOP"}]}),
        event({"choices": [], "usage": {"prompt_tokens": 3.0, "completion_tokens": 2.0}}),
        b"data: [done]\n\n",
    ),
    "another choice besides": stream(*_PIECES, chunk("no", index=1), END),
    "content in parts": stream(
        event(
            {
                "choices": [
                    {
                        "delta": {
                            "content": [
                                {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
                            ]
                        }
                    }
                ]
            }
        ),
        event({"choices": [{"delta": {"content": [{"type": "text", "text": TEXT}]}}]}),
        END,
    ),
    "reasoning in other fields": stream(
        event({"choices": [{"delta": {"thinking": "hm"}}]}), chunk(TEXT), END
    ),
    "usage null": stream(*_PIECES, STOP, event({"choices": [], "usage": None}), DONE),
    "characters cut between chunks": chunked(*_in_bytes(b"".join(_PIECES) + END)),
    "chunks without an end": chunked(*_PIECES, END, is_ended=False),
    "gone behind the finish reason": chunked(*_PIECES, STOP, is_ended=False),
    "gzip": typed(STREAM, gzip.compress(b"".join(_PIECES) + END), Content_Encoding="gzip"),
    "held open after the end": stream(*_PIECES, END, held_s=1.3),
    "a stream as text/plain": typed("text/plain", *_PIECES, END),
    "more length promised than sent": typed(STREAM, *_PIECES, END, Content_Length="99999"),
    "counts that are not known": stream(
        *_PIECES,
        STOP,
        event({"choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": -1}}),
        DONE,
    ),
    "words that say it still works": stream(
        b"data: ping\n\n",
        _PIECES[0],
        b"event: keepalive\ndata: keep-alive\n\n",
        _PIECES[1],
        b"data: HEARTBEAT\n\n",
        END,
    ),
    "JSON lines": typed(
        "application/x-ndjson",
        *(piece.removeprefix(b"data: ") for piece in (*_PIECES, STOP, USAGE)),
    ),
    "junk behind the end": stream(*_PIECES, END, b"data: {{{\n\n"),
    "not streamed": typed(
        "application/json",
        json.dumps(
            {"choices": [{"index": 0, "message": {"content": TEXT}, "finish_reason": "stop"}]}
        ).encode(),
    ),
}
"""A reply that is read whole."""

BROKEN = {
    "reset": lambda wire, body: wire.reset(),
    "cut in a line": stream(_PIECES[0], _PIECES[1][:30]),
    "cut between lines": stream(*_PIECES),
    "no finish reason": stream(*_PIECES, USAGE, DONE),
    "bytes before the first event": stream(b"\0\0", *_PIECES, END),
    "an event without its field": stream(_PIECES[0], _PIECES[1].removeprefix(b"data: "), END),
    "ends of lines that are CR": stream(
        *(piece.replace(b"\n", b"\r") for piece in (*_PIECES, END))
    ),
    "no body": lambda wire, body: wire.head(200, "application/json"),
    "JSON lines cut": typed(
        "application/x-ndjson",
        _PIECES[0].removeprefix(b"data: "),
        _PIECES[1].removeprefix(b"data: ")[:30],
    ),
    "data null": stream(b"data: null\n\n", *_PIECES, END),
    "an error in the stream": stream(_PIECES[0], event({"error": {"message": "out of memory"}})),
    "HTML": typed("text/html", b"<html>Bad gateway</html>"),
    "nothing": stream(),
    "bad gzip": typed(STREAM, b"\x1f\x8b\x08 no gzip", Content_Encoding="gzip"),
    "a field of another type": stream(
        event({"choices": [{"delta": {"content": 7}, "finish_reason": 1}]}), END
    ),
    "choices an object": stream(event({"choices": {"0": 1}}), END),
    "given up": stream(chunk("4", finish_reason="abort"), DONE),
    "text after the end": stream(*_PIECES, STOP, chunk("4"), END),
    "nested without end": stream(b"data: " + b"[" * 100_000 + b"\n\n", END),
    "no HTTP": lambda wire, body: wire.write(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "moved": lambda wire, body: wire.head(307, Location="http://127.0.0.1:1/v1/chat/completions"),
    "an error with HTTP 200": typed(
        "application/json", b'{"error": {"message": "overloaded", "code": 503}}'
    ),
    "a part of the content of another type": stream(
        event({"choices": [{"delta": {"content": [{"type": "image_url", "image_url": {}}]}}]}), END
    ),
    "500": refuse(500, "broken"),
    "403": refuse(403, "not this prompt"),
    "400": refuse(400, "bad prompt"),
    "a silent stream": stream(_PIECES[0], b"", every_s=1.0),
    "bytes dripped without an event": stream(*[b":"] * 15, every_s=0.1),
}
"""A reply that cannot be read, and is its own sample's error."""


class FaultyServer:
    """`requests` collects bodies; `/v1/models` lists `model`."""

    def __init__(self, behaviour, *, model="faulty"):
        self.requests = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                data = json.dumps({"data": [{"id": model}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                self.close_connection = True
                with suppress(OSError):  # the client may have had enough
                    behaviour(Wire(self), body)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *args):
        self._server.shutdown()
        self._server.server_close()
