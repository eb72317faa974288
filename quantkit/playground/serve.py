"""The playground's server: on loopback, until it is told to stop."""

import signal
from collections.abc import Sequence
from socket import socket

import uvicorn

from quantkit.common.bind import bind_error
from quantkit.executor.server.serve import HttpServer
from quantkit.playground.app import create_app
from quantkit.playground.play import Playground

HOST = "127.0.0.1"


def serve(playground: Playground, port: int, sockets: Sequence[socket]) -> None:
    """sockets: of `listening.bound`, at HOST and `port`. Raises QuantkitError where another listens
    there by now."""
    config = uvicorn.Config(create_app(playground), log_level="warning", access_log=False)
    config.timeout_graceful_shutdown = 2
    server = HttpServer(config)
    # uvicorn raises the signal again once it has shut down; being told to stop is not a failure.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        server.run(list(sockets))
    except OSError as fault:
        raise bind_error(HOST, port, fault) from fault
