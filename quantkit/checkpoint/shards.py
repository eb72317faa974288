"""The bytes of tensors: stored ones read, whole or the block of one that a rank needs; and those
that will be written, on the host and hashed.

Reading is pread into fresh memory and never mmap, so that freed tensors are returned to the system
and resident memory is what the caller holds. Tensors for a device pass through the host in parts,
so that no tensor, however large, is whole in both memories.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.header import TensorInfo, TensorSlice, bytes_of, read_at
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import open_file

CPU = torch.device("cpu")

SMALLEST_PIECE = 2048
"""Bytes of a row from which a separate read pays off. The disk reads whole pages anyway, and many
small reads take longer than reading whole rows at once (4.2 us for 1 KiB, in which a long read
returns 4.7 KB: files in the page cache of a virtual machine)."""

BUFFER = 64 << 20
"""Bytes in flight to a device, or of whole rows read to be cut, at a time."""

PINNED = 128 * 2**20
"""Bytes of the largest device tensor that is copied to page-locked memory."""

Block = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension."""


class StoredTensor:
    """A tensor that is copied from its file in parts, for it may be larger than the memory."""

    def __init__(self, shards: "Shards", info: TensorInfo) -> None:
        self._shards, self._info = shards, info
        self.dtype, self.shape, self.nbytes = info.dtype, info.shape, info.nbytes

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes; each part is overwritten by the next."""
        buffer = torch.empty(min(BUFFER, self.nbytes), dtype=torch.uint8)
        for start in range(0, self.nbytes, BUFFER):
            part = buffer[: self.nbytes - start]
            self._shards.fill(self._info, part, start)
            yield part.numpy().data


Content = Tensor | StoredTensor
"""What is written as a tensor; the latter is copied from its file in parts."""


class Shards:
    """The safetensors files of a directory, opened on first use. bytes_read: total bytes of tensors
    read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self._ahead = ReadAhead()

    def read(
        self, info: TensorInfo, block: Block | None = None, device: torch.device = CPU
    ) -> Tensor:
        """The tensor, or a block of it, in its stored dtype on a device. Only a matrix can be cut
        along more than its first dimension."""
        block = block or tuple((0, size) for size in info.shape)
        assert len(block) == len(info.shape), f"{info.name}: {block} of {info.shape}"
        assert all(0 <= start <= stop <= size for (start, stop), size in zip(block, info.shape)), (
            f"{info.name}: {block} of {info.shape}"
        )
        shape = tuple(stop - start for start, stop in block)
        if isinstance(info, TensorSlice):
            return info.select(self.read(info.base, device=device))[
                tuple(slice(*bounds) for bounds in block)
            ].contiguous()
        if 0 in shape:
            return torch.empty(shape, dtype=info.dtype, device=device)
        if shape == info.shape and device != CPU:
            read = self._ahead.take(info)
            if read is not None:
                return read.to(device).view(info.dtype).view(shape)
        if shape[1:] == info.shape[1:]:
            skip = block[0][0] * (info.nbytes // info.shape[0]) if shape else 0
            return self._contiguous(info, shape, skip, device)
        assert len(shape) == 2, f"{info.name}: {block} of {info.shape}"
        return self._columns(info, block).view(info.dtype).to(device)

    def read_rows(self, info: TensorInfo, numbers: Sequence[int]) -> Tensor:
        """Some rows of a matrix, one read each."""
        found = torch.empty(len(numbers), *info.shape[1:], dtype=info.dtype)
        pitch = info.nbytes // info.shape[0]
        for row, number in zip(found.view(len(numbers), -1).view(torch.uint8), numbers):
            self.fill(info, row, number * pitch)
        return found

    def _contiguous(
        self, info: TensorInfo, shape: tuple[int, ...], skip: int, device: torch.device
    ) -> Tensor:
        tensor = torch.empty(shape, dtype=info.dtype, device=device)
        flat = tensor.view(-1).view(torch.uint8)
        if device == CPU:
            self.fill(info, flat, skip)
            return tensor
        buffer = host_memory((min(len(flat), BUFFER),), torch.uint8, device)
        for part in flat.split(BUFFER):
            self.fill(info, buffer[: len(part)], skip)
            part.copy_(buffer[: len(part)])
            skip += len(part)
        return tensor

    def _columns(self, info: TensorInfo, block: Block) -> Tensor:
        """Bytes uint8 [rows, width] of a block of a matrix."""
        first, last = block[0]
        left, right = tuple(column * info.dtype.itemsize for column in block[1])
        pitch = info.nbytes // info.shape[0]
        found = torch.empty(last - first, right - left, dtype=torch.uint8)
        if right - left >= SMALLEST_PIECE:
            for row, piece in enumerate(found, first):
                self.fill(info, piece, row * pitch + left)
            return found
        rows = torch.empty(min(max(BUFFER // pitch, 1), last - first), pitch, dtype=torch.uint8)
        for part in found.split(len(rows)):
            whole = rows[: len(part)]
            self.fill(info, whole.view(-1), first * pitch)
            part.copy_(whole[:, left:right])
            first += len(part)
        return found

    def fill(self, info: TensorInfo, content: Tensor, skip: int) -> None:
        """Fill content uint8 [n] from byte `skip` of the tensor on."""
        buffer = content.numpy().data
        if read_at(self.descriptor(info.shard), buffer, info.offset + skip) < len(buffer):
            raise QuantkitError(
                f"{self.path / info.shard} became shorter while it was read",
                "restore that file and run again",
            )
        with self._lock:
            self.bytes_read += len(buffer)

    def prefetch(self, info: TensorInfo, device: torch.device = CPU) -> None:
        """Start reading a tensor in the background: into the page cache, and into host memory if it
        goes to a device."""
        os.posix_fadvise(
            self.descriptor(info.shard), info.offset, info.extent, os.POSIX_FADV_WILLNEED
        )
        if device != CPU and not isinstance(info, TensorSlice):
            self._ahead.start(info, partial(self._read_to_host, info, device))

    def _read_to_host(self, info: TensorInfo, device: torch.device) -> Tensor:
        """Bytes uint8 [n] of a tensor, in host memory for copying to a device."""
        content = host_memory((info.nbytes,), torch.uint8, device)
        self.fill(info, content, 0)
        return content

    def descriptor(self, shard: str) -> int:
        with self._lock:
            if shard not in self._descriptors:
                self._descriptors[shard] = open_file(self.path / shard, self.path)
            return self._descriptors[shard]

    def __del__(self) -> None:
        for descriptor in getattr(self, "_descriptors", {}).values():
            os.close(descriptor)


READ_AHEAD_BYTES = 2**30
"""Bytes that may be read ahead: a batch of experts."""


class ReadAhead:
    """Reads tensors on a thread and holds them until they are taken."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._held: dict[TensorInfo, Future[Tensor]] = {}

    def start(self, info: TensorInfo, read: Callable[[], Tensor]) -> None:
        """Run `read` on the thread if there is room. Its exceptions are raised by `take`."""
        if (
            info in self._held
            or info.nbytes + sum(other.nbytes for other in self._held) > READ_AHEAD_BYTES
        ):
            return
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._held[info] = self._pool.submit(read)

    def take(self, info: TensorInfo) -> Tensor | None:
        """The bytes of a tensor that was started, once; None for any other."""
        held = self._held.pop(info, None)
        return None if held is None else held.result()


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized host memory for copies from or to `device`. For a GPU it is page-locked:
    copies from or to pageable memory are ten times slower. PyTorch caches released blocks."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def on_host(tensor: Tensor, copy: bool) -> Tensor:
    """A contiguous tensor on the host, page-locked for small device tensors. copy: also copy a
    tensor that is on the host already."""
    if tensor.device.type == "cpu" or tensor.nbytes > PINNED:
        return tensor.to("cpu", copy=copy).contiguous()
    return host_memory(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def parts_of(tensor: Content) -> Iterator[memoryview]:
    """The tensor's bytes."""
    return tensor.chunks() if isinstance(tensor, StoredTensor) else iter((bytes_of(tensor),))


def digest_of(tensors: Mapping[str, Content]) -> str:
    """sha256 over the tensors' bytes, in order of their names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        for part in parts_of(tensors[name]):
            found.update(part)
    return found.hexdigest()
