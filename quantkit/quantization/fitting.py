"""Grids that fit the sizes of a model's linears: group sizes that divide the inputs, and what is
left where no group size does or packing does not divide the outputs.

Linears that engines run as one operator take one grid. Where a checkpoint may have several grids,
each of them takes the first that fits: the scheme's, the same in smaller groups, without zero
points, int8, 16 bits. Otherwise the scheme's grid has one group size, and the linears that it does
not fit have 16 bits. Of these ways the one is taken that costs the least KL at equal bytes.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantkit.calibrate.sensitivity import LinearGroup, linear_groups
from quantkit.checkpoint.formats.base import Format
from quantkit.common.errors import QuantkitError
from quantkit.grids.base import Grid, grid_label
from quantkit.grids.int_groups import IntGrid
from quantkit.models.table import Parameter

GROUP_SIZES = (128, 64, 32)
"""Of integers in groups, for which engines have kernels; the default first."""

NEARLY_ALL = 0.98
"""Of the weights of linears: with fewer on the scheme's grid another format is looked for."""

INT8 = IntGrid(bits=8, group_size=None, symmetric=True)

_ERRORS = {128: 9.1e-3, 64: 7.7e-3, 32: 6.2e-3}
"""Squared error of normally distributed weights in int4 with zero points over their square, by
group size: `round_to_nearest` with eight candidate scales."""
_FOUR_BITS, _EIGHT_BITS = 1e-2, 5e-5
"""The same for other grids."""


class Allowed(NamedTuple):
    """What one output may hold: a format, and the grids that the engine accepts for a linear."""

    format: Format
    accepts: Callable[[Parameter, Grid], bool]

    def holds(self, row: Parameter, grid: Grid) -> bool:
        """Whether a linear can be stored on a grid for its engines: by the group size, by packing,
        by the way it is cut over ranks."""
        shape = (row.shape[0], row.shape[1])
        if not self.format.takes(grid) or not self.accepts(row, grid):
            return False
        if row.role in ("head", "embedding") and row.role not in self.format.outer:
            return False
        if row.role == "head" and grid.scale_rows > 1:
            return False  # engines share out scales as they do rows, token by token
        weight_only = grid.is_integer and grid.symmetric and grid.activation_bits == 16
        if row.role == "embedding" and not (weight_only and grid.group_size):
            return False  # what vLLM's lookup decodes
        if grid.group_size is not None and shape[1] % grid.group_size:
            return False
        try:
            self.format.specs(row.module, shape, grid)
        except QuantkitError:
            return False
        return self.format.split_fault(row.module, grid, row_parallel=row.split == "row") is None

    def first(self, group: LinearGroup, candidates: Sequence[Grid]) -> Grid | None:
        """The first grid that holds all linears of a group; None: 16 bits. Rows that share a scale
        are of one linear where engines stack several."""
        stacked = [row.shape[0] for row in group.rows[:-1] if row.fused]
        return next(
            (
                grid
                for grid in candidates
                if all(self.holds(row, grid) for row in group.rows)
                and not any(size % grid.scale_rows for size in stacked)
            ),
            None,
        )


@dataclass(frozen=True)
class FittedGrids:
    """grids: by module, those of linears in 16 bits left out. mixed: whether they are for the
    format of mixed precision. base: the scheme's grid as most linears have it."""

    grids: dict[str, Grid]
    mixed: bool
    base: Grid


def in_groups_of(grid: Grid, size: int) -> Grid:
    """The grid in groups of at most `size`, where its groups have no size of their own."""
    finer = grid.with_group_size(size) if grid.group_size and grid.group_size > size else None
    return grid if finer is None else finer


