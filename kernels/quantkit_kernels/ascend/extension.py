"""The Ascend C kernels as operators of torch, where their library was built: `make ascendc`, on a
machine with CANN and torch_npu.

The library is looked for in the user's cache, or where $QUANTKIT_ASCENDC says. Without it the
Triton kernels do the work.
"""

import functools
import os
from pathlib import Path

import torch

from quantkit_kernels.compiled import cache_directory
from quantkit_kernels.torch_npu.calls import has_kernel

LIBRARY = "libquantkit_ascendc_torch.so"
NAMESPACE = "quantkit_ascendc"


def has(name: str, device: torch.device) -> bool:
    """Whether tensors on `device` can be given to torch.ops.quantkit_ascendc.NAME."""
    if device.type == "npu":
        _load()
    return has_kernel(name, device, NAMESPACE)


def library() -> Path:
    """Where the library is looked for."""
    return Path(os.environ.get("QUANTKIT_ASCENDC") or cache_directory() / "ascendc" / LIBRARY)


@functools.cache
def _load() -> None:
    path = library()
    if path.exists():
        torch.ops.load_library(str(path))
    elif "QUANTKIT_ASCENDC" in os.environ:
        raise ValueError(
            f"QUANTKIT_ASCENDC names {path}, which does not exist: build it with `make ascendc`, "
            "or unset the variable"
        )
