"""One process that serves one model until it is told to stop."""

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from socket import socket

import uvicorn

from quantkit.common.bind import bind_error
from quantkit.common.errors import QuantkitError
from quantkit.executor.engine import Engine
from quantkit.executor.server.app import Limits, create_app
from quantkit.executor.server.connections import HttpServer
from quantkit.executor.server.service import Service

_SWITCH_SECONDS = 0.0005
"""How long a thread may keep the interpreter while the other waits: the default of 5 ms would be
added to every decode step."""


@dataclass(frozen=True)
class ServeOptions:
    """max_queue: requests that wait beyond those that run. grace_s: time that running answers get
    when the server is told to stop.

    tool_parser: the format of tool calls, or auto. log: takes a line for every request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_queue: int = 256
    grace_s: int = 30
    limits: Limits = field(default_factory=Limits)
    tool_parser: str = "auto"
    log: Callable[[str], None] | None = None


def serve(
    engine: Engine, model_name: str, options: ServeOptions, sockets: Sequence[socket]
) -> None:
    """Serve until SIGINT or SIGTERM: then no new connections, running answers finish within
    grace_s, the rest is cancelled.

    sockets: of `listening.bound`. Raises QuantkitError where another listens there by now, or the
    engine broke.
    """
    service = Service(
        engine, max_queue=options.max_queue, on_fault=lambda: setattr(server, "should_exit", True)
    )
    app = create_app(
        service,
        model_name,
        api_key=options.api_key,
        limits=options.limits,
        tool_parser=options.tool_parser,
        log=options.log,
    )
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=options.grace_s
    )
    server = HttpServer(config)
    sys.setswitchinterval(_SWITCH_SECONDS)
    # uvicorn raises the signal again once it has shut down; being told to stop is not a failure.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        server.run(list(sockets))
    except OSError as fault:
        raise bind_error(options.host, options.port, fault) from fault
    if service.fault is not None:
        raise QuantkitError(
            f"the engine stopped: {service.fault}", "see the error above; start again with --debug"
        ) from service.fault
