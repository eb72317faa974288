"""What codes of a linear tell by themselves: constant, saturated, on one side, without a bit, in
another order."""

from collections.abc import Iterator

from quantkit.checkpoint.check import QuantizedLinear
from quantkit.diagnosis.measures import ORDERS, Measures, correlation_with_zeros, reordered
from quantkit.diagnosis.stored_rows import Rows
from quantkit.grids.schemes import IntGrid

_SPREAD = 0.62
"""Of half the range: codes that are spread wider are none of one maximum. Even ones have 0.577."""
_FOLLOWS = 0.3
"""Correlation of mean codes with zero points below which they do not belong together; true ones
have 0.6 and more."""
_ONE_SIDE = 0.04
"""Share of codes on one side of the zero point, of those that are not on it: weights lie on
both."""
_BETWEEN = 0.01
"""Share of codes between the zero point and half of the range; normally a half."""
_CONSTANT = 0.98
_CONSTANT_LINES = 0.05
"""Share of rows or columns; models are padded by less."""

Told = tuple[str, str]
"""The name of a finding, and the evidence."""


def code_faults(
    linear: QuantizedLinear, rows: Rows, found: Measures, *, symmetric: bool
) -> Iterator[Told]:
    """What is wrong with the codes of the sampled rows. symmetric: whether the description says so
    of all linears."""
    if rows.codes is None or rows.bits < 4:
        return
    points = rows.zero_point
    said = isinstance(linear.grid, IntGrid) and (symmetric or linear.grid.symmetric)
    if said and points is not None and points.unique().numel() > 2:
        yield (
            "description-wrong",
            "it says sym true, and zero points differ: engines then leave them out",
        )
    if found.rms == 0:
        return  # what that means, others of its kind tell
    if found.commonest > _CONSTANT:
        yield "codes-constant", f"{found.commonest:.1%} of its codes are one value"
        return
    for share, what in ((found.constant_rows, "rows"), (found.constant_columns, "columns")):
        if share > _CONSTANT_LINES:
            yield "codes-constant", f"{share:.1%} of its {what} hold one code each"
    if found.dead_bit is not None:
        yield (
            "codes-constant",
            f"bit {found.dead_bit} of its codes is the same in all of them: it was lost",
        )
    yield from _spread(linear, rows, found)
    if found.follows is not None and found.follows < _FOLLOWS:
        yield from _order(rows, found.follows)


def _spread(linear: QuantizedLinear, rows: Rows, found: Measures) -> Iterator[Told]:
    assert rows.codes is not None
    group = (
        rows.codes.shape[1] // rows.scale.shape[1]
        if rows.scale is not None
        else rows.codes.shape[1]
    )
    wide = isinstance(linear.grid, IntGrid) and found.spread > _SPREAD
    if not _ONE_SIDE < found.positive < 1 - _ONE_SIDE:
        yield (
            "codes-shifted",
            f"{found.positive:.0%} of its codes lie above the zero point: weights lie on both sides",
        )
    elif wide and found.ends < 2 * found.beside_ends:
        yield (
            "codes-shifted",
            f"codes are spread over {found.spread:.2f} of half the range, more than even ones: few "
            "lie at the zero point",
        )
    elif _is_of_three_values(rows):
        return
    elif wide or (found.ends > (0.4 if found.bits == 4 else 0.05) and group >= 32):
        yield "codes-saturated", f"{found.ends:.1%} of its codes are at the ends of the range"


def _is_of_three_values(rows: Rows) -> bool:
    """Whether codes are the ends of the range and the zero point, and hardly any between: so are
    weights of three values, rounded to nearest. Where a scale is too small, codes beside the zero
    point are as many as those on it; where it is four times too small, they are half of the range
    away."""
    assert rows.codes is not None
    off = (
        rows.codes if rows.zero_point is None else rows.codes - rows.by_input(rows.zero_point)
    ).abs()
    between = float(((off > 0) & (off < 0.75 * off.max())).float().mean())
    return between < _BETWEEN and float((off == 0).float().mean()) > 4 * _BETWEEN


def _order(rows: Rows, follows: float) -> Iterator[Told]:
    """Codes that do not lie around their zero points: the order that would put them there, if one
    does."""
    best = ("", follows)
    for name, order in ORDERS.items():
        for axis, along in ((0, "outputs"), (1, "inputs")):
            codes = reordered(rows, order, axis)
            again = correlation_with_zeros(rows, codes) if codes is not None else None
            if again is not None and again > best[1]:
                best = (f"{name}, along the {along}", again)
    if best[1] > follows + 0.3:
        yield (
            "packing-order",
            f"mean codes of groups follow their zero points by {follows:.2f}, and by {best[1]:.2f} "
            f"with {best[0]}",
        )
    elif follows < 0.1:
        yield (
            "zero-points-foreign",
            f"mean codes of groups follow their zero points by {follows:.2f} only",
        )
