"""Libraries that are compiled at first use: where they are kept, and what is said where they cannot
be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from quantkit_kernels.compiled import cache_directory, why_no_cache
from quantkit_kernels.cpu import build

COMPUTES = """
import torch
from quantkit_kernels import prepare
from quantkit_kernels.samples import distance, exact_linear, random_weight
for grid in ("int8", "fp4", "int4-asym-128"):
    weight, x = random_weight(grid, 128, 256, torch.Generator().manual_seed(0)), torch.randn(200, 256).bfloat16()
    for rows in (x, x[:2]):
        assert distance(prepare(weight, dtype=torch.bfloat16)(rows), exact_linear(rows, weight)) < 0.02, grid
"""


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path, monkeypatch):
    """A file stands where the cache would be: as on a read-only file system, nothing can be made
    there."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert str(why_no_cache()).startswith(f"{tmp_path}/file/quantkit cannot be written")
    if build._compiler() is None or build.level() == "PORTABLE":
        pytest.skip("there is another reason here")
    assert build.why_no_library("int8") == why_no_cache()
    subprocess.run([sys.executable, "-c", COMPUTES], env=dict(os.environ), check=True)


def test_a_cache_that_can_be_made_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "yet"))
    assert why_no_cache() is None
    assert not (tmp_path / "not").exists()


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(
        os.path, "expanduser", lambda path: path
    )  # as it answers where passwd does not have the user
    assert cache_directory() == Path("/nonexistent/.cache/quantkit")
