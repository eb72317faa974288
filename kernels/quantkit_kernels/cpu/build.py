"""Compiles fp4.cpp with the user's C++ compiler at first use, two seconds, and loads it."""

import ctypes
import functools
import hashlib
import os
import shutil
from pathlib import Path

import torch

from quantkit_kernels.compiled import cache_directory, compile_into

_SOURCE = Path(__file__).parent / "fp4.cpp"
_FLAGS = {"AVX2": ("-mavx2", "-mfma"), "AVX512": ("-mavx512f", "-mfma")}


def why_no_library() -> str | None:
    """None where the library is there or can be made."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _FLAGS:
        return f"needs AVX2 or AVX-512, torch finds {capability} here"
    if _compiler() is None and not _library_path(capability).exists():
        return "no C++ compiler is installed (c++, g++ or $CXX), and it compiles the kernel at first use"
    return None


@functools.cache
def library() -> ctypes.CDLL:
    capability = torch.backends.cpu.get_cpu_capability()
    path = _library_path(capability)
    if not path.exists():
        compiler = _compiler()
        assert compiler is not None, "it was there when the backend was chosen"
        # OpenMP's runtime is the one that torch has loaded, so that the two share their threads.
        compile_into(path, [compiler, "-O3", "-std=c++17", *_FLAGS[capability], "-fopenmp", "-shared", "-fPIC"], [_SOURCE])
    loaded = ctypes.CDLL(str(path))
    loaded.qk_fp4_linear.argtypes = [*[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4]
    loaded.qk_fp4_expand.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int] * 4]
    for function in (loaded.qk_fp4_linear, loaded.qk_fp4_expand):
        function.restype = None
    return loaded


def _compiler() -> str | None:
    return next((found for name in (os.environ.get("CXX"), "c++", "g++") if name and (found := shutil.which(name))), None)


def _library_path(capability: str) -> Path:
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    return cache_directory() / f"fp4-{capability.lower()}-{digest}.so"
