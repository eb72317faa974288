"""safetensors files: an 8-byte little-endian length, a JSON header, then the tensors' bytes without
gaps.

Parsed here rather than by the safetensors package for two reasons: a damaged file must be reported
in one line before any long work, and tensors are read with pread into fresh memory, because mapped
pages count as resident and would break the stated memory bound.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.common.atomic_write import new_file
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import LARGEST, open_file, parse_json
from quantkit.common.scratch import give_back

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_INTERRUPTED = "a download, copy or save that was interrupted"
_BEGINNINGS = {
    bytes(8): "begins with zeros: " + _INTERRUPTED,
    b"<": "is a web page: a download that was refused",
    b"PK": "is a pickle of PyTorch under the name of safetensors",
    b"\x80": "is a pickle under the name of safetensors",
    b"GGUF": "is GGUF under the name of safetensors",
}
"""First bytes of what lies in the place of a safetensors file."""
NO_METADATA: Mapping[str, str] = {}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_NAME, _MAX_DIMENSIONS = 1000, 64
_MAX_VALUES = 2**62  # of a tensor, ignoring dimensions of size 0: torch counts in 64 bits
_SIZES = range(_MAX_VALUES + 1)
_PART = 2**24
"""Values that `save_tensors` writes at a time."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorInfo(TensorSpec):
    """A stored tensor: `offset` is where its bytes start in the file `shard`."""

    shard: str
    offset: int

    @property
    def extent(self) -> int:
        """Bytes of the file to read for it, from `offset` on."""
        return self.nbytes


