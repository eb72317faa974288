"""Experts that a checkpoint holds stacked in one tensor, as tensors of their own: an expert's bytes
lie together."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.checkpoint.header import TensorInfo, TensorPart
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.stacked_layouts import SIDES, STACKINGS

_EXPERT = re.compile(r"(.*experts)\.(0|[1-9]\d{0,5})\.\w+_proj\.(weight|bias)")
"""Name of an expert's tensor, as `unstacked` has it: the module of experts, the expert's number and
the kind."""


def is_of_expert(name: str) -> bool:
    """Whether a tensor is one expert's."""
    return _EXPERT.fullmatch(name) is not None


@dataclass(frozen=True)
class Stack:
    """A stored tensor [E, R, C], and the names of what it is cut into: of every expert's rows equal
    parts, in their order.

    shape: of a part, as linears have it; of a bias (R,), stored [E, R]. turned: stored are matrices
    [C, R]. either: or the other way round,
    which the shape tells. in_turn: an expert's rows are the first of every part, then the second of
    every part, and so on.
    """

    name: str
    parts: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    turned: bool = False
    either: bool = False
    in_turn: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of all parts, expert by expert."""
        return tuple(name for expert in self.parts for name in expert)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the tensor, as transformers has it."""
        one = (self.shape[0] * len(self.parts[0]), *self.shape[1:])
        return (len(self.parts), *(one[::-1] if self.turned else one))

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
            whole = TensorInfo(
                self.name, info.dtype, info.shape[1:], info.shard, info.offset + expert * size
            )
            for place, name in enumerate(names):
                first, step = (place, len(names)) if self.in_turn else (place * self.shape[0], 1)
                yield TensorPart.of(name, whole, first, step, turned, self.shape[0])

    def rooms(self, whole: Tensor) -> dict[str, Tensor]:
        """whole [E, R, C], of `whole_shape` -> the view of it that holds a part, by the part's
        name."""
        found: dict[str, Tensor] = {}
        for expert, names in zip(whole.mT if self.turned else whole, self.parts):
            rooms = (
                [expert[place :: len(names)] for place in range(len(names))]
                if self.in_turn
                else expert.split(self.shape[0])
            )
            found |= dict(zip(names, rooms))
        return found


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


def table_stacks(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Stack]:
    """What `unstacked` cuts up of a config.json's architecture, from tensors that have every expert
    by itself: complete stacks only.

    shapes: of tensors, by name.
    """
    stacking = STACKINGS.get(str(config.get("model_type")))
    experts: dict[tuple[str, str], set[int]] = {}
    for name in shapes if stacking is not None else ():
        if found := _EXPERT.fullmatch(name):
            experts.setdefault((found[1], found[3]), set()).add(int(found[2]))
    for (module, kind), numbers in experts.items():
        for side, linears in SIDES.items():
            parts = tuple(
                tuple(f"{module}.{number}.{one}_proj.{kind}" for one in linears)
                for number in range(len(numbers))
            )
            held = {shapes.get(name, ()) for names in parts for name in names}
            if stacking is not None and len(held) == 1 and (shape := held.pop()):
                name = f"{module}.{side}_proj" + ("" if kind == "weight" else "_bias")
                yield Stack(
                    name,
                    parts,
                    shape,
                    stacking.turned and kind == "weight",
                    in_turn=stacking.in_turn and len(linears) > 1,
                )
