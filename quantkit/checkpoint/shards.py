"""Bytes of stored tensors: a whole one, or the block of it that a rank needs.

Reading is pread into fresh memory and never mmap: what a caller drops is returned to the system, so
resident memory is what the caller holds. What goes to a device passes through the host in parts, so
that no tensor, however large, is whole in both.
"""

import os
import threading
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.header import TensorInfo, TensorPart, read_at
from quantkit.checkpoint.host_memory import host_memory
from quantkit.checkpoint.read_ahead import ReadAhead
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import open_file

CPU = torch.device("cpu")

SMALLEST_PIECE = 2048
"""Bytes of a row that are worth a read of their own. A disk brings the whole page of a smaller
piece anyway, and many small reads take longer than whole rows in one (4.2 us for 1 KiB, in which a
long read brings 4.7 KB: files in the page cache of a virtual machine)."""

BUFFER = 64 << 20
"""Bytes on their way to a device, or of rows that are read whole and cut, at a time."""

Block = tuple[tuple[int, int], ...]
"""Of each dimension, from where to where."""


class Shards:
    """The safetensors files of a directory, opened when first needed. bytes_read: of tensors, so
    far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self._ahead = ReadAhead()

    def read(
        self, info: TensorInfo, block: Block | None = None, device: torch.device = CPU
    ) -> Tensor:
        """The tensor, or a block of it, in its stored dtype on a device. Only a matrix is cut in
        more than its first dimension."""
        block = block or tuple((0, size) for size in info.shape)
        assert len(block) == len(info.shape), f"{info.name}: {block} of {info.shape}"
        assert all(0 <= start <= stop <= size for (start, stop), size in zip(block, info.shape)), (
            f"{info.name}: {block} of {info.shape}"
        )
        shape = tuple(stop - start for start, stop in block)
        if isinstance(info, TensorPart):
            return info.cut(self.read(info.whole, device=device))[
                tuple(slice(*ends) for ends in block)
            ].contiguous()
        if 0 in shape:
            return torch.empty(shape, dtype=info.dtype, device=device)
        if shape == info.shape and device != CPU:
            held = self._ahead.take(info)
            if held is not None:
                return held.to(device).view(info.dtype).view(shape)
        if shape[1:] == info.shape[1:]:
            skip = block[0][0] * (info.nbytes // info.shape[0]) if shape else 0
            return self._contiguous(info, shape, skip, device)
        assert len(shape) == 2, f"{info.name}: {block} of {info.shape}"
        return self._columns(info, block).view(info.dtype).to(device)

    def _contiguous(
        self, info: TensorInfo, shape: tuple[int, ...], skip: int, device: torch.device
    ) -> Tensor:
        tensor = torch.empty(shape, dtype=info.dtype, device=device)
        flat = tensor.view(-1).view(torch.uint8)
        if device == CPU:
            self._fill(info, flat, skip)
            return tensor
        buffer = host_memory((min(len(flat), BUFFER),), torch.uint8, device)
        for part in flat.split(BUFFER):
            self._fill(info, buffer[: len(part)], skip)
            part.copy_(buffer[: len(part)])
            skip += len(part)
        return tensor

    def _columns(self, info: TensorInfo, block: Block) -> Tensor:
        """Bytes uint8 [rows, piece] of a matrix's block."""
        (first, last), (left, right) = (
            block[0],
            tuple(column * info.dtype.itemsize for column in block[1]),
        )
        pitch = info.nbytes // info.shape[0]
        found = torch.empty(last - first, right - left, dtype=torch.uint8)
        if right - left >= SMALLEST_PIECE:
            for row, piece in enumerate(found, first):
                self._fill(info, piece, row * pitch + left)
            return found
        rows = torch.empty(min(max(BUFFER // pitch, 1), last - first), pitch, dtype=torch.uint8)
        for part in found.split(len(rows)):
            whole = rows[: len(part)]
            self._fill(info, whole.view(-1), first * pitch)
            part.copy_(whole[:, left:right])
            first += len(part)
        return found

    def _fill(self, info: TensorInfo, content: Tensor, skip: int) -> None:
        """content uint8 [n] from byte `skip` of the tensor on."""
        buffer = content.numpy().data
        if read_at(self.descriptor(info.shard), buffer, info.offset + skip) < len(buffer):
            raise QuantkitError(
                f"{self.path / info.shard} became shorter while it was read",
                "restore that file and run again",
            )
        with self._lock:
            self.bytes_read += len(buffer)

    def will_read(self, info: TensorInfo, device: torch.device = CPU) -> None:
        """Have a tensor brought from the disk while something else is done; what a device will be
        given, into memory."""
        os.posix_fadvise(
            self.descriptor(info.shard), info.offset, info.extent, os.POSIX_FADV_WILLNEED
        )
        if device != CPU and not isinstance(info, TensorPart):
            self._ahead.begin(info, partial(self._whole, info, device))

    def _whole(self, info: TensorInfo, device: torch.device) -> Tensor:
        """Bytes of a tensor, uint8 [n], on their way to a device."""
        content = host_memory((info.nbytes,), torch.uint8, device)
        self._fill(info, content, 0)
        return content

    def descriptor(self, shard: str) -> int:
        with self._lock:
            if shard not in self._descriptors:
                self._descriptors[shard] = open_file(self.path / shard, self.path)
            return self._descriptors[shard]

    def __del__(self) -> None:
        for descriptor in getattr(self, "_descriptors", {}).values():
            os.close(descriptor)
