"""Coordinate descent (as CDQuant, arXiv 2406.17542): columns rounded by GPTQ are rounded again,
given the current errors of all others.

GPTQ lets a column compensate for those before it, never for those after. Here a column's best value
is its current one plus (E H)_k / H_kk, and the loss tr(E H E^T) decreases with every column. If
scales are to be fitted, every group gets, between two sweeps over the columns, the scale that is
best for its codes, if its stored value is better than the current one.

With D the change that each column of a block needs before the block is processed, A the block of H
below its diagonal, row i divided by H_ii, and L the rounding errors, the changes needed one after
the other are (I + A)^-1 D + (I - (I + A)^-1) L: a block of GPTQ with another target and another
update matrix, so the same loop, or kernel, rounds it. As there, H = V V^T, and V^T E is kept up to
date. A sweep takes twice GPTQ's arithmetic, and so does a fit of all scales.

Shapes: values and factored_error [..., K, N], columns in the order of the curvature; leading
dimensions (experts) run as one batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.base import Quantizer, Scales
from quantkit.quant.block_rounding import BlockParts, GroupScales, take
from quantkit.quant.gptq import BLOCK, Curvature, block_rounder
from quantkit.quant.tensor_cores import add_error_product_, add_product, error_product


@dataclass(frozen=True)
class Descent:
    """sweeps: over all columns. fits_steps: of the groups, between two sweeps."""

    sweeps: int
    fits_scales: bool = False


WIDEST = 0.3
"""Largest relative change of a scale in one sweep."""


def descend(
    values: Tensor,
    factored_error: Tensor,
    curvature: Curvature,
    quantizer: Quantizer,
    steps: GroupScales,
    descent: Descent,
) -> Tensor:
    """Lower the loss of `values`, whose errors E are given by factored_error = V^T E: values,
    scales and factored_error change in place. Returns the loss [..., N]."""
    for number in range(descent.sweeps):
        if number and descent.fits_scales:
            _refit(values, factored_error, curvature, quantizer, steps)
        _sweep(values, factored_error, curvature, quantizer, steps)
    return factored_error.square().sum(-2)


def _sweep(
    values: Tensor,
    factored_error: Tensor,
    curvature: Curvature,
    quantizer: Quantizer,
    steps: GroupScales,
) -> None:
    """Every column once. factored_error: V^T E, updated."""
    columns, factor, round_block = values.shape[-2], curvature.factor, block_rounder(values.device)
    for start, update in zip(range(0, columns, BLOCK), curvature.descent_blocks):
        stop = min(start + BLOCK, columns)
        rows, own = factor[..., start:stop, start:], values[..., start:stop, :]
        target = add_product(
            own, update.change, error_product(rows, factored_error[..., start:, :])
        )
        less = torch.empty_like(target)
        round_block(
            target, update.own, quantizer, steps.of(start, stop), BlockParts(own, own, less)
        )
        add_error_product_(factored_error[..., start:, :], rows.mT, less)


def _refit(
    values: Tensor,
    factored_error: Tensor,
    curvature: Curvature,
    quantizer: Quantizer,
    steps: GroupScales,
) -> None:
    """Every group's scale once: a group whose values are all multiplied by 1 + d reduces the loss
    by 2 d P.S - d^2 P.P, P = V^T applied to them."""
    sizes, zeros = steps.scales.scale, steps.scales.zero_point
    places = steps.groups.argsort(dim=-1, stable=True).unflatten(-1, (sizes.shape[-2], -1))
    for group in range(sizes.shape[-2]):
        place, size = places[..., group, :], sizes[..., group, :]
        own = take(values, place)
        part = take(curvature.factor, place).mT @ own
        gain, weight = (part * factored_error).sum(-2), part.square().sum(-2)
        wanted = quantizer.nearest_scale(
            size * (1 + (gain / weight.clamp(min=1e-30)).clamp(-WIDEST, WIDEST))
        )
        change = wanted / size - 1
        change = torch.where(2 * change * gain > change.square() * weight, change, 0.0)
        better = change != 0
        size = torch.where(better, wanted, size)
        codes = own / sizes[..., group, :].unsqueeze(-2)
        zero = None if zeros is None else zeros[..., group, :].unsqueeze(-2)
        scaled = quantizer.quantize(
            codes * size.unsqueeze(-2), Scales(size.unsqueeze(-2), zero)
        )  # the same codes
        factored_error -= part * change.unsqueeze(-2)
        sizes[..., group, :] = size
        _put(values, place, scaled)


def _put(values: Tensor, place: Tensor, own: Tensor) -> None:
    """Rows `place` [..., g] of [..., K, N] replaced."""
    if place.dim() == 1:
        values.index_copy_(-2, place, own)
    else:
        values.scatter_(-2, place.unsqueeze(-1).expand_as(own), own)
