"""Fixtures of the lowered kernels' tests."""

import pytest
from quantkit_kernels.ascend import extension


@pytest.fixture(autouse=True)
def without_ascendc(request, monkeypatch):
    """The library that one file loads stays in the process: the others compute as where none was
    built."""
    if "operators" not in request.fixturenames:
        monkeypatch.setattr(extension, "has", lambda name, device: False)
