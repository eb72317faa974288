"""Finds the library of the CUDA kernels, or compiles it with the user's nvcc at first use, and
loads it.

A wheel may carry it (shipped.py). nvcc is the toolkit's, or that of NVIDIA's wheels next to
PyTorch's own. NVRTC, which comes with PyTorch,
would not do: it compiles device code only, and what chooses among the kernels and launches them is
C++ for the host. What is compiled here is kept in the user's cache under a hash of the sources and
the device's architecture.
"""

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch

from quantkit_kernels.compiled import cache_directory, compile_into, why_no_cache
from quantkit_kernels.cuda.abi import declare
from quantkit_kernels.cuda.shipped import library_name, origin_unit, shipped_library

_log = logging.getLogger(__name__)
SOURCES = Path(__file__).parent / "csrc"
_UNITS = tuple(sorted(SOURCES.rglob("*.cu")))
_HEADERS = tuple(sorted(SOURCES.rglob("*.cuh")))


def library_path(architecture: str) -> Path:
    """Where the library is that was compiled on this machine, or will be."""
    return cache_directory() / library_name(architecture, _digest())


def _found(architecture: str) -> Path | None:
    """The library that needs no compiling any more."""
    path = library_path(architecture)
    return path if path.exists() else shipped_library(architecture, _digest())


@functools.cache
def _digest() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in (*_UNITS, *_HEADERS))).hexdigest()[
        :16
    ]


def find_nvcc() -> str | None:
    found = shutil.which("nvcc")
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    return found or (str(home) if home.exists() else _nvcc_of_wheels())


def _nvcc_of_wheels() -> str | None:
    """That of NVIDIA's wheels, where all four are there."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for root in sorted(Path(folder).glob("cu*")):
            if all((root / part).exists() for part in _OF_WHEELS.values()):
                return str(root / _OF_WHEELS["nvidia-cuda-nvcc"])
    return None


_OF_WHEELS = {
    "nvidia-cuda-nvcc": "bin/nvcc",
    "nvidia-nvvm": "nvvm/bin/cicc",
    "nvidia-cuda-crt": "include/crt/host_config.h",
    "nvidia-cuda-cccl": "include/nv/target",
}
"""By wheel: a file that shows that it is installed."""


def why_no_library(architecture: str) -> str | None:
    """None where the library is there or can be compiled, else the reason and what helps."""
    if _found(architecture) is not None:
        return None
    if find_nvcc() is None:
        version = ".".join((torch.version.cuda or "13.0").split(".")[:2])
        wheels = " ".join(f"{name}=={version}.*" for name in _OF_WHEELS)
        return (
            "nvcc is not installed, and it compiles the kernels at first use: the CUDA "
            f"toolkit has it, or pip install {wheels}"
        )
    if shutil.which("g++") is None:
        return "g++ is not installed, and nvcc needs it to compile the kernels at first use"
    return why_no_cache()


def compile_library(architecture: str, folder: Path | None = None) -> Path:
    """Compile for an architecture such as "90". It takes about 20 s on 16 cores.

    folder: of a library for other machines, which brings libstdc++ along; by default it is for this
    one and goes to the user's cache.
    """
    target = (
        library_path(architecture)
        if folder is None
        else folder / library_name(architecture, _digest())
    )
    nvcc = find_nvcc()
    assert nvcc is not None, "nvcc was there when the backend was chosen"
    # "a": with the instructions that only this architecture has.
    target_flags = [
        "-gencode",
        f"arch=compute_{architecture}a,code=sm_{architecture}a",
        "--threads=0",
        "--split-compile=0",
    ]
    libraries = f"-L{Path(nvcc).parent.parent / 'lib'}"  # of wheels; a toolkit's nvcc knows its own
    host = "-fPIC" if folder is None else "-fPIC,-static-libstdc++"
    command = [
        nvcc,
        "-O3",
        "-std=c++20",
        f"-I{SOURCES}",
        *target_flags,
        "-shared",
        "-cudart=static",
        "-Xcompiler",
        host,
        libraries,
    ]
    with tempfile.TemporaryDirectory() as made:
        unit = Path(made) / "origin.cu"
        unit.write_text(origin_unit(_digest()))
        compile_into(target, command, (*_UNITS, unit))
    return target


@functools.cache
def library() -> ctypes.CDLL:
    major, minor = torch.cuda.get_device_capability()
    path = _found(f"{major}{minor}")
    if path is None:
        _log.warning("compiling the CUDA kernels, once on this machine: about 20 s on 16 cores")
        path = compile_library(f"{major}{minor}")
    loaded = ctypes.CDLL(str(path))
    declare(loaded)
    return loaded
