"""A view of a checkpoint with fewer routed experts: fewer tensors, under the smaller model's names,
and routers with fewer rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.header import TensorInfo
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.shards import CPU


@dataclass(frozen=True)
class TensorSelection:
    """The part of a checkpoint that a pruned view shows. names: name in the view -> stored name, of
    every tensor. rows: of tensors sliced along their first dimension, the rows to keep by name."""

    names: Mapping[str, str]
    rows: Mapping[str, Sequence[int]]


class PrunedCheckpoint(Checkpoint):
    """`base` with `config` and the tensors of `selection`.

    Its fingerprint is that of `base`, because the selection follows from the other inputs of a run.
    """

    def __init__(
        self, base: Checkpoint, config: dict[str, Any], selection: TensorSelection
    ) -> None:
        self.base, self._selection = base, selection
        super().__init__(base.path, config, base.side, _select(base, selection))
        self.has_weights = base.has_weights

    def select(self, selection: TensorSelection) -> None:
        """Replace the selection by another one with the same names and shapes."""
        selected = _select(self.base, selection)
        for name, info in self.tensors.items():
            assert (selected[name].dtype, selected[name].shape) == (info.dtype, info.shape), (
                f"{name} is not as planned"
            )
        self._selection = selection
        self.tensors.update(selected)

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return self.base.fingerprint

    @property
    def source(self) -> Checkpoint:
        return self.base

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
