"""One process that serves one model until it is stopped."""

import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from socket import socket
from typing import Any

import uvicorn

from quantkit.common.bind import bind_error, is_loopback
from quantkit.common.errors import QuantkitError
from quantkit.executor.engine import Engine
from quantkit.executor.server.app import Limits, create_app
from quantkit.executor.server.options import ServerOptions
from quantkit.executor.server.service import Service

SILENT_SECONDS = 60.0
"""How long a connection may be without a request that is whole up to its body. Between two requests
uvicorn waits for 5 s by itself."""
_DESCRIPTORS = 65536
"""Asked of the system, as far as it gives them: vLLM asks for as many."""
_OTHERS = 128
"""Descriptors that are no connections: the model's files, sockets of ranks, pipes."""


class HttpServer(uvicorn.Server):
    """Closes connections on which nothing is asked: after silent_s seconds, and before that, the
    oldest first, where more than `places` are open; then also those whose request is not whole.
    places: without, as many as the process may have descriptors."""

    def __init__(
        self, config: uvicorn.Config, *, silent_s: float = SILENT_SECONDS, places: int | None = None
    ) -> None:
        super().__init__(config)
        self._silent_s, self._places = silent_s, places or max(raise_descriptors() - _OTHERS, 1)
        self._since: Mapping[Any, float] = {}
        """Of the connections without a whole request, when that was seen first."""

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        now, open_ones = time.monotonic(), self.server_state.connections
        self._since = {
            one: self._since.get(one, now)
            for one in open_ones
            if _begins(one) or _asks_nothing(one)
        }
        oldest = sorted(self._since, key=lambda one: self._since[one])
        too_many = max(len(open_ones) - self._places, 0)
        late = [
            one
            for one in oldest[too_many:]
            if now - self._since[one] > self._silent_s and _asks_nothing(one)
        ]
        for one in [*oldest[:too_many], *late]:
            one.transport.close()
        return await super().on_tick(counter)

    def run_at(self, host: str, port: int, sockets: Sequence[socket]) -> None:
        """Serve until SIGINT or SIGTERM. Raises QuantkitError where another process took the port."""
        # uvicorn raises the signal again once it has shut down; being stopped is not a failure.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        try:
            self.run(list(sockets))
        except OSError as fault:
            raise bind_error(host, port, fault) from fault

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """After a second Ctrl-C uvicorn leaves out the application's end; the engine's thread must
        end before the process."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()


def _asks_nothing(connection: Any) -> bool:
    """Whether no request is being read or answered. connection: of one of uvicorn's protocols."""
    cycle = getattr(connection, "cycle", None)
    return cycle is None or cycle.response_complete


def _begins(connection: Any) -> bool:
    """Whether the body of a request is not whole yet."""
    cycle = getattr(connection, "cycle", None)
    return cycle is not None and cycle.more_body


def raise_descriptors() -> int:
    """Have the system give this process more file descriptors; returns how many it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


_SWITCH_SECONDS = 0.0005
"""How long a thread may keep the interpreter while the other waits: the default of 5 ms would be
added to every decode step."""


def serve(
    engine: Engine,
    model_name: str,
    options: ServerOptions,
    sockets: Sequence[socket],
    log: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM: then new connections are refused, running answers may finish
    within grace_s, and the rest is cancelled.

    sockets: of `bind.bind`. log: takes a line for every request. Raises QuantkitError where another
    process took the port meanwhile, or the engine failed.
    """
    service = Service(
        engine, max_queue=options.max_queue, on_fault=lambda: setattr(server, "should_exit", True)
    )
    app = create_app(
        service,
        model_name,
        api_key=options.api_key,
        limits=Limits(max_input=options.max_input, max_output=options.max_output),
        tool_parser=options.tool_parser,
        log=log,
        local=is_loopback(options.host),
    )
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=options.grace_s
    )
    server = HttpServer(config)
    sys.setswitchinterval(_SWITCH_SECONDS)
    server.run_at(options.host, options.port, sockets)
    if service.fault is not None:
        raise QuantkitError(
            f"the engine stopped: {service.fault}", "see the error above; start again with --debug"
        ) from service.fault
