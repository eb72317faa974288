"""Fixtures of the kernels' tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so an element that is never written shows. Operators without a deterministic form, which CUDA has, warn."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
