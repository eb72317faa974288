"""A view of a checkpoint with fewer routed experts: fewer tensors, under the smaller model's names,
routers with fewer rows, and tables of experts by token id with the numbers of those that are left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quantkit.checkpoint.header import TensorInfo
from quantkit.checkpoint.reader import Checkpoint, CheckpointView
from quantkit.checkpoint.shards import CPU


@dataclass(frozen=True)
class TensorSelection:
    """The part of a checkpoint that a pruned view shows. names: name in the view -> stored name, of
    every tensor. rows: of tensors sliced along their first dimension, the rows to keep by name.
    routers: of tables of expert ids, the router by name, whose rows are those of its experts."""

    names: Mapping[str, str]
    rows: Mapping[str, Sequence[int]]
    routers: Mapping[str, str]


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
        rows, router = self._selection.rows.get(name), self._selection.routers.get(name)
        if router is not None:
            table, weight = super().read(name, device), self.base.read(router, device)
            return renumbered(table, weight.float(), self._selection.rows[router])
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


def renumbered(table: Tensor, router: Tensor, kept: Sequence[int]) -> Tensor:
    """table int [V, k] of expert ids by token id, with numbers among the `kept` experts, of which
    there are k at least. A token's pruned expert is replaced by the kept one whose row of the
    router [E, H] is most like its own, of those that the token does not have."""
    size = table.shape[1]
    directions = F.normalize(router, dim=1)
    likeness = directions @ directions[list(kept)].t()
    nearest = likeness.argsort(dim=1, descending=True, stable=True)[:, :size]
    numbers = torch.full((len(router),), -1, dtype=torch.int64, device=table.device)
    numbers[list(kept)] = torch.arange(len(kept), device=table.device)
    made = numbers[table.long()]
    for slot in range(size):
        candidates = nearest[table[:, slot].long()]
        taken = (candidates[:, :, None] == made[:, None, :]).any(-1)
        # Of k candidates the other k - 1 experts of the token leave one.
        first = candidates.gather(1, taken.int().argmin(1, keepdim=True))[:, 0]
        made[:, slot] = torch.where(made[:, slot] < 0, first, made[:, slot])
    return made.to(table.dtype)
