"""Sampled rows of a linear, decoded to codes, zero points and scales for any format, and their fit
to the source's rows: the row and column factors between them, and whether the rest is rounding.

Every byte is read and checked, but only sampled rows are decoded, which bounds time and memory by
the bytes of one linear.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.checkpoint.check import QuantizedLinear
from quantkit.checkpoint.formats.base import Axis, StoredPart
from quantkit.checkpoint.formats.gptq import Gptq
from quantkit.diagnosis.survey import Survey
from quantkit.grids.base import Weight, dequantize
from quantkit.models.table import ScaleGroup

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


_UNEVEN = 0.08
"""Median distance of log row factors from their median; rounding causes a fifth of that."""
SMALL = 0.1
"""Mean square relative to the median below which a column may be lost within its group."""
_MAX_GROUP_DEVIATION, _MAX_DEVIATING_GROUPS = 0.12, 0.03
"""Limits of a group scale's deviation from the best fit: the median, and the share of groups that
may deviate by half."""
_GROUP_NOISE = 0.1
"""Deviation by a linear's error up to which these limits hold; they grow with it."""
GRID_VALUES = 16
"""Maximum number of values per row of a matrix that was rounded before, within 4 times as many
inputs."""
_RANK, _EXCESS = 8, 1.5
"""Rank of an adapter that is detected, and factor over the rounding error required for that."""
_DIRECTIONS = 256
"""Minimum of rows and columns for a rank to be meaningful: of 128, half of what GPTQ leaves with
correlated inputs is in eight directions."""
_MAX_STEP_ERROR, _CORRECTED = 4.0, 0.02
"""Factor over the round-to-nearest error that is accepted: GPTQ and AutoRound leave up to twice of
it. What else a linear may be off that makes up for those before, by a few hundred tokens."""


@dataclass(frozen=True)
class SourceFit:
    """W' ~ diag(r) W diag(c). error: |W' - diag(r) W diag(c)| / |W'|. columns: c [K]. size: median
    of |r c|."""

    error: float
    columns: Tensor
    rows: Tensor
    size: float


def fit(ours: Tensor, theirs: Tensor) -> SourceFit:
    """ours, theirs: float32 [n, K], rows of a linear here and in the source."""
    columns, rows = torch.ones(theirs.shape[1]), torch.ones(theirs.shape[0])
    pair = (ours != 0) | (theirs != 0)
    for _ in range(3):
        part = theirs * rows[:, None]
        columns = (ours * part).sum(0) / part.square().sum(0).clamp(min=1e-20)
        part = theirs * columns
        rows = (ours * part).sum(1) / part.square().sum(1).clamp(min=1e-20)
    # What is zero in both, as padding is, has no factor of its own.
    rows, columns = (
        _filled(of, part) for of, part in ((rows, pair.any(1)), (columns, pair.any(0)))
    )
    middle = float(rows.abs().median().clamp(min=1e-20))
    rows, columns = rows / middle, columns * middle
    left = ours - theirs * rows[:, None] * columns
    norm = float(ours.norm())
    return SourceFit(
        float(left.norm()) / norm if norm else 0.0,
        columns,
        rows,
        float(columns.abs().median() * rows.abs().median()),
    )


def _filled(factors: Tensor, known: Tensor) -> Tensor:
    """The factors, with the median of the known ones in place of the others."""
    if bool(known.all()) or not bool(known.any()):
        return factors
    return torch.where(known, factors, factors[known].abs().median())