def fit_grids(
    rows: Sequence[Parameter],
    grids: Mapping[str, Grid],
    base: Grid,
    sizes: Sequence[int],
    alone: Allowed,
    mixture: Allowed | None,
) -> FittedGrids:
    """Grids for the linears `rows`, which `grids` has on one grid each; those of other modules are
    kept.

    base: the scheme's. sizes: group sizes to choose from, the largest first. alone: the output with
    one group size; mixture: the one with several, if there is one.
    """
    groups = linear_groups(rows)
    own = {group: grids[group.rows[0].module] for group in groups}
    ways = []
    for size in sizes:
        found = {
            group: alone.first(group, [in_groups_of(grid, size)]) for group, grid in own.items()
        }
        ways.append((found, False, in_groups_of(base, size)))
        if all(found.values()):
            break  # smaller groups are no better at equal bytes where larger ones fit all
    if mixture is not None and (len(ways) > 1 or not all(ways[0][0].values())):
        several = {
            group: mixture.first(group, _candidates(grid, sizes)) for group, grid in own.items()
        }
        ways.append((several, True, base))
    ways = [way for way in ways if any(way[0].values())]
    if not ways:
        row = rows[0]
        raise QuantkitError(
            f"no linear of this model can be stored as {grid_label(base)}: {row.module} is "
            f"{list(row.shape)}",
            "use another scheme",
        )
    found, mixed, base = min(
        ways, key=lambda way: _cost(way[0], (mixture if way[1] and mixture else alone).format)
    )
    left = {row.module for row in rows}
    kept = {module: grid for module, grid in grids.items() if module not in left}
    chosen = {
        module: grid
        for group, grid in found.items()
        if grid is not None
        for module in group.modules
    }
    fitted = kept | chosen
    return FittedGrids(
        {module: fitted[module] for module in grids if module in fitted},
        mixed,
        base,
    )


def _candidates(grid: Grid, sizes: Sequence[int]) -> list[Grid]:
    """What a linear may be on in place of `grid`, from the best on."""
    finer = [in_groups_of(grid, size) for size in sizes]
    without = [other for one in finer for other in one.substitutes]
    return list(dict.fromkeys([*finer, *without, INT8]))


def _cost(found: Mapping[LinearGroup, Grid | None], format: Format) -> float:
    """Bits a weight, and half the binary logarithm of the mean squared error: a bit more quarters
    the error, so this compares the errors at equal bytes."""
    weights, stored, error = 0, 0.0, 0.0
    for group, grid in found.items():
        for row in group.rows:
            count = math.prod(row.shape)
            weights += count
            if grid is None:
                stored += 2 * count
                continue
            specs = format.specs(row.module, (row.shape[0], row.shape[1]), grid)
            stored += sum(spec.nbytes for spec in specs)
            error += count * _error(grid)
    return 8 * stored / weights + math.log2(error / weights) / 2


def _error(grid: Grid) -> float:
    if grid.bits == 8:
        return _EIGHT_BITS
    return _ERRORS.get(grid.group_size or 0, _FOUR_BITS) if grid.is_integer else _FOUR_BITS


def share_fitted(rows: Sequence[Parameter], before: Mapping[str, Grid], fit: FittedGrids) -> float:
    """Share of the weights that keep the kind of grid that they had."""
    kept = [
        row
        for row in rows
        if row.module in fit.grids and fit.grids[row.module].kind == before[row.module].kind
    ]
    return sum(math.prod(row.shape) for row in kept) / sum(math.prod(row.shape) for row in rows)


def describe_fit(
    rows: Sequence[Parameter], before: Mapping[str, Grid], after: Mapping[str, Grid]
) -> str:
    """What differs from the scheme, in a line; empty where nothing does."""
    changed = [row for row in rows if after.get(row.module) != before[row.module]]
    counts = Counter(grid_label(after.get(row.module)) for row in changed)
    parts = []
    for label, count in counts.most_common():
        row = next(row for row in changed if grid_label(after.get(row.module)) == label)
        share = "all linears" if count == len(rows) else f"{count} of {len(rows)} linears"
        parts.append(f"{share} in {label}, such as {row.module} {list(row.shape)}")
    if not parts:
        return ""
    return f"{grid_label(before[changed[0].module])} does not fit every linear: {'; '.join(parts)}"
