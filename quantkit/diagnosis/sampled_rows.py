"""Sampled rows of a linear, decoded to codes, zero points and scales for any format.

Every byte is read and checked, but only sampled rows are decoded, which bounds time and memory by
the bytes of one linear.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.checkpoint.check import QuantizedLinear
from quantkit.checkpoint.formats.base import Axis, StoredPart
from quantkit.checkpoint.formats.gptq import Gptq
from quantkit.diagnosis.survey import Survey
from quantkit.grids.base import Weight, dequantize

_SCALES = (".scales", ".weight_scale", ".weight_scale_inv")
_RANGES, _ROWS = 4, 64
"""Number of ranges of sampled rows, evenly spaced, and rows per range."""


@dataclass(frozen=True)
class SampledRows:
    """Sampled rows of a linear.

    values: decoded, float32 [n, K]. ranges: of the sampled rows. Of integer grids: codes float32
    [n, K] and zero_point [n, G], signed; of_group [K] is the group of each input. Of FP4 codes are
    E2M1 values without scale (is_e2m1). scale: float32 [n, G]; bits: of a code. in_order: whether
    all groups have the same size and are contiguous.
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
        """[n, G] -> [n, K]: each input gets its group's value."""
        assert self.of_group is not None
        if self.in_order:
            return of_groups.repeat_interleave(len(self.of_group) // of_groups.shape[1], 1)
        return of_groups[:, self.of_group]

    def centred(self, codes: Tensor) -> Tensor:
        """Codes [n, K] minus their zero points."""
        return codes if self.zero_point is None else codes - self.by_input(self.zero_point)

    def group_means(self, of_inputs: Tensor) -> Tensor:
        """[n, K] -> [n, G]: means over the inputs of each group."""
        assert self.of_group is not None
        assert self.scale is not None
        count = self.scale.shape[1]
        if self.in_order:
            return of_inputs.unflatten(1, (count, -1)).mean(2)
        members = torch.bincount(self.of_group, minlength=count).clamp(min=1)
        return torch.zeros(len(of_inputs), count).index_add_(1, self.of_group, of_inputs) / members

    @property
    def live(self) -> "SampledRows":
        """Without rows and groups of zeros that the model has, as padding is: their scales, of
        nothing, are all one value. Codes that were not written have the scales of their weights.
        The rows themselves if nothing is left."""
        values = self.values != 0
        rows, groups = values.any(1), torch.tensor([True])
        scale = self.scale
        if scale is None or self.of_group is None or not bool(rows.any()):
            return self
        if not bool(rows.all()) and scale[~rows].unique().numel() > 1:
            rows = torch.ones_like(rows)
        if self.in_order and scale.shape[1] > 1:
            groups = values.any(0).view(scale.shape[1], -1).any(1)
            same = (scale[rows] == scale[rows][:1]).all(0)
            groups |= ~same
        if bool(rows.all()) and bool(groups.all()):
            return self
        if not self.in_order or scale.shape[1] == 1:
            groups = torch.ones(scale.shape[1], dtype=torch.bool)
            inputs = torch.ones(values.shape[1], dtype=torch.bool)
            of_group = self.of_group
        else:
            size = values.shape[1] // scale.shape[1]
            inputs = groups.repeat_interleave(size)
            of_group = torch.arange(int(inputs.sum())) // size

        def cut(tensor: Tensor | None, columns: Tensor) -> Tensor | None:
            return None if tensor is None else tensor[rows][:, columns]

        return replace(
            self,
            values=self.values[rows][:, inputs],
            codes=cut(self.codes, inputs),
            zero_point=cut(self.zero_point, groups),
            scale=cut(scale, groups),
            of_group=of_group,
        )


def read_parts(survey: Survey, linear: QuantizedLinear) -> dict[str, Tensor]:
    """All tensors of a linear."""
    return {name: survey.shards.read(survey.tensors[name]) for name in linear.tensors}


def sampled_ranges(rows: int, unit: int = 1) -> tuple[tuple[int, int], ...]:
    """Row ranges at multiples of `unit`; all rows of a small linear."""
    if rows <= _RANGES * _ROWS:
        return ((0, rows),)
    starts = [(rows - _ROWS) * number // (_RANGES - 1) // unit * unit for number in range(_RANGES)]
    return tuple((start, min(start + -(-_ROWS // unit) * unit, rows)) for start in starts)


def sample_rows(module: str, linear: QuantizedLinear, tensors: dict[str, Tensor]) -> SampledRows:
    """The sampled rows of a linear whose tensors were read. Raises QuantkitError if they cannot be
    decoded."""
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
    return _concatenate([_decode(module, linear, cut) for cut in cuts], ranges)


def _with_extremes(
    ranges: tuple[tuple[int, int], ...],
    parts: Mapping[str, StoredPart],
    tensors: Mapping[str, Tensor],
    rows: int,
    unit: int,
) -> tuple[tuple[int, int], ...]:
    """The ranges plus the rows of the smallest and the largest scale, where faults of scales
    are."""
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


def sample_unquantized_rows(survey: Survey, name: str) -> SampledRows:
    """The sampled rows of an unquantized matrix."""
    info = survey.tensors[name]
    ranges = sampled_ranges(info.shape[0])
    columns = (0, info.shape[1])
    return SampledRows(
        torch.cat([survey.shards.read(info, (each, columns)) for each in ranges]).float(), ranges
    )


def _cut(tensor: Tensor, part: StoredPart, axis: Axis, start: int, stop: int) -> Tensor:
    block = part.block(axis, start, stop)
    for dimension, (first, last) in enumerate(block or ()):
        if dimension < tensor.dim() and (first, last) != (0, tensor.shape[dimension]):
            tensor = tensor.narrow(dimension, first, last - first)
    return tensor.contiguous()


def _decode(module: str, linear: QuantizedLinear, tensors: dict[str, Tensor]) -> SampledRows:
    g_idx, format = tensors.get(f"{module}.g_idx"), linear.format.member(module)
    if isinstance(format, Gptq) and g_idx is not None:
        weight = format.unpack(
            module,
            {name: tensor for name, tensor in tensors.items() if not name.endswith(".g_idx")},
        )
        count = tensors[f"{module}.scales"].shape[0]
        named = g_idx.long().clamp(0, count - 1)
        of_group = named if format.desc_act and bool(g_idx.any()) else None
        return _from_weight(weight, of_group)
    return _from_weight(linear.format.unpack(module, tensors), None)


def _from_weight(weight: Weight, of_group: Tensor | None) -> SampledRows:
    """of_group: int64 [K], if groups are not contiguous."""
    levels = None if isinstance(weight, Tensor) else weight.levels()
    if levels is None:
        return SampledRows(dequantize(weight), (), bits=8)
    codes, zero, scale, group, bits, is_e2m1 = levels
    count = codes.shape[1]
    in_order = of_group is None and group * scale.shape[1] == count
    groups = torch.arange(count) // group if of_group is None else of_group
    rows = SampledRows(codes, (), codes, zero, scale, groups, bits, is_e2m1, in_order)
    return replace(rows, values=rows.centred(codes) * rows.by_input(scale))


def _concatenate(rows: list[SampledRows], ranges: tuple[tuple[int, int], ...]) -> SampledRows:
    first = rows[0]

    def cat(name: str) -> Tensor | None:
        every = [getattr(one, name) for one in rows]
        if all(one is None for one in every):
            return None
        # A part whose zero points are all zero has none.
        return torch.cat(
            [
                torch.zeros(row.scale.shape) if one is None and row.scale is not None else one
                for one, row in zip(every, rows)
            ]
        )

    return SampledRows(
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
