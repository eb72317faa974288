"""Compiles the CUDA sources with the user's nvcc at first use and loads the library.

The library is kept in the user's cache under a hash of the sources and the device's architecture.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
from pathlib import Path

import torch

from quantkit_kernels.compiled import cache_directory, compile_into
from quantkit_kernels.cuda.abi import declare

_log = logging.getLogger(__name__)
SOURCES = Path(__file__).parent / "csrc"
_UNITS = tuple(sorted(SOURCES.rglob("*.cu")))
_HEADERS = tuple(sorted(SOURCES.rglob("*.cuh")))


def library_path(architecture: str) -> Path:
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*_UNITS, *_HEADERS))).hexdigest()[:16]
    return cache_directory() / f"kernels-{architecture}-{digest}.so"


def find_nvcc() -> str | None:
    found = shutil.which("nvcc")
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    return found or (str(home) if home.exists() else None)


def compile_library(architecture: str) -> Path:
    """Compile for an architecture such as "90". It takes about 20 s on 16 cores."""
    target = library_path(architecture)
    nvcc = find_nvcc()
    assert nvcc is not None, "nvcc was there when the backend was chosen"
    # "a": with the instructions that only this architecture has.
    target_flags = ["-gencode", f"arch=compute_{architecture}a,code=sm_{architecture}a", "--threads=0", "--split-compile=0"]
    command = [nvcc, "-O3", "-std=c++20", f"-I{SOURCES}", *target_flags, "-shared", "-Xcompiler", "-fPIC"]
    compile_into(target, command, _UNITS)
    return target


@functools.cache
def library() -> ctypes.CDLL:
    major, minor = torch.cuda.get_device_capability()
    path = library_path(f"{major}{minor}")
    if not path.exists():
        _log.warning("compiling the CUDA kernels, once on this machine: about 20 s on 16 cores")
        compile_library(f"{major}{minor}")
    loaded = ctypes.CDLL(str(path))
    declare(loaded)
    return loaded
