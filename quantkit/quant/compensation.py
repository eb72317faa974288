"""A linear rounded by GPTQ, and then by sweeps of descent where they are asked for: values, the
steps they have, and the loss that is left.

Shapes: w [..., N, K]; leading dimensions (experts) run as one batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.rounding import Rounder, RoundingStep, fit_steps
from quantkit.quant.column_steps import Steps, step_groups, take
from quantkit.quant.descent import Descent, descend
from quantkit.quant.gptq import Curvature, gptq, put_back


@dataclass(frozen=True)
class CompensatedRows:
    """values float32 [..., N, K] on the grid; step and zero [..., N, G]; loss float32 [..., N] =
    diag(E H E^T), damping included."""

    values: Tensor
    step: RoundingStep
    loss: Tensor


def compensate(
    w: Tensor, curvature: Curvature, rounder: Rounder, descent: Descent | None = None
) -> CompensatedRows:
    """Values of the grid for W float32 [..., N, K], channels as they lie in memory; the curvature
    has W's leading dimensions, or none."""
    return compensate_under(
        w, fit_steps(w, rounder, curvature.conditional), curvature, rounder, descent
    )


def compensate_under(
    w: Tensor, step: RoundingStep, curvature: Curvature, rounder: Rounder, descent: Descent | None
) -> CompensatedRows:
    """The same from steps [..., N, G] that were fitted before, which are kept where descent does
    not fit them."""
    order = curvature.order
    columns, steps = take(w.mT, order), Steps(step, step_groups(order, w, rounder))
    seen = None if descent is None else torch.empty_like(columns)
    values, loss = gptq(columns, curvature, rounder, steps, seen)
    if descent is not None and seen is not None:
        loss = descend(values, seen, curvature, rounder, steps, descent)
        step = steps.of_rows
    return CompensatedRows(put_back(values, order).mT.contiguous(), step, loss)
