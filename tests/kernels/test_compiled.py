"""Libraries that are compiled at first use: where they are kept, and that torch does the work where
they cannot be."""

import os
from pathlib import Path

import pytest
import torch
from quantkit_kernels import backends, prepare, silu_and_mul
from quantkit_kernels.compiled import cache_directory, why_no_cache
from quantkit_kernels.cpu import build
from quantkit_kernels.samples import TOLERANCE, distance, exact_linear, random_weight


@pytest.fixture(params=["compiler", "cache"])
def lacking(request, tmp_path, monkeypatch):
    """What there is none of. A file stands where the cache would be: as on a read-only file system,
    nothing can be made there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
    else:
        if build._compiler() is None or build.level() == "PORTABLE":
            pytest.skip("there is another reason here")
        (tmp_path / "cache").touch()
        assert str(why_no_cache()).startswith(f"{tmp_path}/cache/quantkit cannot be written")
    for forget in (backends.forget, build.once.cache_clear):
        forget()
    yield request.param
    for forget in (backends.forget, build.once.cache_clear):
        forget()


def test_without_libraries_torch_does_it_all(lacking, tmp_path, monkeypatch):
    assert lacking in str(build.why_no_library("int8"))
    monkeypatch.setattr("quantkit_kernels.cpu.functional._ROWS_BYTES", 3 * 4 * 256)  # in parts
    rng, before = torch.Generator().manual_seed(0), list(tmp_path.iterdir())
    x = torch.randn(200, 256, generator=rng).bfloat16()
    for grid in ("int8", "w8a16-32", "int4-asym-128", "fp4"):
        weight = random_weight(grid, 48, 256, rng)
        linear = prepare(weight, dtype=torch.bfloat16)
        assert linear.backend == ("reference" if grid == "fp4" else "cpu")
        for rows in (x, x[:1]):
            found = distance(linear(rows), exact_linear(rows, weight))
            assert found < TOLERANCE[torch.bfloat16], grid
        assert torch.equal(silu_and_mul(x, backend="cpu"), silu_and_mul(x, backend="reference"))
    assert list(tmp_path.iterdir()) == before


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
