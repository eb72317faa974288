"""Compiles the CUDA sources with the user's nvcc at first use and loads them.

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

_log = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent
_SOURCES = tuple(sorted(_FOLDER.glob("*.cu")))
_HEADERS = tuple(sorted(_FOLDER.glob("*.cuh")))


class Params(ctypes.Structure):
    """Params of params.cuh, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "scales", "zeros", "row_scale", "x", "x_scale", "out", "ids", "pair_weights")),
        *((name, ctypes.c_void_p) for name in ("partial", "arrived")),
        *(
            (name, ctypes.c_int)
            for name in ("ids_stride", "pairs", "top_k", "by_expert", "m", "n", "k", "out_n", "wn", "split", "epilogue")
        ),
    ]


class Matrix(ctypes.Structure):
    """Matrix of experts_params.cuh, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "scales", "zeros", "row_scale")),
        *((name, ctypes.c_int) for name in ("n", "k")),
    ]


class ExpertsParams(ctypes.Structure):
    """ExpertsParams of experts_params.cuh, field by field."""

    _fields_ = [
        *((name, Matrix) for name in ("gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("x", "between", "out", "ids", "pair_weights", "done")),
        *((name, ctypes.c_int) for name in ("ids_stride", "pairs", "top_k", "experts")),
    ]


class TileParams(ctypes.Structure):
    """TileParams of tile_params.cuh, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "scales", "zeros", "row_scale", "x", "x_scale", "out")),
        *((name, ctypes.c_void_p) for name in ("tile_expert", "tile_count", "order", "pair_weights")),
        *((name, ctypes.c_int) for name in ("tiles", "m", "n", "k", "out_n", "split", "epilogue")),
    ]


class Shares(ctypes.Structure):
    """`Shares` of tile_share.cuh."""

    _fields_ = [("partial", ctypes.c_void_p), ("arrived", ctypes.c_void_p), ("parts", ctypes.c_int)]


class Route(ctypes.Structure):
    """Route of route.cu, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("bias", "ids", "weights")),
        *((name, ctypes.c_int) for name in ("experts", "top_k", "n_group", "topk_group", "softmax", "normalize", "shared")),
        ("scale", ctypes.c_float),
    ]


class GqaPrepare(ctypes.Structure):
    """GqaPrepare of gqa_prepare.cu, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "q_norm", "k_norm", "cosines", "sines", "slots", "q", "keys", "values")),
        *((name, ctypes.c_int) for name in ("tokens", "heads", "kv_heads", "d", "rope", "interleaved")),
        ("eps", ctypes.c_float),
    ]


class GqaDecode(ctypes.Structure):
    """GqaDecode of gqa_decode.cu, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "table", "lengths", "out", "partial", "arrived")),
        *((name, ctypes.c_int) for name in ("table_stride", "lengths_stride", "table_width", "block_size", "rows", "kv_heads")),
        *((name, ctypes.c_int) for name in ("shared", "d", "window", "blocks", "least_tiles")),
        ("scale", ctypes.c_float),
    ]


def library_path(architecture: str) -> Path:
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*_SOURCES, *_HEADERS))).hexdigest()[:16]
    return cache_directory() / f"kernels-{architecture}-{digest}.so"


def find_nvcc() -> str | None:
    found = shutil.which("nvcc")
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    return found or (str(home) if home.exists() else None)


def compile_library(architecture: str) -> Path:
    """Compile for an architecture such as "90"; about half a minute."""
    target = library_path(architecture)
    nvcc = find_nvcc()
    assert nvcc is not None, "nvcc was there when the backend was chosen"
    # "a": with the instructions that only this architecture has.
    target_flags = ["-gencode", f"arch=compute_{architecture}a,code=sm_{architecture}a", "--threads=0", "--split-compile=0"]
    compile_into(target, [nvcc, "-O3", "-std=c++20", *target_flags, "-shared", "-Xcompiler", "-fPIC"], _SOURCES)
    return target


@functools.cache
def library() -> ctypes.CDLL:
    major, minor = torch.cuda.get_device_capability()
    path = library_path(f"{major}{minor}")
    if not path.exists():
        _log.warning("compiling the CUDA kernels, once on this machine: about half a minute")
        compile_library(f"{major}{minor}")
    loaded = ctypes.CDLL(str(path))
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    loaded.qk_stream_gemm.argtypes = [ctypes.POINTER(Params), *[integer] * 7, pointer]
    loaded.qk_wide_gemm.argtypes = [ctypes.POINTER(Params), *[integer] * 4, pointer]
    loaded.qk_tile_gemm.argtypes = [ctypes.POINTER(TileParams), *[integer] * 5, pointer]
    loaded.qk_shared_tiles.argtypes = [ctypes.POINTER(TileParams), ctypes.POINTER(Shares), *[integer] * 5, pointer]
    loaded.qk_persistent_int8.argtypes = [ctypes.POINTER(TileParams), *[integer] * 5, pointer]
    loaded.qk_arrange.argtypes = [*[pointer] * 4, *[integer] * 4, pointer]
    loaded.qk_quantize_arranged.argtypes = [*[pointer] * 5, *[integer] * 5, pointer]
    loaded.qk_sort_pairs.argtypes = [pointer, *[integer] * 5, *[pointer] * 4]
    loaded.qk_expand.argtypes = [ctypes.POINTER(Params), *[integer] * 3, pointer, pointer]
    loaded.qk_stream_experts.argtypes = [ctypes.POINTER(ExpertsParams), *[integer] * 4, pointer]
    loaded.qk_sum_pairs.argtypes = [pointer, pointer, *[integer] * 4, pointer, integer, pointer]
    loaded.qk_quantize_rows.argtypes = [pointer, pointer, pointer, *[integer] * 3, pointer]
    loaded.qk_add_rms_norm.argtypes = [*[pointer] * 5, *[integer] * 3, ctypes.c_float, pointer]
    loaded.qk_silu_and_mul.argtypes = [pointer, pointer, *[integer] * 3, pointer]
    loaded.qk_rope.argtypes = [*[pointer] * 5, *[integer] * 6, ctypes.c_int64, ctypes.c_int64, pointer]
    loaded.qk_route.argtypes = [pointer, integer, integer, ctypes.POINTER(Route), pointer]
    loaded.qk_moe_gate.argtypes = [pointer, pointer, integer, integer, pointer, pointer, ctypes.POINTER(Route), pointer]
    loaded.qk_mla_prepare.argtypes = [*[pointer] * 8, *[integer] * 6, ctypes.c_float, pointer]
    loaded.qk_mla_decode.argtypes = [
        *[pointer] * 6,
        *(integer, integer, pointer, integer),  # of the block table and the lengths
        *[pointer] * 4,
        *[integer] * 6,
        *(ctypes.c_float, pointer),
    ]
    loaded.qk_gqa_prepare.argtypes = [ctypes.POINTER(GqaPrepare), integer, pointer]
    loaded.qk_gqa_decode.argtypes = [ctypes.POINTER(GqaDecode), integer, pointer]
    return loaded
