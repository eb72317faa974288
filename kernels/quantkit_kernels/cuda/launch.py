"""What every launch of a kernel needs besides its tensors: the stream, the workspace, and the check of what it returned."""

import functools

import torch
from torch import Tensor

FORMATS = {"int4": 0, "fp4": 1, "int8": 2}
DTYPES = {torch.bfloat16: 0, torch.float16: 1}
CODES = {torch.int8: 0, torch.float8_e4m3fn: 1}
"""Of a cache in 8 bits."""
STORE, SILU_MUL, WEIGH = range(3)
"""`Epilogue` of common/packed.cuh: what becomes of a product."""


class Workspace:
    """Scratch memory of one device: float32 partial sums, and int32 counters that every launch leaves at zero.

    Launches that use it must be on one stream at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._partial = torch.empty(1 << 22, dtype=torch.float32, device=device)
        self._counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []
        """Kept, because captured graphs may hold their addresses."""

    def room(self, floats: int) -> tuple[Tensor, Tensor]:
        """Partial sums of at least `floats`, and the counters."""
        if self._partial.numel() < floats:
            self._outgrown.append(self._partial)
            self._partial = torch.empty(floats, dtype=torch.float32, device=self._partial.device)
        return self._partial, self._counters


@functools.cache
def _workspace_of(device: torch.device) -> Workspace:
    return Workspace(device)


def workspace(device: torch.device, floats: int) -> tuple[Tensor, Tensor]:
    """`Workspace.room` of the device's one workspace."""
    return _workspace_of(device).room(floats)


def stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def checked(error: int) -> None:
    assert error == 0, f"CUDA error {error} at launch"
