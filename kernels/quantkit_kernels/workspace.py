"""Scratch memory of a device that launches share."""

import functools

import torch
from torch import Tensor


class Workspace:
    """Float32 partial sums, int32 counters that every launch leaves at zero, and room for sums that
    blocks hand over to one another, all of it -0 between launches.

    Launches that use it must be on one stream at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._partial = torch.empty(1 << 22, dtype=torch.float32, device=device)
        self._counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)
        self._handed_over = torch.full((1 << 20,), -0.0, dtype=torch.float32, device=device)
        self._outgrown: list[Tensor] = []
        """Kept, because captured graphs may hold their addresses."""

    def room(self, floats: int) -> tuple[Tensor, Tensor]:
        """Partial sums of at least `floats`, and the counters."""
        if self._partial.numel() < floats:
            self._outgrown.append(self._partial)
            self._partial = torch.empty(floats, dtype=torch.float32, device=self._partial.device)
        return self._partial, self._counters

    def room_for_sums(self, floats: int) -> Tensor:
        """At least `floats` times -0, which every launch leaves as they were
        (cuda/csrc/common/signals.cuh)."""
        if self._handed_over.numel() < floats:
            self._outgrown.append(self._handed_over)
            self._handed_over = torch.full(
                (floats,), -0.0, dtype=torch.float32, device=self._handed_over.device
            )
        return self._handed_over


@functools.cache
def _workspace_of(device: torch.device) -> Workspace:
    return Workspace(device)


def workspace(device: torch.device, floats: int) -> tuple[Tensor, Tensor]:
    """`Workspace.room` of the device's one workspace."""
    return _workspace_of(device).room(floats)


def room_for_sums(device: torch.device, floats: int) -> Tensor:
    """`Workspace.room_for_sums` of the device's one workspace."""
    return _workspace_of(device).room_for_sums(floats)
