"""Where nvcc is found, and what is said where it is not."""

import sys
from types import SimpleNamespace

import pytest
from quantkit_kernels.cuda import build


@pytest.fixture
def no_toolkit(tmp_path, monkeypatch):
    """Neither nvcc nor a cache; the folder that NVIDIA's wheels would be in."""
    monkeypatch.setattr(
        build.shutil, "which", lambda name: "/usr/bin/g++" if name == "g++" else None
    )
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: package)
    return tmp_path / "nvidia"


def test_nvcc_of_wheels_counts_when_all_four_are_there(no_toolkit):
    reason = build.why_no_library("90")
    assert "pip install nvidia-cuda-nvcc==" in reason
    for part in build._OF_WHEELS.values():
        assert build.find_nvcc() is None
        file = no_toolkit / "cu13" / part
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert build.find_nvcc() == str(no_toolkit / "cu13" / "bin" / "nvcc")
    assert build.why_no_library("90") is None


def test_nvcc_without_a_compiler_for_the_host_is_named(no_toolkit, monkeypatch):
    monkeypatch.setattr(
        build.shutil, "which", lambda name: sys.executable if name == "nvcc" else None
    )
    assert "g++" in str(build.why_no_library("90"))


def test_a_library_in_the_cache_needs_no_compiler(no_toolkit):
    path = build.library_path("90")
    path.parent.mkdir(parents=True)
    path.touch()
    assert build.why_no_library("90") is None
