"""A hub on loopback that serves one folder as the repository org/name, and counts the bytes it
sends."""

import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0" * 40


@dataclass
class Hub:
    """address: for HF_ENDPOINT. sent: bytes of bodies, by file name."""

    address: str
    sent: dict[str, int] = field(default_factory=dict)

    @property
    def total(self):
        return sum(self.sent.values())

    @property
    def weights(self):
        """Of safetensors files."""
        return sum(count for file, count in self.sent.items() if file.endswith(".safetensors"))


@contextmanager
def serve(folder, name="org/model"):
    """Serve `folder` as the repository `name`."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self._file(body=False)

        def do_GET(self):
            if self.path.startswith(f"/api/models/{name}"):
                return self._send(200, json.dumps(self._listing()).encode(), "api")
            self._file(body=True)

        def _listing(self):
            files = {
                path.relative_to(folder).as_posix(): path
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            }
            if "/tree/" in self.path:
                below = "recursive=true" in self.path.lower()
                there = {file: path for file, path in files.items() if below or "/" not in file}
                return [
                    {"type": "file", "path": file, "size": path.stat().st_size, "oid": COMMIT}
                    for file, path in there.items()
                ]
            return {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}

        def _file(self, *, body):
            asked = re.fullmatch(rf"/{name}/resolve/[^/]+/(.+)", self.path)
            path = folder / asked[1] if asked else None
            if path is None or not path.is_file():
                return self._send(404, b"", self.path)
            size = path.stat().st_size
            headers = {
                "ETag": f'"{path.name}-{size}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start, stop = (
                (int(wanted[1]), min(int(wanted[2] or size), size - 1) + 1) if wanted else (0, size)
            )
            if not body:
                return self._send(200, b"", path.name, headers | {"Content-Length": str(size)})
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(stop - start)
            if wanted:
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            self._send(206 if wanted else 200, content, path.name, headers)

        def _send(self, status, content, file, headers=None):
            with lock:
                hub.sent[file] = hub.sent.get(file, 0) + len(content)
            self.send_response(status)
            for key, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            """Tests want no lines on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
