"""Compiles one of the C++ files next to it with the user's C++ compiler at first use, some seconds,
and loads it."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path

import torch

from quantkit_kernels.compiled import cache_directory, compile_into, why_no_cache
from quantkit_kernels.recording import recorded

_FLAGS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mfma"),
    "VNNI": ("-mavx512f", "-mfma", "-mavx512bw", "-mavx512vnni"),
    "PORTABLE": (),
    "DOTPROD": ("-march=armv8.2-a+dotprod",),
    "I8MM": ("-march=armv8.2-a+dotprod+i8mm",),
    "BF16": ("-mavx512f", "-mfma", "-mavx512bw", "-mavx512vnni", "-mavx512bf16"),
}
_LEVELS = {
    "fp4": ("AVX2", "AVX512", "VNNI"),
    "gram": ("BF16",),
    "int8_experts": ("VNNI",),
    **dict.fromkeys(
        ("dense", "int4_rows"),
        ("AVX2", "AVX512", "VNNI", "BF16", "PORTABLE", "DOTPROD", "I8MM"),
    ),
    **dict.fromkeys(
        (
            *("gqa", "int4", "int8", "nearest", "norm", "prompts", "repeat", "round_block"),
            *("silu", "w8a16"),
        ),
        ("AVX2", "AVX512", "VNNI", "PORTABLE", "DOTPROD", "I8MM"),
    ),
}
"""Which processors each source is for."""
_FUNCTIONS: dict[str, dict[str, tuple[int, ...]]] = {
    "dense": {"qk_dense_rows": (3, 5)},
    "fp4": {"qk_fp4_linear": (5, 4), "qk_fp4_expand": (4, 4)},
    "gram": {"qk_gram_words": (2, 4), "qk_gram_add": (2, 5)},
    "int4": {"qk_int4_expand": (4, 8)},
    "int4_rows": {"qk_int4_rows": (4, 8)},
    "int8": {"qk_int8_rows": (4, 5), "qk_int8_blocks": (5, 6), "qk_int8_quantize": (3, 4)},
    "int8_experts": {"qk_int8_experts": (5, 9)},
    "gqa": {"qk_gqa_decode": (9, 10, 1)},
    "nearest": {"qk_extremes": (2, 8), "qk_best_scale": (6, 14), "qk_nearest": (4, 11)},
    "norm": {"qk_rms_norm": (5, 5, 1), "qk_rotate": (4, 7), "qk_gqa_prepare": (9, 8, 1)},
    "prompts": {"qk_prompt_attend": (6, 9)},
    "repeat": {"qk_repeat": (1, 1)},
    "round_block": {"qk_round_block": (10, 13)},
    "silu": {"qk_silu_and_mul": (2, 4), "qk_silu_and_rotate": (2, 5)},
    "w8a16": {"qk_w8a16_linear": (4, 5)},
}
"""Of each library, and how many pointers, then integers, then numbers they take. Blocks are for
VNNI alone."""


_HEADERS = {
    **dict.fromkeys(("dense", "gqa", "int4_rows", "norm", "prompts", "w8a16"), ("vectors.h",)),
    **dict.fromkeys(("nearest", "round_block"), ("levels.h", "vectors.h")),
    "silu": ("silu.h", "vectors.h"),
    "int8": ("int8.h",),
    "int8_experts": ("int8.h", "silu.h", "vectors.h"),
}
"""What each source includes of this folder."""
_OPTIONS = {"nearest": ("-ffp-contract=off",)}
"""Of the compiler, for sources that promise PyTorch's bits."""


def level() -> str:
    """What this processor has, of _FLAGS, bfloat16 left out."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512" and torch.cpu._is_vnni_supported():
        return "VNNI"
    if capability in _FLAGS:
        return capability
    return _arm_level() if platform.machine() == "aarch64" else "PORTABLE"


@functools.cache
def _arm_level() -> str:
    """By what Linux says of an aarch64 processor (AT_HWCAP and AT_HWCAP2)."""
    if sys.platform != "linux":
        return "PORTABLE"
    said = ctypes.CDLL(None).getauxval
    said.argtypes, said.restype = (ctypes.c_ulong,), ctypes.c_ulong
    if not said(16) >> 20 & 1:
        return "PORTABLE"
    return "I8MM" if said(26) >> 13 & 1 else "DOTPROD"


def level_of(name: str) -> str:
    """What `name`.cpp is compiled for here."""
    here = level()
    return (
        "BF16"
        if here == "VNNI" and "BF16" in _LEVELS[name] and torch.cpu._is_avx512_bf16_supported()
        else here
    )


def why_no_library(name: str) -> str | None:
    """None where the library of `name`.cpp is there or can be made."""
    if level_of(name) not in _LEVELS[name]:
        return f"needs AVX2 or AVX-512, torch finds {torch.backends.cpu.get_cpu_capability()} here"
    if sys.platform != "linux":
        return f"is compiled on Linux only, not on {sys.platform}"
    if _library_path(name, level_of(name)).exists():
        return None
    if _compiler() is None:
        return (
            "no C++ compiler is installed (c++, g++ or $CXX), and it compiles the kernel at "
            "first use"
        )
    return why_no_cache()


def library(name: str) -> ctypes.CDLL:
    return _loaded(name, level_of(name))


@functools.cache
def once(name: str) -> ctypes.CDLL | None:
    """The library, None where there is none. Found once a process: for what is called hundreds of
    times a step."""
    return library(name) if why_no_library(name) is None else None


@functools.cache
def _loaded(name: str, level: str) -> ctypes.CDLL:
    path = _library_path(name, level)
    if not path.exists():
        compiler = _compiler()
        assert compiler is not None, "it was there when the backend was chosen"
        # OpenMP's runtime is the one that torch has loaded, so that the two share their threads.
        compile_into(
            path,
            [
                *(compiler, "-O3", "-std=c++17", *_FLAGS[level], *_OPTIONS.get(name, ())),
                *("-fopenmp", "-shared", "-fPIC"),
            ],
            [_source(name)],
        )
    loaded = ctypes.CDLL(str(path))
    for function, counts in _FUNCTIONS[name].items():
        if hasattr(loaded, function):
            compiled = getattr(loaded, function)
            kinds = zip((ctypes.c_void_p, ctypes.c_int, ctypes.c_float), counts)
            compiled.argtypes = [kind for kind, count in kinds for _ in range(count)]
            compiled.restype = None
            setattr(loaded, function, recorded(compiled))
    return loaded


def _compiler() -> str | None:
    return next(
        (
            found
            for name in (os.environ.get("CXX"), "c++", "g++")
            if name and (found := shutil.which(name))
        ),
        None,
    )


def _source(name: str) -> Path:
    return Path(__file__).parent / f"{name}.cpp"


def _library_path(name: str, level: str) -> Path:
    made_from = b"".join(
        path.read_bytes()
        for path in (
            _source(name),
            *(Path(__file__).parent / header for header in _HEADERS.get(name, ())),
        )
    )
    digest = hashlib.sha256(made_from).hexdigest()[:16]
    return cache_directory() / f"{name}-{level.lower()}-{digest}.so"
