"""A checkpoint seen as one with fewer routed experts: fewer tensors, under the smaller model's
names, and routers with fewer rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.header import TensorInfo
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.shards import CPU


@dataclass(frozen=True)
class Kept:
    """What is seen of a checkpoint. names: name seen -> name stored, of every tensor that is kept.
    rows: of tensors that are cut along their first dimension, by name, the rows that are kept."""

    names: Mapping[str, str]
    rows: Mapping[str, Sequence[int]]


class PrunedCheckpoint(Checkpoint):
    """`base` with `config`, as `kept` says; `keep` exchanges that for another of the same names and
    shapes.

    Its fingerprint is that of `base`: what is kept follows from what a run is given.
    """

    def __init__(self, base: Checkpoint, config: dict[str, Any], kept: Kept) -> None:
        self.base, self._kept = base, kept
        super().__init__(base.path, config, base.side, _seen(base, kept))
        self.has_weights = base.has_weights

    def keep(self, kept: Kept) -> None:
        found = _seen(self.base, kept)
        for name, info in self.tensors.items():
            assert (found[name].dtype, found[name].shape) == (info.dtype, info.shape), (
                f"{name} is not as planned"
            )
        self._kept = kept
        self.tensors.update(found)

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return self.base.fingerprint

    @property
    def whole(self) -> Checkpoint:
        return self.base

    def stored(self, name: str) -> TensorInfo:
        return self.base.tensors[self._kept.names[name]]

    @property
    def pruned(self) -> set[str]:
        return set(self.base.tensors) - set(self._kept.names.values())

    def read(self, name: str, device: torch.device = CPU) -> Tensor:
        rows = self._kept.rows.get(name)
        if rows is None:
            return super().read(name, device)
        return self.base.read(self._kept.names[name], device)[list(rows)]


def _seen(base: Checkpoint, kept: Kept) -> dict[str, TensorInfo]:
    """The stored tensors by the names that they are seen under."""
    found: dict[str, TensorInfo] = {}
    for name, stored in kept.names.items():
        info = base.tensors[stored]
        shape = (len(kept.rows[name]), *info.shape[1:]) if name in kept.rows else info.shape
        found[name] = replace(info, name=name, shape=shape)
    return found
