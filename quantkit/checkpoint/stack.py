"""Experts that a checkpoint holds stacked in one tensor, as tensors of their own: their bytes lie one after the other."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.checkpoint.header import TensorInfo
from quantkit.checkpoint.reader import Checkpoint


@dataclass(frozen=True)
class Stack:
    """A stored tensor [E, R, C], and the names of what it is cut into: of every expert's rows equal parts, in their order."""

    name: str
    parts: tuple[tuple[str, ...], ...]

    def cut(self, info: TensorInfo) -> Iterable[TensorInfo]:
        """The parts as stored tensors."""
        rows = info.shape[1] // len(self.parts[0])
        size = rows * info.shape[2] * info.dtype.itemsize
        names = [name for expert in self.parts for name in expert]
        for place, name in enumerate(names):
            yield TensorInfo(name, info.dtype, (rows, info.shape[2]), info.shard, info.offset + place * size)


def cut_up(checkpoint: Checkpoint, stacks: Iterable[Stack]) -> Checkpoint:
    """The same checkpoint with these tensors cut up, where they are stored so."""
    tensors = dict(checkpoint.tensors)
    for stack in stacks:
        info = tensors.get(stack.name)
        if info is not None and len(info.shape) == 3 and info.shape[0] == len(stack.parts) and info.shape[1] % len(stack.parts[0]) == 0:
            del tensors[stack.name]
            tensors |= {part.name: part for part in stack.cut(info)}
    view = copy.copy(checkpoint)
    view.tensors = tensors
    return view
