"""A server in this process, for tests that talk to it over loopback."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import uvicorn

from quantkit.executor.engine import Engine
from quantkit.executor.server.app import create_app
from quantkit.executor.server.service import Service

KEY = "secret"
MESSAGES = [{"role": "user", "content": "What is 12+30?"}]


class Running:
    """A server in a thread, on a free port."""

    def __init__(self, engine: Engine, *, max_queue: int = 64, **options: Any) -> None:
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
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


def load(path: Path, **options: int) -> Engine:
    return Engine.load(
        path, device="cpu", dtype="float32", **{"max_batch": 4, "max_model_len": 1024, **options}
    )


def idle(running: Running) -> bool:
    """Whether nothing is asked of the server, and no block of its cache is held."""
    scheduler = running.engine.scheduler
    return (
        running.service.open == 0
        and not scheduler.has_work
        and scheduler.allocator.num_free == scheduler.allocator.num_blocks
    )
