"""Scales drawn for a group, to be folded by hand."""

from collections.abc import Callable

from torch import Tensor

from quantkit.models.table import ScaleGroup


def drawn_scale(
    group: ScaleGroup, rows: int, draw: Callable[[int], Tensor]
) -> tuple[Tensor, Tensor]:
    """By what the producer's `rows` rows are divided, and its readers' columns multiplied. draw: n
    -> n scales."""
    if group.heads is None:
        scale = draw(rows)
        return scale, scale
    scale = group.heads.tie(draw(group.heads.columns))
    return group.heads.producer_scales(scale), scale
