"""Memory of the host for what comes from a device, or goes to one."""

from collections.abc import Sequence

import torch
from torch import Tensor


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized. Beside a GPU it is page-locked: to and from what is not, CUDA copies a tenth
    as fast, by a buffer of its own. What was let go of is used again."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")
