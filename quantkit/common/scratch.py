"""Tensors in files, for what is larger than a host's memory.

They are mapped, and read and written as any tensor. Their files have no names: they take up the
disk of their folder while the tensor lives, and are gone with the process, however it ends. The
system takes mapped pages back when it needs memory, but counts them as the process's until then;
`give_back` returns them at once, so that what a process is seen to hold is its own.
"""

import mmap
import os
import tempfile
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.common.sizes import format_bytes

_mapped: WeakSet[mmap.mmap] = WeakSet()


def scratch_tensor(folder: Path, rows: int, width: int) -> Tensor:
    """float32 [rows, width] of zeros, on the disk of this folder. Raises QuantkitError if that has
    no room for it."""
    size = rows * width * 4
    if not size:
        return torch.zeros(rows, width)
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            if hasattr(os, "posix_fallocate"):  # else a full disk ends the process later
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
        except OSError as error:
            raise QuantkitError(
                f"{folder} has no room for {format_bytes(size)} of hidden states: {error.strerror}",
                "free it, or give fewer --samples, or --memory in which they fit",
            ) from error
        mapped = mmap.mmap(file.fileno(), size)
    _mapped.add(mapped)
    return torch.frombuffer(mapped, dtype=torch.float32).view(rows, width)


def give_back() -> None:
    """Return the mapped pages of all such tensors, which keep their values."""
    for one in list(_mapped):
        one.madvise(mmap.MADV_DONTNEED)
