"""A linear quantized by GPTQ and coordinate descent; with an output cost, rows compensate for rows
as columns do for columns.

With output costs it minimises tr(M E H E^T), E = W - Q, H the second moment of the inputs and M
that of the loss's gradient with respect to the outputs: the cost of an error there (two-sided
feedback of YAQA, arXiv 2505.22988, here with Cholesky factors and in blocks of rows). With M = U
U^T as H = V V^T in `gptq`, the loss is the squared norm of U^T E V, whose row i depends on rows <=
i of E only. Rows of a block I that compensate for all earlier error E_P, in any columns, are W_I +
inv(U_II)^T U_PI^T E_P: they replace W_I, and GPTQ rounds them column by column. Rows of one block
do not compensate for each other. If M consists of parts whose errors have no joint cost, such as
the heads of attention, a block has rows of each.

Shapes: w [..., N, K]; leading dimensions (experts) run as one batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.base import Quantizer, Scales, fit_scales
from quantkit.quant.block_rounding import GroupScales, group_of_columns, take
from quantkit.quant.gptq import Curvature, Descent, descend, gptq, put_back
from quantkit.quant.tensor_cores import error_product


@dataclass(frozen=True)
class CompensatedRows:
    """values float32 [..., N, K] on the grid; step and zero [..., N, G]; loss float32 [..., N] =
    diag(E H E^T), damping included."""

    values: Tensor
    scales: Scales
    loss: Tensor


def compensate(
    w: Tensor, curvature: Curvature, quantizer: Quantizer, descent: Descent | None = None
) -> CompensatedRows:
    """Values of the grid for W float32 [..., N, K], in channel order; the curvature has W's leading
    dimensions, or none."""
    return compensate_with_scales(
        w, fit_scales(w, quantizer, curvature.conditional), curvature, quantizer, descent
    )


def compensate_with_scales(
    w: Tensor, scales: Scales, curvature: Curvature, quantizer: Quantizer, descent: Descent | None
) -> CompensatedRows:
    """The same with given scales [..., N, G], which are kept unless descent fits them."""
    order = curvature.order
    columns, steps = take(w.mT, order), GroupScales(scales, group_of_columns(order, w, quantizer))
    factored_error = None if descent is None else torch.empty_like(columns)
    values, loss = gptq(columns, curvature, quantizer, steps, factored_error)
    if descent is not None and factored_error is not None:
        loss = descend(values, factored_error, curvature, quantizer, steps, descent)
        scales = steps.of_rows
    return CompensatedRows(put_back(values, order).mT.contiguous(), scales, loss)


ROW_BLOCKS = 8
"""On tiny-r1, 6 blocks lose nothing against rows one by one."""


def compensate_both(
    w: Tensor,
    curvature: Curvature,
    outputs: Curvature,
    quantizer: Quantizer,
    most_rows: int | None = None,
    descent: Descent | None = None,
) -> tuple[Tensor, Scales]:
    """Values of the grid for W float32 [..., N, K], and the scales [..., N, G]. curvature: of the
    inputs, as for `compensate`; outputs: of the outputs, one [N, N] for all, or [P, n, n] of P
    independent parts of n rows; most_rows: of a block, if memory is short; descent: run on every
    block before the next compensates for it."""
    scales = fit_scales(w, quantizer, curvature.conditional)
    values = torch.empty_like(w)
    count = outputs.factor.shape[-1]
    parts = outputs.factor.numel() // count**2
    first = count * torch.arange(parts, device=w.device)[:, None]
    size = -(-count // ROW_BLOCKS)
    blocks = (first + outputs.order.view(parts, count)).split(
        size if most_rows is None else min(size, -(-most_rows // parts)), dim=1
    )
    start = 0
    for number, block in enumerate(blocks):
        stop, rows = start + block.shape[1], block.flatten()
        target = w.index_select(-2, rows)
        if number:
            update = outputs.row_update(start, stop).view(parts, stop - start, start)
            compensation, before = torch.zeros_like(target).unflatten(-2, (parts, -1)), 0
            for earlier in blocks[:number]:  # one at a time: their errors are not kept
                own = earlier.flatten()
                error = (
                    w.index_select(-2, own)
                    .sub_(values.index_select(-2, own))
                    .unflatten(-2, (parts, -1))
                )
                compensation += error_product(
                    update[..., before : before + earlier.shape[1]], error
                )
                before += earlier.shape[1]
            target += compensation.flatten(-3, -2)
        fitted = _select_rows(scales, rows)
        rounded = compensate_with_scales(target, fitted, curvature, quantizer, descent)
        values.index_copy_(-2, rows, rounded.values)
        if descent is not None:
            scales.scale.index_copy_(-2, rows, rounded.scales.scale)
        start = stop
    return values, scales


def _select_rows(scales: Scales, rows: Tensor) -> Scales:
    return scales.map(lambda t: t.index_select(-2, rows))


def sample_output_directions(outputs: Curvature, count: int) -> Tensor:
    """About `count` evenly spaced columns of U, [N, C], rows in memory order: |U^T E x|^2 is the
    cost of an error E at input x, and these are a sample of its terms. Of P parts, equally many of
    each."""
    parts = 1 if outputs.order.dim() == 1 else len(outputs.order)
    rows = outputs.order.shape[-1]
    columns = outputs.factor[..., :: max(1, parts * rows // count)]
    placed = torch.zeros_like(columns).scatter_(
        -2, outputs.order.unsqueeze(-1).expand_as(columns), columns
    )
    return placed if placed.dim() == 2 else torch.block_diag(*placed)
