"""A matrix beside the source's: the factors that carry one into the other, and whether what these
leave is the error of rounding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.diagnosis.stored_rows import Rows

_UNEVEN = 0.08
"""Median distance of the logarithms of rows' factors from their median; rounding leaves a fifth of
that."""
SMALL = 0.1
"""Mean square, of the median one's, below which a column may be lost beside others of its group."""
_GROUP_OFF, _GROUPS_OFF = 0.12, 0.03
"""How far the scale of a group may be off what fits best, in the median, and the share of groups
that may be by half."""
GRID_VALUES = 16
"""The most values that a row of a matrix has, whose values were rounded before, among so many
inputs."""
_RANK, _MORE = 8, 1.5
"""Rank that an adapter may have to be seen, and times that an error must be what rounding
leaves."""
_DIRECTIONS = 256
"""Rows and columns that a rank is told of, at least: of 128, half of what GPTQ leaves behind
correlated inputs lies in eight directions."""
_STEPS_OFF = 4.0
"""Times that an error may be what rounding to the nearest step leaves: GPTQ and AutoRound leave up
to twice of it."""


@dataclass(frozen=True)
class SourceFit:
    """W' ~ diag(r) W diag(c). error: |W' - diag(r) W diag(c)| / |W'|. columns: c [K]. size: median of |r c|."""

    error: float
    columns: Tensor
    rows: Tensor
    size: float


def fit(ours: Tensor, theirs: Tensor) -> SourceFit:
    """ours, theirs: float32 [n, K], a linear's rows here and in the source."""
    columns, rows = torch.ones(theirs.shape[1]), torch.ones(theirs.shape[0])
    for _ in range(3):
        part = theirs * rows[:, None]
        columns = (ours * part).sum(0) / part.square().sum(0).clamp(min=1e-20)
        part = theirs * columns
        rows = (ours * part).sum(1) / part.square().sum(1).clamp(min=1e-20)
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


def column_noise(ours: Tensor, theirs: Tensor, found: SourceFit) -> float:
    """How far fitted factors of columns are off by rounding, in log: by what those of some rows are
    off those of other rows. Both matrices float32 [n, K]."""
    if len(ours) < 4:
        return found.error
    step = max(len(ours) // 64, 1)
    taken, part = ours[::step], theirs[::step] * found.rows[::step, None]
    both, own = taken * part, part.square()
    logs = [
        (both[first::2].sum(0) / own[first::2].sum(0).clamp(min=1e-20)).abs().clamp(min=1e-6).log()
        for first in (0, 1)
    ]
    return float((logs[0] - logs[1]).abs().median()) / 2 / step**0.5


def cosine(ours: Tensor, theirs: Tensor) -> float:
    """Of all elements of two float32 [n, K], after fitting the columns: 1 where one is the other
    with rounding, 0 to 1."""
    return max(0.0, 1 - fit(ours, theirs).error ** 2) ** 0.5


def _distances(factors: Tensor) -> Tensor:
    """Of logarithms from their median."""
    logs = factors.abs().clamp(min=1e-6).log()
    return (logs - logs.median()).abs()


def spread_of(factors: Tensor) -> float:
    """Median distance of the logarithms of factors, of any shape, from their median."""
    return float(_distances(factors).median())


def are_uneven(rows: Tensor) -> bool:
    """Whether factors of rows [n] differ by more than rounding and clipping make them."""
    off = _distances(rows)
    return float(off.median()) > _UNEVEN or float((off > 4 * _UNEVEN).float().mean()) > _UNEVEN


def group_fault(rows: Rows, part: Tensor) -> str:
    """Whether scales of groups are other groups' ones; empty if not. part: float32 [n, K], the
    source's rows, scaled as the linear was."""
    if rows.scale is None or rows.of_group is None or rows.bits < 4 or rows.scale.shape[1] < 2:
        return ""
    both, own = rows.group_means(rows.values * part), rows.group_means(part.square())
    known = own > SMALL * own.median()
    off = (both[known] / own[known] - 1).abs()
    if not off.numel():
        return ""
    usual, far = float(off.median()), float((off > 0.5).float().mean())
    if usual > _GROUP_OFF or far > _GROUPS_OFF:
        return (
            f"scales of its groups are {usual:.0%} off what fits the source, in the median, "
            f"and {far:.1%} of them by half and more"
        )
    return ""


def step_fault(rows: Rows, found: SourceFit) -> str:
    """Whether 8 bits are further off than their steps explain."""
    if rows.scale is None or rows.of_group is None or rows.codes is None or rows.bits != 8:
        return ""
    size = float(rows.values.square().mean().sqrt())
    step = float(rows.by_input(rows.scale).square().mean().sqrt()) / 12**0.5 / max(size, 1e-20)
    if found.error <= _STEPS_OFF * step + 0.01:
        return ""
    return f"error {found.error:.3f} where steps of its size leave {step:.3f}"


def low_rank_fault(rows: Rows, left: Tensor) -> str:
    """Whether what is left of a linear is a matrix of low rank: rounding leaves all directions
    alike. left: float32 [n, K], W' - W, fitted."""
    if (
        rows.scale is None
        or rows.of_group is None
        or rows.codes is None
        or min(left.shape) < _DIRECTIONS
    ):
        return ""
    step = float(rows.scale.square().mean().sqrt()) / 12**0.5
    if float(torch.linalg.vector_norm(left)) / left.numel() ** 0.5 <= _MORE * step:
        return ""
    energy = torch.linalg.eigvalsh(left @ left.T if len(left) <= left.shape[1] else left.T @ left)
    share = float(energy[-_RANK:].sum() / energy.sum().clamp(min=1e-30))
    return (
        f"what differs from the source has rank {_RANK} to {share:.0%}: an adapter was merged into "
        "one of the two"
        if share > 0.5
        else ""
    )


def is_on_grid(values: Tensor) -> bool:
    """Whether rows [n, K] hold few values among the first inputs: they were rounded, and stored
    plain."""
    first = values[:: max(len(values) // 16, 1), : 4 * GRID_VALUES]
    return all(row.unique().numel() <= GRID_VALUES for row in first)


def shift_of(rows: Rows, theirs: Tensor) -> float:
    """Mean of (W' - W) in steps of the grid, without codes at the ends of an integer grid, which
    may be clamped; 0 without any. theirs: float32 [n, K], W."""
    if rows.codes is None or rows.scale is None or rows.of_group is None:
        return 0.0
    step = rows.by_input(rows.scale)
    off = (rows.values - theirs) / torch.where(step == 0, torch.ones_like(step), step)
    if rows.is_e2m1:
        return float(off.mean())
    inside = rows.codes.abs() < 2 ** (rows.bits - 1) - 1
    return float((off * inside).sum() / inside.sum().clamp(min=1))
