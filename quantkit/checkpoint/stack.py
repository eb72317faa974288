"""Experts that a checkpoint holds stacked in one tensor, as tensors of their own: an expert's bytes lie together."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.checkpoint.header import TensorInfo, TensorPart
from quantkit.checkpoint.reader import Checkpoint


@dataclass(frozen=True)
class Stack:
    """A stored tensor [E, R, C], and the names of what it is cut into: of every expert's rows equal parts, in their order.

    shape: of a part, as linears have it. turned: stored are matrices [C, R]. either: or the other way round, which the shape tells.
    """

    name: str
    parts: tuple[tuple[str, ...], ...]
    shape: tuple[int, int]
    turned: bool = False
    either: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of all parts, expert by expert."""
        return tuple(name for expert in self.parts for name in expert)

    @property
    def whole_shape(self) -> tuple[int, int, int]:
        """Of the tensor, as transformers has it."""
        rows, columns = self.shape[0] * len(self.parts[0]), self.shape[1]
        return (len(self.parts), columns, rows) if self.turned else (len(self.parts), rows, columns)

    def is_turned(self, info: TensorInfo) -> bool | None:
        """Whether this tensor holds turned matrices; None where it is not the stack."""
        count, *other = self.whole_shape
        if info.shape == self.whole_shape:
            return self.turned
        return not self.turned if self.either and info.shape == (count, *other[::-1]) else None

    def cut(self, info: TensorInfo, turned: bool) -> Iterable[TensorInfo]:
        """The parts as stored tensors."""
        size = info.nbytes // len(self.parts)
        for expert, names in enumerate(self.parts):
            whole = TensorInfo(self.name, info.dtype, info.shape[1:], info.shard, info.offset + expert * size)
            for place, name in enumerate(names):
                yield TensorPart.of(name, whole, place * self.shape[0], 1, turned, self.shape[0])


def cut_up(checkpoint: Checkpoint, stacks: Iterable[Stack]) -> Checkpoint:
    """The same checkpoint with these tensors cut up, where they are stored so."""
    tensors = dict(checkpoint.tensors)
    for stack in stacks:
        info = tensors.get(stack.name)
        turned = None if info is None else stack.is_turned(info)
        if info is not None and turned is not None:
            del tensors[stack.name]
            tensors |= {part.name: part for part in stack.cut(info, turned)}
    view = copy.copy(checkpoint)
    view.tensors = tensors
    return view
