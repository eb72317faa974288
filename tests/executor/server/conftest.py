"""A server with a key and limits."""

import pytest
from running_server import KEY, Running, load

from quantkit.executor.server.app import Limits


@pytest.fixture(scope="module")
def running(tiny_checkpoint):
    limits = Limits(max_input=600, max_output=900, max_body=100_000)
    server = Running(load(tiny_checkpoint), api_key=KEY, limits=limits)
    yield server
    server.stop()
