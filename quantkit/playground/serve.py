"""The playground's server: on loopback, until it is told to stop."""

import signal

import uvicorn

from quantkit.errors import QuantkitError
from quantkit.playground.app import create_app
from quantkit.playground.play import Playground


def serve(playground: Playground, port: int) -> None:
    """Raises QuantkitError where the port is taken."""
    config = uvicorn.Config(create_app(playground), host="127.0.0.1", port=port, log_level="warning", access_log=False)
    config.timeout_graceful_shutdown = 2
    server = uvicorn.Server(config)
    # uvicorn raises the signal again once it has shut down; being told to stop is not a failure.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        server.run()
    except SystemExit as fault:  # uvicorn's answer to an address it cannot have
        raise QuantkitError(f"cannot serve on 127.0.0.1:{port}", "choose another --port") from fault