def column_noise(ours: Tensor, theirs: Tensor, found: SourceFit) -> float:
    """Rounding noise of the fitted column factors, in log: the difference between fits to the even
    and the odd rows. Both matrices float32 [n, K]."""
    if len(ours) < 4:
        return found.error
    step = max(len(ours) // 64, 1)
    sample, part = ours[::step], theirs[::step] * found.rows[::step, None]
    both, own = sample * part, part.square()
    logs = [
        (both[first::2].sum(0) / own[first::2].sum(0).clamp(min=1e-20)).abs().clamp(min=1e-6).log()
        for first in (0, 1)
    ]
    return float((logs[0] - logs[1]).abs().median()) / 2 / step**0.5


def cosine(ours: Tensor, theirs: Tensor) -> float:
    """Cosine of two float32 [n, K] after fitting: 1 if one is the other up to rounding, 0 to 1."""
    return max(0.0, 1 - fit(ours, theirs).error ** 2) ** 0.5


def _distances(factors: Tensor) -> Tensor:
    """Distances of the logarithms from their median."""
    logs = factors.abs().clamp(min=1e-6).log()
    return (logs - logs.median()).abs()


def spread_of(factors: Tensor) -> float:
    """Median distance of the logarithms of factors, of any shape, from their median."""
    return float(_distances(factors).median())


def are_uneven(rows: Tensor) -> bool:
    """Whether row factors [n] differ by more than rounding and clipping cause."""
    off = _distances(rows)
    return float(off.median()) > _UNEVEN or float((off > 4 * _UNEVEN).float().mean()) > _UNEVEN


def group_fault(rows: SampledRows, part: Tensor) -> str:
    """Whether group scales belong to other groups; empty if not. part: float32 [n, K], the source's
    rows, scaled as the linear was."""
    if rows.scale is None or rows.of_group is None or rows.bits < 4 or rows.scale.shape[1] < 2:
        return ""
    both, own = rows.group_means(rows.values * part), rows.group_means(part.square())
    known = own > SMALL * own.median()
    off = (both[known] / own[known] - 1).abs()
    if not off.numel():
        return ""
    left = float((rows.values - part).norm() / part.norm())
    noise = left / (rows.values.shape[1] / rows.scale.shape[1]) ** 0.5
    off /= max(noise / _GROUP_NOISE, 1.0)
    usual, far = float(off.median()), float((off > 0.5).float().mean())
    if usual > _MAX_GROUP_DEVIATION or far > _MAX_DEVIATING_GROUPS:
        return (
            f"group scales are {usual:.0%} off the best fit to the source in the median, "
            f"and {far:.1%} of them by half or more"
        )
    return ""


def step_fault(rows: SampledRows, found: SourceFit) -> str:
    """Whether the error of 8-bit codes is larger than their steps explain."""
    if rows.scale is None or rows.of_group is None or rows.codes is None or rows.bits != 8:
        return ""
    size = float(rows.values.square().mean().sqrt())
    step = float(rows.by_input(rows.scale).square().mean().sqrt()) / 12**0.5 / max(size, 1e-20)
    if found.error <= _MAX_STEP_ERROR * step + _CORRECTED:
        return ""
    return f"error {found.error:.3f}, and steps of its size cause {step:.3f}"


def low_rank_fault(rows: SampledRows, left: Tensor) -> str:
    """Whether the rest has low rank, unlike rounding error. left: float32 [n, K], W' - W,
    fitted. 8 bits are judged by their steps: what GPTQ leaves of them, by few tokens, has low rank."""
    if (
        rows.bits >= 8
        or rows.scale is None
        or rows.of_group is None
        or rows.codes is None
        or min(left.shape) < _DIRECTIONS
    ):
        return ""
    step = float(rows.scale.square().mean().sqrt()) / 12**0.5
    if float(torch.linalg.vector_norm(left)) / left.numel() ** 0.5 <= _EXCESS * step:
        return ""
    energy = torch.linalg.eigvalsh(left @ left.T if len(left) <= left.shape[1] else left.T @ left)
    share = float(energy[-_RANK:].sum() / energy.sum().clamp(min=1e-30))
    return (
        (
            f"{share:.0%} of the difference from the source has rank {_RANK}: an adapter was "
            "merged into one of the two"
        )
        if share > 0.5
        else ""
    )


def is_on_grid(values: Tensor) -> bool:
    """Whether rows [n, K] hold few distinct values among the first inputs: rounded values stored
    unquantized."""
    first = values[:: max(len(values) // 16, 1), : 4 * GRID_VALUES]
    return all(row.unique().numel() <= GRID_VALUES for row in first)


def shift_of(rows: SampledRows, theirs: Tensor) -> float:
    """Mean of (W' - W) in steps of the grid, without the possibly clamped ends of an integer grid;
    0 if there is no grid. theirs: float32 [n, K], W."""
    if rows.codes is None or rows.scale is None or rows.of_group is None:
        return 0.0
    step = rows.by_input(rows.scale)
    off = (rows.values - theirs) / torch.where(step == 0, torch.ones_like(step), step)
    if rows.is_e2m1:
        return float(off.mean())
    inside = rows.codes.abs() < 2 ** (rows.bits - 1) - 1
    return float((off * inside).sum() / inside.sum().clamp(min=1))


_OFF = 0.4
"""Log of a factor that neither rounding nor clipping explains: 1.5 times."""
_TRIM = 3.0


@dataclass(frozen=True)
class Gain:
    """Mean logarithms of a linear's fitted row and column factors. W' = diag(r) W diag(c) leaves a
    factor between r and c free."""

    rows: float
    columns: float

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor) -> "Gain":
        return cls(mean_log(rows), mean_log(columns))


def mean_log(factors: Tensor) -> float:
    """Mean logarithm of factors [n] without outliers: rows and columns that are nearly zero have
    arbitrary factors."""
    known = factors[factors != 0].abs()
    if not known.numel():
        return 0.0
    logs = known.log()
    near = logs[(logs - logs.median()).abs() < _TRIM]
    return float(near.mean()) if near.numel() else float(logs.median())


def size_faults(
    groups: Sequence[ScaleGroup], gains: Mapping[str, Gain], norm_divisors: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    """(module, evidence) of linears whose size changed: what a norm or a linear lost by folded
    scales, its consumers must have gained. norm_divisors: by norm, the mean logarithm of its
    divisor. Mean logarithms of factors add up along a chain."""
    divided: dict[str, float] = {}  # by module, what its inputs were divided by
    chains = [group for group in groups if not group.producer_is_norm]
    consumers = {module for group in groups for module in group.consumers}
    divided |= dict.fromkeys((module for module in gains if module not in consumers), 0.0)
    for group in groups:
        if group.producer_is_norm and group.producer in norm_divisors:
            divided |= dict.fromkeys(group.consumers, norm_divisors[group.producer])
    producers = {group.producer for group in chains}
    reported = set()
    for module, gain in gains.items():
        if (
            module in divided
            and module not in producers
            and abs(size := gain.columns + gain.rows - divided[module]) > _OFF
        ):
            reported.add(module)
            yield module, _size_evidence(size)
    for group in chains:
        producer = gains.get(group.producer)
        if producer is None or group.producer not in divided:
            continue
        left = producer.rows + producer.columns - divided[group.producer]
        for module in group.consumers:
            gain = gains.get(module, Gain(-left, 0.0))
            if abs(size := left + gain.columns + gain.rows) > _OFF and module not in reported:
                reported.add(module)
                yield module, f"with {group.producer} {_size_evidence(size)}"


def _size_evidence(size: float) -> str:
    return (
        f"its values are {float(torch.tensor(size).exp()):.3g} times the source's, and no "
        "scale before or after it compensates that"
    )
