"""The safetensors header: 8 bytes of little-endian length, a JSON object, then the tensors' bytes
with no gap.

Parsed here rather than by the safetensors package for two reasons: a damaged file must be named in
one line before any long work, and tensors are read with pread into fresh memory, because mapped
pages count as resident and would make the stated memory bound meaningless.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import LARGEST, open_file, parse_json

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
NOTHING_ELSE: Mapping[str, str] = {}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_VALUES = 2**62  # of a tensor, were its empty dimensions not empty: torch counts in 64 bits


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be: its name, dtype and shape."""

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
        """Bytes of the file, from `offset` on, that it lies in."""
        return self.nbytes


@dataclass(frozen=True)
class TensorPart(TensorInfo):
    """Part of a stored tensor, or of its transpose: `shape[0]` rows, every `step`th from `first`
    on."""

    whole: TensorInfo
    first: int
    step: int
    turned: bool

    @classmethod
    def of(
        cls,
        name: str,
        whole: TensorInfo,
        first: int,
        step: int,
        turned: bool,
        count: int | None = None,
    ) -> TensorInfo:
        """count: of rows; None: as many as there are. Rows that lie together are a tensor like any
        other."""
        rows, *others = whole.shape[::-1] if turned else whole.shape
        shape = (len(range(first, rows, step)) if count is None else count, *others)
        if step == 1 and not turned:
            skip = first * (whole.nbytes // rows)
            return TensorInfo(name, whole.dtype, shape, whole.shard, whole.offset + skip)
        return cls(name, whole.dtype, shape, whole.shard, whole.offset, whole, first, step, turned)

    @property
    def extent(self) -> int:
        return self.whole.nbytes

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of the whole tensor."""
        side = whole.t() if self.turned else whole
        return side[self.first :: self.step][: self.shape[0]]


def read_header(folder: Path, shard: str) -> list[TensorInfo]:
    """Tensors of one safetensors file of a model's folder, in the order of their bytes. Raises
    QuantkitError for a damaged file."""
    path = folder / shard
    with os.fdopen(open_file(path, folder), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > LARGEST or 8 + length > size:
            raise _damaged(
                path, f"is truncated or not safetensors: {size} bytes do not hold its header"
            )
        text = file.read(length)
    try:
        entries = parse_json(text.decode("utf-8"), unique=True)
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
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _senseless(path, name)
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _senseless(path, name)
    if math.prod(size for size in shape if size) > _MOST_VALUES:
        raise _senseless(path, name)
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise QuantkitError(
            f"{name} in {path} has dtype {entry['dtype']}", f"quantkit reads {', '.join(DTYPES)}"
        )
    tensor = TensorInfo(name, DTYPES[entry["dtype"]], tuple(shape), shard, data_start + offsets[0])
    if offsets[1] - offsets[0] != tensor.nbytes:
        raise _senseless(path, name)
    return tensor


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(
        type(number) is int and number >= 0 for number in numbers
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


def _senseless(path: Path, name: str) -> QuantkitError:
    return _damaged(path, f"has a header that makes no sense for {name}")


def _damaged(path: Path, what: str) -> QuantkitError:
    return QuantkitError(f"{path} {what}", "download or copy that file again")


def encode_header(
    specs: Sequence[TensorSpec], metadata: Mapping[str, str] = NOTHING_ELSE
) -> tuple[bytes, list[TensorInfo]]:
    """Header bytes for tensors stored in the given order, and where each will lie (`shard` left
    empty). metadata: more of it.

    The header is padded to a multiple of 8, so that tensors sorted by falling item size are all
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
    """Fill `buffer` from `offset` of an open file; fewer bytes than asked for only at the end of
    the file."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """All of `data` from `offset` of an open file on. Other threads go on meanwhile."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Those of a contiguous tensor on the host, as they lie in memory."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
