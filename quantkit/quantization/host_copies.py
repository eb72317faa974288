"""Tensors of a device copied to memory of the host that is kept: new memory of some GB, page by
page, takes longer than the copy."""

from collections.abc import Mapping

from torch import Tensor

from quantkit.checkpoint.host_memory import host_memory


class HostCopies:
    """Of tensors that come again under the same names, with other values. Beside a GPU the memory
    is page-locked."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies, contiguous; those of the call before are written over, or let go of where shape
        or dtype is another."""
        self._kept = {
            name: self._room(name, tensor).copy_(tensor.detach())
            for name, tensor in tensors.items()
        }
        return dict(self._kept)

    def _room(self, name: str, like: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is not None and kept.shape == like.shape and kept.dtype == like.dtype:
            return kept
        return host_memory(like.shape, like.dtype, like.device)
