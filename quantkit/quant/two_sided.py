"""GPTQ with errors weighed on both sides: rows still to come make up for rows before them, as columns do for columns.

Minimises tr(M E H E^T), E = W - Q, H the second moment of the inputs and M that of the loss's gradient by the outputs: what an error
there costs (two-sided feedback of YAQA, arXiv 2505.22988, here with Cholesky factors and in blocks of rows). With M = U U^T as
H = V V^T in `gptq`, the loss is the squared norm of U^T E V, whose row i depends on rows <= i of E only. Rows of a block I that make
all earlier error E_P good, whatever their columns, are W_I + inv(U_II)^T U_PI^T E_P: they take the place of W_I, and GPTQ rounds them
column by column. Rows of one block do not see each other's errors.
"""

import torch
from torch import Tensor

from quantkit.quant.compensation import compensate_under
from quantkit.quant.descent import Descent
from quantkit.quant.gptq import Curvature
from quantkit.quant.rounding import Rounder, RoundingStep, fit_steps

ROW_BLOCKS = 8
"""On tiny-r1, 6 blocks lose nothing against rows one by one."""


def compensate_both(
    w: Tensor, curvature: Curvature, outputs: Curvature, rounder: Rounder, most_rows: int | None = None, descent: Descent | None = None
) -> tuple[Tensor, RoundingStep]:
    """Values of the grid for W float32 [..., N, K], and the steps [..., N, G]. curvature: of the inputs, as for `compensate`;
    outputs: of the outputs, one [N, N] for all; most_rows: of a block, where memory is short; descent: of every block, before the
    next makes up for it."""
    step = fit_steps(w, rounder, curvature.conditional)
    values = torch.empty_like(w)
    size = -(-len(outputs.order) // ROW_BLOCKS)
    blocks = outputs.order.split(size if most_rows is None else min(size, most_rows))
    start = 0
    for number, rows in enumerate(blocks):
        stop = start + len(rows)
        target = w.index_select(-2, rows)
        if number:
            carried, before = torch.zeros_like(target), 0
            for earlier in blocks[:number]:  # one after the other: their errors are not held
                error = w.index_select(-2, earlier).sub_(values.index_select(-2, earlier))
                carried += outputs.factor[before : before + len(earlier), start:stop].mT @ error
                before += len(earlier)
            # Solved as rows times an upper triangle: a batch of experts shares it.
            target += torch.linalg.solve_triangular(outputs.factor[start:stop, start:stop], carried.mT, upper=True, left=False).mT
        own = RoundingStep(step.step.index_select(-2, rows), None if step.zero is None else step.zero.index_select(-2, rows))
        rounded = compensate_under(target, own, curvature, rounder, descent)
        values.index_copy_(-2, rows, rounded.values)
        if descent is not None:
            step.step.index_copy_(-2, rows, rounded.step.step)
        start = stop
    return values, step


def judged_outputs(outputs: Curvature, count: int) -> Tensor:
    """About `count` evenly spaced columns of U, [N, C], their rows as they lie in memory: |U^T E x|^2 is what an error E costs at
    input x, and these are a sample of its terms."""
    columns = outputs.factor[:, :: max(1, len(outputs.order) // count)]
    return torch.empty_like(columns).index_copy_(0, outputs.order, columns)
