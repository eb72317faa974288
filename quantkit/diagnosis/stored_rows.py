"""What a linear stores, some of its rows at a time: codes with zero points and scales, whatever the
format.

Every byte is read and looked at; codes are taken apart for SAMPLED rows only, which bounds time and
memory by the bytes of one linear.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.checkpoint.check import QuantizedLinear
from quantkit.checkpoint.formats.base import Axis, StoredPart
from quantkit.checkpoint.formats.gptq import Gptq
from quantkit.diagnosis.survey import Survey
from quantkit.grids.weights import (
    FP4_GROUP,
    MX_GROUP,
    Fp4Weight,
    IntWeight,
    Mxfp4Weight,
    Weight,
    decode_e2m1,
    dequantize,
)

_SCALES = (".scales", ".weight_scale", ".weight_scale_inv")
_RANGES, _ROWS = 4, 64
"""Rows that are taken apart: ranges, evenly spread, and rows of each."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a linear. values: what they stand for, float32 [n, K]. ranges: which rows they
    are.

    Of integers: codes float32 [n, K] and zero_point [n, G], signed; of_group [K] is the group of
    each input. Of FP4 codes are values of
    E2M1 without scale. scale: float32 [n, G]; bits: of a code; is_e2m1: whether codes are values of
    FP4. in_order: whether all groups are of one size, one behind the other.
    """

    values: Tensor
    ranges: tuple[tuple[int, int], ...]
    codes: Tensor | None = None
    zero_point: Tensor | None = None
    scale: Tensor | None = None
    of_group: Tensor | None = None
    bits: int = 16
    is_e2m1: bool = False
    in_order: bool = True

    def by_input(self, of_groups: Tensor) -> Tensor:
        """[n, G] -> [n, K]: to each input what its group has."""
        assert self.of_group is not None
        if self.in_order:
            return of_groups.repeat_interleave(len(self.of_group) // of_groups.shape[1], 1)
        return of_groups[:, self.of_group]

    def group_means(self, of_inputs: Tensor) -> Tensor:
        """[n, K] -> [n, G]: means over the inputs of each group."""
        assert self.of_group is not None
        assert self.scale is not None
        count = self.scale.shape[1]
        if self.in_order:
            return of_inputs.unflatten(1, (count, -1)).mean(2)
        members = torch.bincount(self.of_group, minlength=count).clamp(min=1)
        return torch.zeros(len(of_inputs), count).index_add_(1, self.of_group, of_inputs) / members


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
    """The sampled rows of a linear whose tensors were read. Raises QuantkitError where they cannot
    be decoded."""
    parts = {
        module + part.suffix: part
        for part in linear.format.parts(module, linear.shape, linear.grid)
    }
    unit = max(
        (along[1] for part in parts.values() for along in part.axes if along and along[0] == "N"),
        default=1,
    )
    ranges = _with_extremes(
        sampled_ranges(linear.shape[0], unit), parts, tensors, linear.shape[0], unit
    )
    cuts = [
        {name: _cut(tensor, parts[name], "N", *each) for name, tensor in tensors.items()}
        for each in ranges
    ]
    return _joined([_view(module, linear, cut) for cut in cuts], ranges)


def _with_extremes(
    ranges: tuple[tuple[int, int], ...],
    parts: Mapping[str, StoredPart],
    tensors: Mapping[str, Tensor],
    rows: int,
    unit: int,
) -> tuple[tuple[int, int], ...]:
    """Also the rows of the smallest and of the largest scale: what is wrong with scales is wrong
    there."""
    found = list(ranges)
    for name, tensor in tensors.items():
        part = parts[name]
        along = next(
            (
                number
                for number, one in enumerate(part.axes)
                if one and one[0] == "N" and one[1] <= unit
            ),
            None,
        )
        if len(ranges) == 1 or along is None or tensor.dim() != 2 or not name.endswith(_SCALES):
            continue
        size = tensor.float().abs()
        for extreme in (size.amin(1 - along).argmin(), size.amax(1 - along).argmax()):
            start = int(extreme) * (part.axes[along] or ("N", 1))[1] // unit * unit
            stop = min(start + unit, rows)
            if not any(first < stop and start < last for first, last in found):
                found.append((start, stop))
    return tuple(sorted(found))


def plain_rows(survey: Survey, name: str) -> Rows:
    """The sampled rows of a matrix that is stored plain."""
    info = survey.tensors[name]
    ranges = sampled_ranges(info.shape[0])
    columns = (0, info.shape[1])
    return Rows(
        torch.cat([survey.shards.read(info, (each, columns)) for each in ranges]).float(), ranges
    )


def _cut(tensor: Tensor, part: StoredPart, axis: Axis, start: int, stop: int) -> Tensor:
    block = part.block(axis, start, stop)
    for dimension, (first, last) in enumerate(block or ()):
        if dimension < tensor.dim() and (first, last) != (0, tensor.shape[dimension]):
            tensor = tensor.narrow(dimension, first, last - first)
    return tensor.contiguous()


def _view(module: str, linear: QuantizedLinear, tensors: dict[str, Tensor]) -> Rows:
    g_idx, format = tensors.get(f"{module}.g_idx"), linear.format.member(module)
    if isinstance(format, Gptq) and g_idx is not None:
        weight = format.unpack(
            module,
            {name: tensor for name, tensor in tensors.items() if not name.endswith(".g_idx")},
        )
        count = tensors[f"{module}.scales"].shape[0]
        named = g_idx.long().clamp(0, count - 1)
        of_group = named if format.desc_act and bool(g_idx.any()) else None
        return _of_weight(weight, of_group)
    return _of_weight(linear.format.unpack(module, tensors), None)


def _of_weight(weight: Weight, of_group: Tensor | None) -> Rows:
    """of_group: int64 [K], where the groups are not one behind the other."""
    if isinstance(weight, IntWeight):
        zero = None if weight.zero_point is None else weight.zero_point.float()
        return _of_codes(
            weight.codes.float(),
            zero,
            weight.scale,
            weight.group_size,
            weight.bits,
            of_group=of_group,
        )
    if isinstance(weight, Fp4Weight):
        return _of_codes(
            decode_e2m1(weight.codes),
            None,
            weight.scale.float() * weight.global_scale,
            FP4_GROUP,
            4,
            is_e2m1=True,
        )
    if isinstance(weight, Mxfp4Weight):
        return _of_codes(
            decode_e2m1(weight.codes),
            None,
            torch.exp2(weight.exponent.float() - 127),
            MX_GROUP,
            4,
            is_e2m1=True,
        )
    return Rows(dequantize(weight), (), bits=8)


def _of_codes(
    codes: Tensor,
    zero: Tensor | None,
    scale: Tensor,
    group: int,
    bits: int,
    *,
    of_group: Tensor | None = None,
    is_e2m1: bool = False,
) -> Rows:
    """group: inputs of a scale; of_group: which scale each input has, where that is not their
    order."""
    count = codes.shape[1]
    in_order = of_group is None and group * scale.shape[1] == count
    groups = torch.arange(count) // group if of_group is None else of_group
    rows = Rows(codes, (), codes, zero, scale, groups, bits, is_e2m1, in_order)
    centred = codes if zero is None else codes - rows.by_input(zero)
    return replace(rows, values=centred * rows.by_input(scale))


def _joined(rows: list[Rows], ranges: tuple[tuple[int, int], ...]) -> Rows:
    first = rows[0]

    def cat(name: str) -> Tensor | None:
        every = [getattr(one, name) for one in rows]
        if all(one is None for one in every):
            return None
        # Zero points of some ranges may all be zero, which is none.
        return torch.cat(
            [
                torch.zeros(row.scale.shape) if one is None and row.scale is not None else one
                for one, row in zip(every, rows)
            ]
        )

    return Rows(
        torch.cat([one.values for one in rows]),
        ranges,
        cat("codes"),
        cat("zero_point"),
        cat("scale"),
        first.of_group,
        first.bits,
        first.is_e2m1,
        first.in_order,
    )
