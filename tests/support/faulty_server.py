"""A real HTTP server that does what servers should not: what it writes is chosen byte by byte.

with FaultyServer(lambda wire, body: wire.stream(chunk("4"), END)) as server:
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


# Replies that are whole, however oddly sent: all say 你好 \u2028 4, with what str.splitlines breaks
# lines at.
TEXT = "你好 \u2028\u2029\u0085\x0b\x0c 4"
_PIECES = [chunk("你好 \u2028\u2029"), chunk("\u0085\x0b\x0c 4")]


def _in_bytes(data):
    return [data[place : place + 1] for place in range(len(data))]


WHOLE = {
    "plain": lambda wire, body: wire.stream(*_PIECES, END),
    "separators inside text": lambda wire, body: wire.stream(chunk(TEXT), END),
    "carriage returns": lambda wire, body: wire.stream(
        *(piece.replace(b"\n", b"\r\n") for piece in (*_PIECES, END))
    ),
    "one byte at a time": lambda wire, body: wire.stream(*_in_bytes(b"".join(_PIECES) + END)),
    "no empty lines": lambda wire, body: wire.stream(
        *(piece.replace(b"\n\n", b"\n") for piece in (*_PIECES, STOP, USAGE, DONE))
    ),
    "no end of the last line": lambda wire, body: wire.stream(
        *_PIECES, (STOP + USAGE).rstrip(b"\n")
    ),
    "several lines an event": lambda wire, body: wire.stream(
        *(
            b"event: x\nid: 1\ndata: "
            + b"\ndata: ".join(json.dumps(json.loads(p[6:]), indent=0).encode().split(b"\n"))
            + b"\n\n"
            for p in _PIECES
        ),
        END,
    ),
    "comments and fields": lambda wire, body: wire.stream(
        b": ping\n\nretry: 5\n\n", *_PIECES, b": ping\n\n", END
    ),
    "a byte order mark": lambda wire, body: wire.stream(
        b"\xef\xbb\xbf" + _PIECES[0], _PIECES[1], END
    ),
    "error null": lambda wire, body: wire.stream(
        *(p.replace(b'{"choices"', b'{"error": null, "choices"') for p in (*_PIECES, STOP)), DONE
    ),
    "fields that are null": lambda wire, body: wire.stream(
        event({"choices": None, "usage": None}),
        chunk(TEXT, logprobs=None),
        event({"choices": [{"delta": None, "finish_reason": "stop"}]}),
        DONE,
    ),
    "empty choices between": lambda wire, body: wire.stream(
        _PIECES[0], event({"choices": []}), _PIECES[1], END
    ),
    "the word null as finish reason": lambda wire, body: wire.stream(
        chunk(TEXT, finish_reason="null"), END
    ),
    "another choice besides": lambda wire, body: wire.stream(*_PIECES, chunk("no", index=1), END),
    "content in parts": lambda wire, body: wire.stream(
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
    "reasoning in other fields": lambda wire, body: wire.stream(
        event({"choices": [{"delta": {"thinking": "hm"}}]}), chunk(TEXT), END
    ),
    "the last event twice": lambda wire, body: wire.stream(
        *_PIECES, STOP, STOP, USAGE, USAGE, DONE
    ),
    "usage null": lambda wire, body: wire.stream(
        *_PIECES, STOP, event({"choices": [], "usage": None}), DONE
    ),
    "characters cut between chunks": lambda wire, body: wire.chunked(
        *_in_bytes(b"".join(_PIECES) + END)
    ),
    "chunks without an end": lambda wire, body: wire.chunked(*_PIECES, END, is_ended=False),
    "gone behind the finish reason": lambda wire, body: wire.chunked(
        *_PIECES, STOP, is_ended=False
    ),
    "gzip": lambda wire, body: (
        wire.head(200, STREAM, Content_Encoding="gzip"),
        wire.write(gzip.compress(b"".join(_PIECES) + END)),
    )[0],
    "held open after the end": lambda wire, body: (wire.stream(*_PIECES, END), time.sleep(1.3))[0],
    "a stream as text/plain": lambda wire, body: (
        wire.head(200, "text/plain"),
        wire.write(*_PIECES, END),
    )[0],
    "a stream as JSON": lambda wire, body: (
        wire.head(200, "application/json"),
        wire.write(*_PIECES, END),
    )[0],
    "usage in floats": lambda wire, body: wire.stream(
        *_PIECES,
        STOP,
        event({"choices": [], "usage": {"prompt_tokens": 3.0, "completion_tokens": 2.0}}),
        DONE,
    ),
    "the choice's number as text": lambda wire, body: wire.stream(chunk(TEXT, index="0"), END),
    "the finish reason in capitals": lambda wire, body: wire.stream(
        *_PIECES, chunk("", finish_reason="STOP"), DONE
    ),
    "error false": lambda wire, body: wire.stream(
        *(
            piece.replace(b'{"choices"', b'{"error": false, "choices"')
            for piece in (*_PIECES, STOP)
        ),
        DONE,
    ),
    "more length promised than sent": lambda wire, body: (
        wire.head(200, STREAM, Content_Length="99999"),
        wire.write(*_PIECES, END),
    )[0],
    "counts that are not known": lambda wire, body: wire.stream(
        *_PIECES,
        STOP,
        event({"choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": -1}}),
        DONE,
    ),
    "the end in small letters": lambda wire, body: wire.stream(
        *_PIECES, STOP, USAGE, b"data: [done]\n\n"
    ),
    "words that say it still works": lambda wire, body: wire.stream(
        b"data: ping\n\n",
        _PIECES[0],
        b"event: keepalive\ndata: keep-alive\n\n",
        _PIECES[1],
        b"data: HEARTBEAT\n\n",
        END,
    ),
    "JSON lines": lambda wire, body: (
        wire.head(200, "application/x-ndjson"),
        wire.write(*(piece.removeprefix(b"data: ") for piece in (*_PIECES, STOP, USAGE))),
    )[0],
    "junk behind the end": lambda wire, body: wire.stream(*_PIECES, END, b"data: {{{\n\n"),
    "not streamed": lambda wire, body: (
        wire.head(200, "application/json"),
        wire.write(
            json.dumps(
                {"choices": [{"index": 0, "message": {"content": TEXT}, "finish_reason": "stop"}]}
            ).encode()
        ),
    )[0],
}
"""A reply that is read whole."""

BROKEN = {
    "reset": lambda wire, body: wire.reset(),
    "cut in a line": lambda wire, body: wire.stream(_PIECES[0], _PIECES[1][:30]),
    "cut between lines": lambda wire, body: wire.stream(*_PIECES),
    "no finish reason": lambda wire, body: wire.stream(*_PIECES, USAGE, DONE),
    "half a line, then more": lambda wire, body: wire.stream(
        _PIECES[0][:30] + b"\n", _PIECES[1], END
    ),
    "bytes before the first event": lambda wire, body: wire.stream(b"\0\0", *_PIECES, END),
    "an event without its field": lambda wire, body: wire.stream(
        _PIECES[0], _PIECES[1].removeprefix(b"data: "), END
    ),
    "ends of lines that are CR": lambda wire, body: wire.stream(
        *(piece.replace(b"\n", b"\r") for piece in (*_PIECES, END))
    ),
    "no body": lambda wire, body: wire.head(200, "application/json"),
    "a word that says nothing known": lambda wire, body: wire.stream(
        *_PIECES, b"data: overloaded\n\n", END
    ),
    "JSON lines cut": lambda wire, body: (
        wire.head(200, "application/x-ndjson"),
        wire.write(_PIECES[0].removeprefix(b"data: "), _PIECES[1].removeprefix(b"data: ")[:30]),
    )[0],
    "content a number": lambda wire, body: wire.stream(
        event({"choices": [{"delta": {"content": 7}}]}), END
    ),
    "data null": lambda wire, body: wire.stream(b"data: null\n\n", *_PIECES, END),
    "data a number": lambda wire, body: wire.stream(*_PIECES, b"data: 7\n\n", END),
    "an error in the stream": lambda wire, body: wire.stream(
        _PIECES[0], event({"error": {"message": "out of memory"}})
    ),
    "HTML": lambda wire, body: (
        wire.head(200, "text/html"),
        wire.write(b"<html>Bad gateway</html>"),
    )[0],
    "nothing": lambda wire, body: wire.stream(),
    "empty choices only": lambda wire, body: wire.stream(event({"choices": []}), DONE),
    "bad gzip": lambda wire, body: (
        wire.head(200, STREAM, Content_Encoding="gzip"),
        wire.write(b"\x1f\x8b\x08 no gzip"),
    )[0],
    "cut gzip": lambda wire, body: (
        wire.head(200, STREAM, Content_Encoding="gzip"),
        wire.write(gzip.compress(_PIECES[0])[:-12]),
    )[0],
    "choices an object": lambda wire, body: wire.stream(event({"choices": {"0": 1}}), END),
    "content a list": lambda wire, body: wire.stream(
        event({"choices": [{"delta": {"content": [1]}}]}), END
    ),
    "usage a list": lambda wire, body: wire.stream(*_PIECES, event({"usage": [1]}), END),
    "finish reason a number": lambda wire, body: wire.stream(chunk("4", finish_reason=1), END),
    "given up": lambda wire, body: wire.stream(chunk("4", finish_reason="abort"), DONE),
    "text after the end": lambda wire, body: wire.stream(*_PIECES, STOP, chunk("4"), END),
    "not UTF-8 in JSON's place": lambda wire, body: wire.stream(b"data: \xff\xfe\n\n", END),
    "nested without end": lambda wire, body: wire.stream(b"data: " + b"[" * 100_000 + b"\n\n", END),
    "no HTTP": lambda wire, body: wire.write(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "moved": lambda wire, body: wire.head(307, Location="http://127.0.0.1:1/v1/chat/completions"),
    "an error with HTTP 200": lambda wire, body: (
        wire.head(200, "application/json"),
        wire.write(b'{"error": {"message": "overloaded", "code": 503}}'),
    )[0],
    "a part of the content of another type": lambda wire, body: wire.stream(
        event({"choices": [{"delta": {"content": [{"type": "image_url", "image_url": {}}]}}]}), END
    ),
    "500": lambda wire, body: wire.refuse(500, "broken"),
    "403": lambda wire, body: wire.refuse(403, "not this prompt"),
    "400": lambda wire, body: wire.refuse(400, "bad prompt"),
    "a silent stream": lambda wire, body: wire.stream(_PIECES[0], b"", every_s=1.0),
    "bytes dripped without an event": lambda wire, body: wire.stream(*[b":"] * 15, every_s=0.1),
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
