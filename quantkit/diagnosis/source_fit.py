"""Fit of a matrix to the source's: the row and column factors between them, and whether the rest is
rounding error."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.diagnosis.sampled_rows import SampledRows
from quantkit.models.table import ScaleGroup

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
