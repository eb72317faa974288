"""What a linear stores, some of its rows at a time: codes with zero points and scales, whatever the format.

Every byte is read and looked at; codes are taken apart for SAMPLED rows only, which bounds time and memory by the bytes of one linear.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.checkpoint.check import QuantizedLinear
from quantkit.checkpoint.formats.base import Axis, StoredPart
from quantkit.checkpoint.formats.gptq import Gptq
from quantkit.diagnosis.survey import Survey
from quantkit.quant.weights import E2M1_VALUES, FP4_GROUP, MX_GROUP, Fp4Weight, IntWeight, Mxfp4Weight, Weight, dequantize

_RANGES, _ROWS = 4, 64
"""Rows that are taken apart: ranges, evenly spread, and rows of each."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a linear. values: what they stand for, float32 [n, K]. ranges: which rows they are.

    Of integers: codes float32 [n, K] and zero_point [n, G], signed; of_group [K] is the group of each input. Of FP4 codes are values of
    E2M1 without scale. scale: float32 [n, G]; bits: of a code.
    """

    values: Tensor
    ranges: tuple[tuple[int, int], ...]
    codes: Tensor | None = None
    zero_point: Tensor | None = None
    scale: Tensor | None = None
    of_group: Tensor | None = None
    bits: int = 16


def read_parts(survey: Survey, linear: QuantizedLinear) -> dict[str, Tensor]:
    """All tensors of a linear."""
    return {name: survey.shards.read(survey.tensors[name]) for name in linear.tensors}


def sampled_ranges(rows: int, unit: int = 1) -> tuple[tuple[int, int], ...]:
    """Ranges that begin and end at multiples of `unit`: all rows of a small linear."""
    if rows <= _RANGES * _ROWS:
        return ((0, rows),)
    starts = [(rows - _ROWS) * number // (_RANGES - 1) // unit * unit for number in range(_RANGES)]
    return tuple((start, min(start + -(-_ROWS // unit) * unit, rows)) for start in starts)


def take_rows(module: str, linear: QuantizedLinear, tensors: dict[str, Tensor]) -> Rows:
    """The sampled rows of a linear whose tensors were read. Raises QuantkitError where they cannot be decoded."""
    parts = {module + part.suffix: part for part in linear.format.parts(module, linear.shape, linear.grid)}
    unit = max((along[1] for part in parts.values() for along in part.axes if along and along[0] == "N"), default=1)
    ranges = sampled_ranges(linear.shape[0], unit)
    cuts = [{name: _cut(tensor, parts[name], "N", *each) for name, tensor in tensors.items()} for each in ranges]
    return _joined([_view(module, linear, cut) for cut in cuts], ranges)


def plain_rows(survey: Survey, name: str) -> Rows:
    """The sampled rows of a matrix that is stored plain."""
    info = survey.tensors[name]
    ranges = sampled_ranges(info.shape[0])
    columns = (0, info.shape[1])
    return Rows(torch.cat([survey.shards.read(info, (each, columns)) for each in ranges]).float(), ranges)


def _cut(tensor: Tensor, part: StoredPart, axis: Axis, start: int, stop: int) -> Tensor:
    block = part.block(axis, start, stop)
    for dimension, (first, last) in enumerate(block or ()):
        if dimension < tensor.dim() and (first, last) != (0, tensor.shape[dimension]):
            tensor = tensor.narrow(dimension, first, last - first)
    return tensor.contiguous()


def _view(module: str, linear: QuantizedLinear, tensors: dict[str, Tensor]) -> Rows:
    g_idx, format = tensors.get(f"{module}.g_idx"), linear.format.member(module)
    if isinstance(format, Gptq) and g_idx is not None:
        weight = format.unpack(module, {name: tensor for name, tensor in tensors.items() if not name.endswith(".g_idx")})
        count = tensors[f"{module}.scales"].shape[0]
        named = g_idx.long().clamp(0, count - 1)
        of_group = named if format.desc_act and bool(g_idx.any()) else None
        return _of_weight(weight, of_group)
    return _of_weight(linear.format.unpack(module, tensors), None)


def _of_weight(weight: Weight, of_group: Tensor | None) -> Rows:
    if isinstance(weight, IntWeight):
        groups = torch.arange(weight.shape[1]) // weight.group_size if of_group is None else of_group
        zero = None if weight.zero_point is None else weight.zero_point.float()
        codes = weight.codes.float()
        centred = codes if zero is None else codes - zero[:, groups]
        return Rows(centred * weight.scale[:, groups], (), codes, zero, weight.scale, groups, weight.bits)
    if isinstance(weight, Fp4Weight):
        table = torch.tensor(E2M1_VALUES)
        groups = torch.arange(weight.shape[1]) // FP4_GROUP
        scale = weight.scale.float() * weight.global_scale
        return Rows(dequantize(weight), (), table[weight.codes.long()], None, scale, groups, 4)
    if isinstance(weight, Mxfp4Weight):
        groups = torch.arange(weight.shape[1]) // MX_GROUP
        scale = torch.exp2(weight.exponent.float() - 127)
        return Rows(dequantize(weight), (), torch.tensor(E2M1_VALUES)[weight.codes.long()], None, scale, groups, 4)
    return Rows(dequantize(weight), ())


def _joined(rows: list[Rows], ranges: tuple[tuple[int, int], ...]) -> Rows:
    first = rows[0]

    def cat(name: str) -> Tensor | None:
        every = [getattr(one, name) for one in rows]
        if all(one is None for one in every):
            return None
        # Zero points of some ranges may all be zero, which is none.
        return torch.cat([torch.zeros(row.scale.shape) if one is None and row.scale is not None else one for one, row in zip(every, rows)])

    return Rows(torch.cat([one.values for one in rows]), ranges, cat("codes"), cat("zero_point"), cat("scale"), first.of_group, first.bits)
