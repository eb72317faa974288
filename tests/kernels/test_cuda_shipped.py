"""A wheel's compiled library: which one is taken, and the wheel that carries it. Libraries of these
tests do nothing: g++ makes them."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from quantkit_kernels.cuda import build, shipped
from quantkit_kernels.cuda.abi import FUNCTIONS

ROOT = Path(__file__).parents[2]
DIGEST = "0123456789abcdef"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ makes the libraries")


def make_library(path, digest=DIGEST, functions=tuple(FUNCTIONS)):
    """What compile_library would make, but for the kernels. Its toolkit is CUDA 13."""
    source = shipped.origin_unit(digest) + "".join(
        f'extern "C" void {name}() {{}}\n' for name in functions
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [
        "g++",
        "-shared",
        "-fPIC",
        "-D__CUDACC_VER_MAJOR__=13",
        "-x",
        "c++",
        "-",
        "-o",
        str(path),
    ]
    subprocess.run(command, input=source, text=True, check=True)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_library(tmp_path_factory.mktemp("libraries") / shipped.library_name("90", DIGEST))


@pytest.fixture(autouse=True)
def _driver(monkeypatch):
    monkeypatch.setattr(shipped, "driver_version", lambda: 13020)
    shipped.shipped_library.cache_clear()
    yield
    shipped.shipped_library.cache_clear()


def test_a_library_of_these_sources_is_taken_and_nothing_compiles(whole, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_digest", lambda: DIGEST)
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert "nvcc is not installed" in str(build.why_no_library("90"))
    shipped.shipped_library.cache_clear()
    monkeypatch.setattr(
        build,
        "shipped_library",
        lambda architecture, digest: shipped.shipped_library(architecture, digest, whole.parent),
    )
    assert build.why_no_library("90") is None
    assert "nvcc is not installed" in str(build.why_no_library("100"))
    monkeypatch.setattr(build.torch.cuda, "get_device_capability", lambda: (9, 0))
    build.library.cache_clear()
    assert Path(build.library()._name) == whole
    build.library.cache_clear()


@pytest.mark.parametrize("driver", [12090, 13000, 14000, None])
def test_the_driver_must_run_what_the_toolkit_made(whole, driver, monkeypatch, caplog):
    monkeypatch.setattr(shipped, "driver_version", lambda: driver)
    taken = shipped.shipped_library("90", DIGEST, whole.parent)
    assert (taken is None) == (driver == 12090)
    assert ("needs a driver for CUDA 13, and this one is for 12.9" in caplog.text) == (
        driver == 12090
    )


def test_a_library_of_other_sources_is_named_and_left(whole, tmp_path, caplog):
    """By its name, or renamed."""
    now = "fedcba9876543210"
    assert shipped.shipped_library("90", now, whole.parent) is None
    shutil.copy(whole, tmp_path / shipped.library_name("90", now))
    assert shipped.shipped_library("90", now, tmp_path) is None
    assert caplog.text.count(f"it was made from other sources ({DIGEST}, not {now})") == 2


def test_what_is_no_whole_library_is_named_and_left(tmp_path, caplog):
    make_library(tmp_path / shipped.library_name("90", DIGEST), functions=tuple(FUNCTIONS)[:-1])
    assert shipped.shipped_library("90", DIGEST, tmp_path) is None
    assert list(FUNCTIONS)[-1] in caplog.text
    (tmp_path / shipped.library_name("100", DIGEST)).write_bytes(b"no library")
    assert shipped.shipped_library("100", DIGEST, tmp_path) is None
    assert "it cannot be loaded" in caplog.text


def test_a_wheel_carries_the_library_and_says_for_which_machines_it_is(whole, tmp_path):
    pytest.importorskip("hatchling", reason="hatchling builds the wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"QUANTKIT_LIBRARIES": str(whole.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert re.search(r"-py3-none-manylinux_2_\d+_x86_64\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as held:
        assert held.read(f"quantkit_kernels/cuda/libraries/{whole.name}") == whole.read_bytes()
    none = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"QUANTKIT_LIBRARIES": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert none.returncode != 0
    assert "no kernels-*.so" in none.stderr
