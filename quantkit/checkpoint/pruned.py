"""A view of a checkpoint with fewer routed experts: fewer tensors, under the smaller model's names,
and routers with fewer rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.header import TensorInfo
from quantkit.checkpoint.reader import Checkpoint, CheckpointView
from quantkit.checkpoint.shards import CPU


@dataclass(frozen=True)
class TensorSelection:
    """The part of a checkpoint that a pruned view shows. names: name in the view -> stored name, of
    every tensor. rows: of tensors sliced along their first dimension, the rows to keep by name."""

    names: Mapping[str, str]
    rows: Mapping[str, Sequence[int]]


class PrunedCheckpoint(CheckpointView):
    """`base` with `config` and the tensors of `selection`."""

    def __init__(
        self, base: Checkpoint, config: dict[str, Any], selection: TensorSelection
    ) -> None:
        self._selection = selection
        super().__init__(base, config, base.side, _select(base, selection))

    def select(self, selection: TensorSelection) -> None:
        """Replace the selection by another one with the same names and shapes."""
        selected = _select(self.base, selection)
        for name, info in self.tensors.items():
            assert (selected[name].dtype, selected[name].shape) == (info.dtype, info.shape), (
                f"{name} is not as planned"
            )
        self._selection = selection
        self.tensors.update(selected)

    def stored(self, name: str) -> tuple[TensorInfo, ...]:
        return (self.base.tensors[self._selection.names[name]],)

    @property
    def pruned(self) -> set[str]:
        return set(self.base.tensors) - set(self._selection.names.values())

    def read(self, name: str, device: torch.device = CPU) -> Tensor:
        rows = self._selection.rows.get(name)
        if rows is None:
            return super().read(name, device)
        return self.base.read(self._selection.names[name], device)[list(rows)]


def _select(base: Checkpoint, selection: TensorSelection) -> dict[str, TensorInfo]:
    """The selected tensors by their names in the view."""
    selected: dict[str, TensorInfo] = {}
    for name, stored in selection.names.items():
        info = base.tensors[stored]
        rows = selection.rows.get(name)
        shape = info.shape if rows is None else (len(rows), *info.shape[1:])
        selected[name] = replace(info, name=name, shape=shape)
    return selected