@dataclass(frozen=True)
class TensorSlice(TensorInfo):
    """Strided rows of a stored tensor or of its transpose: `shape[0]` rows, every `step`th, from
    row `first` on."""

    base: TensorInfo
    first: int
    step: int
    transposed: bool

    @classmethod
    def of(
        cls,
        name: str,
        base: TensorInfo,
        first: int,
        step: int,
        transposed: bool,
        count: int | None = None,
    ) -> TensorInfo:
        """count: number of rows, None for all. Contiguous rows are a plain TensorInfo."""
        rows, *others = base.shape[::-1] if transposed else base.shape
        shape = (len(range(first, rows, step)) if count is None else count, *others)
        if step == 1 and not transposed:
            skip = first * (base.nbytes // rows)
            return TensorInfo(name, base.dtype, shape, base.shard, base.offset + skip)
        return cls(name, base.dtype, shape, base.shard, base.offset, base, first, step, transposed)

    @property
    def extent(self) -> int:
        return self.base.nbytes

    def select(self, base: torch.Tensor) -> torch.Tensor:
        """This slice of the base tensor's values."""
        matrix = base.t() if self.transposed else base
        return matrix[self.first :: self.step][: self.shape[0]]


def read_header(folder: Path, shard: str) -> list[TensorInfo]:
    """Tensors of one safetensors file of a model's folder, ordered by offset. Raises QuantkitError
    for a damaged file."""
    path = folder / shard
    with os.fdopen(open_file(path, folder), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > LARGEST or 8 + length > size or not length:
            what = f"is truncated or not safetensors: {size} bytes do not hold its header"
            begun = (said for begin, said in _BEGINNINGS.items() if prefix.startswith(begin))
            raise _damaged(path, next(begun, what) if prefix else "is empty: " + _INTERRUPTED)
        text = file.read(length)
    try:
        entries = parse_json(text.decode("utf-8"), strict=True)
    except ValueError as error:
        raise _damaged(path, f"has a header that is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise _damaged(path, "has a header that is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = [_tensor(path, shard, name, entry, 8 + length) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_extent(path, tensors, 8 + length, size)
    return tensors


def _tensor(path: Path, shard: str, name: str, entry: Any, data_start: int) -> TensorInfo:
    if len(name) > _LONGEST_NAME:
        raise _damaged(path, f"has a name of {len(name)} characters, {name[:40]}...")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _invalid_entry(path, name)
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _invalid_entry(path, name)
    if math.prod(filter(None, shape)) > _MAX_VALUES:
        raise _invalid_entry(path, name)
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise QuantkitError(
            f"{name} in {path} has dtype {entry['dtype']}", f"quantkit reads {', '.join(DTYPES)}"
        )
    tensor = TensorInfo(name, DTYPES[entry["dtype"]], tuple(shape), shard, data_start + offsets[0])
    if offsets[1] - offsets[0] != tensor.nbytes:
        raise _invalid_entry(path, name)
    return tensor


def _are_sizes(numbers: Any) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) <= _MAX_DIMENSIONS
        and set(map(type, numbers)) <= {int}  # a bool is none
        and all(map(_SIZES.__contains__, numbers))
    )


def _check_extent(path: Path, tensors: Sequence[TensorInfo], data_start: int, size: int) -> None:
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            raise _damaged(path, f"has a gap or an overlap before {tensor.name}")
        end += tensor.nbytes
    if size < end:
        raise _damaged(path, f"is truncated: {size} bytes, and its header describes {end}")
    if size > end:
        raise _damaged(path, f"has {size - end} bytes that its header does not describe")


def _invalid_entry(path: Path, name: str) -> QuantkitError:
    return _damaged(path, f"has a header that makes no sense for {name}")


def _damaged(path: Path, what: str) -> QuantkitError:
    return QuantkitError(f"{path} {what}", "download or copy that file again")


def encode_header(
    specs: Sequence[TensorSpec], metadata: Mapping[str, str] = NO_METADATA
) -> tuple[bytes, list[TensorInfo]]:
    """Header bytes for tensors stored in the given order, and each tensor's offset (`shard` is
    empty). metadata: additional entries of __metadata__.

    The header is padded to a multiple of 8, so that tensors sorted by descending item size are
    aligned.
    """
    entries: dict[str, Any] = {
        "__metadata__": {"format": "pt", **metadata}
    }  # transformers refuses a file without it
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    tensors: list[TensorInfo] = []
    offset = len(header)
    for spec in specs:
        tensors.append(TensorInfo(spec.name, spec.dtype, spec.shape, "", offset))
        offset += spec.nbytes
    return header, tensors


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset` of an open file; returns fewer bytes only at the end of the
    file."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset` of an open file; releases the GIL."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Raw bytes of a contiguous CPU tensor: dimensions of size 1 may have any stride."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy().data)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous tensors to a safetensors file, atomically, in parts: those of a device, or
    of a file, are never whole in memory. Raises OSError.

    The safetensors package before 0.8 holds the GIL for the whole write: for the seconds that
    hidden states of several GB take, no thread could launch GPU work.
    """
    specs = [
        TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    ]
    header, placed = encode_header(sorted(specs, key=lambda spec: -spec.dtype.itemsize), metadata)
    with new_file(path) as file:
        write_at(file.fileno(), memoryview(header), 0)
        for one in placed:
            flat, offset = tensors[one.name].view(-1), one.offset
            for part in flat.split(_PART) if len(flat) else ():
                write_at(file.fileno(), bytes_of(part.cpu()), offset)
                offset += part.numel() * part.element_size()
                give_back()


@dataclass(frozen=True)
class Shard:
    """One safetensors file: its name, header bytes and size."""

    name: str
    header: bytes
    size: int


@dataclass(frozen=True)
class Layout:
    """Shards in order, tensors by name with shard and offset, and a digest of all of it."""

    shards: tuple[Shard, ...]
    tensors: dict[str, TensorInfo]
    digest: str

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, as the index states them."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def plan_layout(specs: Sequence[TensorSpec], shard_bytes: int) -> Layout:
    """Shards of at most `shard_bytes`, filled in the order of `specs`; tensors of one module stay
    together."""
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names), (
        f"planned twice: {sorted({name for name in names if names.count(name) > 1})}"
    )
    groups = _group_by_shard(specs, shard_bytes)
    shards: list[Shard] = []
    tensors: dict[str, TensorInfo] = {}
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        # Descending item size keeps every tensor aligned without gaps, which safetensors forbids.
        header, placed = encode_header(sorted(group, key=lambda spec: -spec.dtype.itemsize))
        shards.append(Shard(name, header, placed[-1].offset + placed[-1].nbytes))
        tensors.update((tensor.name, replace(tensor, shard=name)) for tensor in placed)
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(shard.name.encode() + shard.header)
    return Layout(tuple(shards), tensors, digest.hexdigest())


def _group_by_shard(specs: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = []
    used = 0
    for _, group in groupby(specs, key=lambda spec: spec.name.rpartition(".")[0]):
        module = list(group)
        size = sum(spec.nbytes for spec in module)
        if not shards or used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1] += module
        used += size
    return shards
