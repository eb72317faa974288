"""The Ascend C sources of kernels/ascendc compiled for a CPU, and their NumPy twins."""

import ctypes
import subprocess
from pathlib import Path

import torch
from ascend.guard import run_guarded
from imported import module_at

SOURCES = Path(__file__).parents[2] / "kernels" / "ascendc"
CPU = Path(__file__).with_name("ascendc_on_cpu")
ORDERS = range(4)
"""Which cores let others run when they set a flag: none, vector cores (1), cube cores (2), both
(3)."""


def twin(name):
    """kernels/ascendc/NAME.py, which is no package's."""
    return module_at(SOURCES / f"{name}.py")


def compiled(source, folder):
    """A source with `launch` over the CPU's version of Ascend C."""
    library = folder / f"{source.stem}.so"
    options = ["-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    folders = ["-I", str(CPU), "-I", str(SOURCES)]
    subprocess.run(["g++", *options, *folders, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def launch(kernel, cores, order, operands, sizes):
    """One launch, the operands between guard pages; what breaks a rule of the headers ends the
    process that runs it.

    order: one of ORDERS; rules.cpp takes another choice for it.
    """

    run_guarded(lambda pointers: _run(kernel, cores, order, pointers, sizes), operands)


def _run(kernel, cores, order, pointers, sizes):
    addresses = (ctypes.c_void_p * len(pointers))(*pointers)
    numbers = (ctypes.c_uint32 * len(sizes))(*sizes)
    kernel.launch(ctypes.c_uint32(cores), ctypes.c_uint32(order), addresses, numbers)


def hbm_read(kernel, cores, parts, operands, sizes):
    """Bytes that the parts of so many cores read of the HBM in one launch."""
    _run(kernel, cores, 0, [one.data_ptr() for one in operands], sizes)
    counts = [(ctypes.c_uint64 * 8)() for _ in range(parts)]  # Counts of the CPU's version
    assert all(kernel.counts_of(part, ctypes.byref(one)) for part, one in enumerate(counts))
    return sum(one[2] for one in counts)


def poison(*shape, dtype):
    """Memory that nobody wrote: NaN in every float."""
    return torch.full((*shape, dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype).squeeze(-1)
