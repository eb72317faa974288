"""A safetensors file of tensors in memory, written while other threads go on.

Before its version 0.8 the library's own writer holds Python's lock from beginning to end: for the
seconds that hidden states of some GB take, nobody launches what a GPU is to do.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from quantkit.checkpoint.header import TensorSpec, bytes_of, encode_header, write_at


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """tensors: contiguous, on the host. A file of this name is written over. Raises OSError."""
    specs = [
        TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    ]
    header, placed = encode_header(sorted(specs, key=lambda spec: -spec.dtype.itemsize), metadata)
    with path.open("wb") as file:
        write_at(file.fileno(), memoryview(header), 0)
        for one in placed:
            write_at(file.fileno(), bytes_of(tensors[one.name]), one.offset)
