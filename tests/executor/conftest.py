"""What every test of the executor leaves as it found it."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads_and_environment() -> Iterator[None]:
    """An engine of several ranks sets both for its whole process."""
    threads, environment = torch.get_num_threads(), dict(os.environ)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)
