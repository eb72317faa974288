"""Where every tensor of an output lies: shard, offset, header, all decided from names, dtypes and
shapes before a byte exists.

That is what makes a run resumable and its output independent of the order of work: a tensor has one
place, whoever writes it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from quantkit.checkpoint.header import TensorInfo, TensorSpec, encode_header


@dataclass(frozen=True)
class Shard:
    """One safetensors file: its name, header bytes and size."""

    name: str
    header: bytes
    size: int


@dataclass(frozen=True)
class Layout:
    """Shards in order, tensors by name with shard and offset, and the digest of it all."""

    shards: tuple[Shard, ...]
    tensors: dict[str, TensorInfo]
    digest: str

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, as the index states them."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def plan_layout(specs: Sequence[TensorSpec], shard_bytes: int) -> Layout:
    """Shards of at most `shard_bytes` of tensors, filled in the order of `specs`; one module's
    tensors stay together."""
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names), (
        f"planned twice: {sorted({name for name in names if names.count(name) > 1})}"
    )
    fillings = _fill(specs, shard_bytes)
    shards: list[Shard] = []
    tensors: dict[str, TensorInfo] = {}
    for number, filling in enumerate(fillings, start=1):
        name = f"model-{number:05d}-of-{len(fillings):05d}.safetensors"
        # Falling item size keeps every tensor aligned without gaps, which safetensors does not
        # allow.
        header, placed = encode_header(sorted(filling, key=lambda spec: -spec.dtype.itemsize))
        shards.append(Shard(name, header, placed[-1].offset + placed[-1].nbytes))
        tensors.update((tensor.name, replace(tensor, shard=name)) for tensor in placed)
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(shard.name.encode() + shard.header)
    return Layout(tuple(shards), tensors, digest.hexdigest())


def _fill(specs: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    fillings: list[list[TensorSpec]] = []
    filled = 0
    for _, group in groupby(specs, key=lambda spec: spec.name.rpartition(".")[0]):
        module = list(group)
        size = sum(spec.nbytes for spec in module)
        if not fillings or filled + size > shard_bytes:
            fillings.append([])
            filled = 0
        fillings[-1] += module
        filled += size
    return fillings
