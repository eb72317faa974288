"""A server in this process, for tests that talk to it over loopback."""

import threading
import time

import openai
import uvicorn

from quantkit import Engine
from quantkit.executor.server.app import create_app
from quantkit.executor.server.service import Service

KEY = "secret"
MESSAGES = [{"role": "user", "content": "What is 12+30?"}]


class Running:
    """A server in a thread, on a free port."""

    def __init__(self, engine, *, max_queue=64, **options):
        """options: of `create_app`."""
        self.engine = engine
        self.service = Service(engine, max_queue=max_queue)
        app = create_app(self.service, "tiny", **options)
        self.server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=5)
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def stop(self):
        self.server.should_exit = True
        self.thread.join(30)


def wait_for(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


def load(path, **options):
    return Engine.load(
        path, device="cpu", dtype="float32", **{"max_batch": 4, "max_model_len": 1024, **options}
    )


def idle(running):
    """Whether nothing is asked of the server, and no block of its cache is held."""
    scheduler = running.engine.scheduler
    return (
        running.service.open == 0
        and not scheduler.has_work
        and scheduler.allocator.num_free == scheduler.allocator.num_blocks
    )
