"""A playground on a port of its own."""

import threading
import time
from contextlib import contextmanager

import uvicorn

from quantkit.playground.app import create_app


@contextmanager
def served(playground):
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(playground), port=0, log_level="error", timeout_graceful_shutdown=2
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < until, "the playground does not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
