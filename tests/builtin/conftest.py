"""Paths of the built-in model, and the tools that made it on the import path."""

import sys
from pathlib import Path

import pytest

from quantkit.common.assets import builtin_model

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools" / "tiny_r1"))


@pytest.fixture(scope="session")
def tiny_r1():
    return builtin_model("tiny-r1")
