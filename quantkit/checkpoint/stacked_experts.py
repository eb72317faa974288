"""Experts that a checkpoint stores stacked in one tensor, split into one tensor per expert.

    P.experts.gate_up_proj [E, 2I, H]    rows of gate, then of up: the layout of transformers
    P.experts.gate_up_proj [E, H, 2I]    gpt-oss: transposed, gate and up interleaved
    P.experts.down_proj    [E, H, I]     or transposed; also biases, MXFP4's blocks and scales, and
                                         MXFP8's scales

No bytes are read or copied here: an expert's bytes are contiguous, and a part is the place of its
bytes in the file.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.checkpoint.header import TensorInfo, TensorSlice

_LINEAR = "_proj"
_LINEARS = {"gate_up": ("gate", "up"), "down": ("down",)}
"""Name of a stacked tensor, without `_proj` -> the linears whose rows it holds."""
_KINDS = {
    "": ".weight",
    "_bias": ".bias",
    "_blocks": ".blocks",
    "_scales": ".scales",
    "_scale": ".weight_scale",
}
_RANKS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3, "_scale": 3}
_EXPERT = re.compile(r"(.*experts)\.(0|[1-9]\d{0,5})\.\w+_proj\.(weight|bias)")
"""Name of an expert's tensor after splitting: module of experts, expert number, kind."""


@dataclass(frozen=True)
class StackedLayout:
    """transposed: unquantized weights are [inputs, outputs]. interleaved: the outputs of gate and
    up alternate."""

    transposed: bool = False
    interleaved: bool = False


STACKED_LAYOUTS: dict[str, StackedLayout] = {
    "gpt_oss": StackedLayout(transposed=True, interleaved=True),
    "hy_v4": StackedLayout(),
    "qwen3_5_moe": StackedLayout(),
    "qwen3_5_moe_text": StackedLayout(),
    "qwen4_exp": StackedLayout(),
    "qwen4_exp_text": StackedLayout(),
}
"""By model_type of config.json."""


def is_expert_tensor(name: str) -> bool:
    """Whether a tensor belongs to a single expert."""
    return _EXPERT.fullmatch(name) is not None


def split_stacked_experts(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """The tensors with stacked experts replaced by `P.experts.0.gate_proj.weight` and so on."""
    layout = STACKED_LAYOUTS.get(str(config.get("model_type")))
    if layout is None:
        return dict(tensors)
    found: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        parts = list(_expert_parts(tensor, layout))
        found |= {part.name: part for part in parts} if parts else {name: tensor}
    return found


def _expert_parts(tensor: TensorInfo, layout: StackedLayout) -> Iterator[TensorInfo]:
    """The experts' parts of a stacked tensor; none of any other tensor."""
    prefix, _, last = tensor.name.rpartition(".")
    side, found, kind = last.partition(_LINEAR)
    if not found or side not in _LINEARS or kind not in _KINDS or not prefix.endswith("experts"):
        return
    if len(tensor.shape) != _RANKS[kind] or 0 in tensor.shape:
        return
    experts, *shape = tensor.shape
    if kind == "_blocks":
        shape = [shape[0], shape[1] * shape[2]]
    linears, transposed = _LINEARS[side], layout.transposed and kind == ""
    rows = (shape[-1] if transposed else shape[0]) // len(linears)
    size = tensor.nbytes // experts
    for expert in range(experts):
        base = TensorInfo(
            tensor.name, tensor.dtype, tuple(shape), tensor.shard, tensor.offset + expert * size
        )
        for place, linear in enumerate(linears):
            name = f"{prefix}.{expert}.{linear}{_LINEAR}{_KINDS[kind]}"
            if layout.interleaved and len(linears) > 1:
                yield TensorSlice.of(name, base, place, len(linears), transposed)
            else:
                yield TensorSlice.of(name, base, place * rows, 1, transposed, rows)


@dataclass(frozen=True)
class Stack:
    """A stored tensor [E, R, C] and the names of its parts: each expert's rows are divided equally.

    shape: of a part, as linears have it; (R,) of a bias, stored as [E, R]. transposed: stored
    matrices are [C, R]. either_orientation: or the other orientation, recognized by the shape.
    interleaved: an expert's rows are the first row of every part, then the second, and so on.
    """

    name: str
    parts: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    transposed: bool = False
    either_orientation: bool = False
    interleaved: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of all parts, expert by expert."""
        return tuple(name for expert in self.parts for name in expert)

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Shape of the stacked tensor in transformers."""
        expert = (self.shape[0] * len(self.parts[0]), *self.shape[1:])
        return (len(self.parts), *(expert[::-1] if self.transposed else expert))

    def is_transposed(self, info: TensorInfo) -> bool | None:
        """Whether this tensor holds transposed matrices; None if its shape is not the stack's."""
        count, *other = self.stacked_shape
        if info.shape == self.stacked_shape:
            return self.transposed
        if self.either_orientation and info.shape == (count, *other[::-1]):
            return not self.transposed
        return None

    def split(self, info: TensorInfo) -> list[TensorInfo]:
        """The parts of the stored tensor; empty if its shape is not the stack's."""
        transposed = self.is_transposed(info)
        if transposed is None:
            return []
        size, found = info.nbytes // len(self.parts), list[TensorInfo]()
        for expert, names in enumerate(self.parts):
            base = TensorInfo(
                self.name, info.dtype, info.shape[1:], info.shard, info.offset + expert * size
            )
            for place, name in enumerate(names):
                first, step = (
                    (place, len(names)) if self.interleaved else (place * self.shape[0], 1)
                )
                found.append(TensorSlice.of(name, base, first, step, transposed, self.shape[0]))
        return found

    def views(self, stacked: Tensor) -> dict[str, Tensor]:
        """Views of the parts of stacked [E, R, C], of `stacked_shape`, by name."""
        found: dict[str, Tensor] = {}
        for expert, names in zip(stacked.mT if self.transposed else stacked, self.parts):
            parts = (
                [expert[place :: len(names)] for place in range(len(names))]
                if self.interleaved
                else expert.split(self.shape[0])
            )
            found |= dict(zip(names, parts))
        return found


def expected_stacks(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Stack]:
    """The complete stacks that `split_stacked_experts` splits into tensors of these names.

    shapes: of tensors with one expert each, by name.
    """
    layout = STACKED_LAYOUTS.get(str(config.get("model_type")))
    if layout is None:
        return
    experts: dict[tuple[str, str], set[int]] = {}
    for name in shapes:
        if found := _EXPERT.fullmatch(name):
            experts.setdefault((found[1], found[3]), set()).add(int(found[2]))
    for (module, kind), numbers in experts.items():
        for side, linears in _LINEARS.items():
            parts = tuple(
                tuple(f"{module}.{number}.{linear}_proj.{kind}" for linear in linears)
                for number in range(len(numbers))
            )
            part_shapes = {shapes.get(name, ()) for names in parts for name in names}
            if len(part_shapes) == 1 and (shape := part_shapes.pop()):
                yield Stack(
                    f"{module}.{side}_proj" + ("" if kind == "weight" else "_bias"),
                    parts,
                    shape,
                    layout.transposed and kind == "weight",
                    interleaved=layout.interleaved and len(linears) > 1,
                )
