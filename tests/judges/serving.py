"""A `quantkit serve` process for judges that talk to it over loopback."""

import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx

_SECONDS = 180


@contextmanager
def serve(model, name, *options):
    """The address of its API, ending in /v1; the server ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "quantkit",
        "serve",
        model,
        "--port",
        str(port),
        "--device",
        "cpu",
        "--max-batch",
        "4",
    ]
    server = subprocess.Popen(
        [*command, "--max-model-len", "1024", "--served-name", name, *options]
    )
    try:
        _wait(port, server)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def _wait(port, server):
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until and server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.3)
    raise SystemExit("the server did not come up")
