"""Experts that are published stacked in one tensor, seen as tensors of their own: what the model's
table and engines' formats know.

    P.experts.gate_up_proj [E, 2I, H]    gate's rows, then up's: transformers' own layout
    P.experts.gate_up_proj [E, H, 2I]    gpt-oss: transposed, gate and up in turn
    P.experts.down_proj    [E, H, I]     or transposed; biases and MXFP4's blocks and scales beside them

Nothing is read or copied here: a part names where its bytes lie.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.checkpoint.header import TensorInfo, TensorPart

_LINEAR = "_proj"
SIDES = {"gate_up": ("gate", "up"), "down": ("down",)}
"""What a stacked tensor is called, without `_proj`, and whose rows it has."""
_KINDS = {"": ".weight", "_bias": ".bias", "_blocks": ".blocks", "_scales": ".scales"}


@dataclass(frozen=True)
class Stacking:
    """turned: unquantized weights are [inputs, outputs]. in_turn: gate's and up's outputs
    alternate."""

    turned: bool = False
    in_turn: bool = False


STACKINGS: dict[str, Stacking] = {
    "gpt_oss": Stacking(turned=True, in_turn=True),
    "qwen3_5_moe": Stacking(),
}
"""By model_type of config.json."""


def unstacked(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """The tensors with every expert by itself: `P.experts.0.gate_proj.weight` and so on. What is
    not stacked stays as it is."""
    stacking = STACKINGS.get(str(config.get("model_type")))
    if stacking is None:
        return dict(tensors)
    found: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        parts = list(_experts(tensor, stacking))
        found |= {part.name: part for part in parts} if parts else {name: tensor}
    return found


def _experts(tensor: TensorInfo, stacking: Stacking) -> Iterator[TensorInfo]:
    """The experts' parts of a stacked tensor; none of any other."""
    prefix, _, last = tensor.name.rpartition(".")
    side, found, kind = last.partition(_LINEAR)
    if not found or side not in SIDES or kind not in _KINDS or not prefix.endswith("experts"):
        return
    if (
        len(tensor.shape) != {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}[kind]
        or 0 in tensor.shape
    ):
        return
    shape = (
        tensor.shape[1:3]
        if kind != "_blocks"
        else (tensor.shape[1], tensor.shape[2] * tensor.shape[3])
    )
    one = tensor.nbytes // tensor.shape[0]
    for expert in range(tensor.shape[0]):
        whole = TensorInfo(
            tensor.name, tensor.dtype, shape, tensor.shard, tensor.offset + expert * one
        )
        for number, linear in enumerate(SIDES[side]):
            yield _part(
                f"{prefix}.{expert}.{linear}{_LINEAR}{_KINDS[kind]}",
                whole,
                number,
                len(SIDES[side]),
                kind,
                stacking,
            )


def _part(
    name: str, whole: TensorInfo, number: int, of: int, kind: str, stacking: Stacking
) -> TensorInfo:
    """Linear `number` of `of` whose outputs an expert's tensor holds."""
    turned = stacking.turned and kind == ""
    shape = whole.shape[::-1] if turned else whole.shape
    rows = shape[0] // of
    if stacking.in_turn and of > 1:
        return TensorPart.of(name, whole, number, of, turned)
    return TensorPart.of(name, whole, number * rows, 1, turned, rows)
