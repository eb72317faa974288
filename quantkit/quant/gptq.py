"""GPTQ (arXiv 2210.17323): round column by column, with the remaining columns compensating for the
error so far.

Minimises tr(E H E^T), E = W - Q and H = X^T X, over the values Q of a grid. Written with one upper
triangular factor H = V V^T instead of the inverse of H: the loss is the squared norm of E V, whose
column k depends on columns <= k of E only. Columns of a block C that compensate for all earlier
error E_P are W_C + E_P V_PC inv(V_CC), so one product per block and the inverse of a small triangle
replace the update of all later columns, and one Cholesky replaces three.

Scaling channels by s changes H into D^-1 H D^-1 (D = diag s) and V into D^-1 V: a scale search
needs no further factorization.

Columns are ordered by descending energy of the channels ("static activation ordering"): the largest
go first, when many others remain to compensate. Scales are fitted beforehand, to the groups in
memory order, so the format needs no record of the order.

Shapes: w [..., N, K], factors [..., K, K]; leading dimensions (experts, candidates) broadcast and
run as one batch.

Coordinate descent (as CDQuant, arXiv 2406.17542): columns rounded by GPTQ are rounded again,
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
from functools import cached_property

import torch
from torch import Tensor

from quantkit.grids.base import Quantizer, Scales, fit_scales
from quantkit.quant.block_rounding import (
    BlockParts,
    ColumnScales,
    GroupScales,
    RoundBlock,
    group_of_columns,
    has_cpp,
    round_block_cpp,
    round_block_torch,
    take,
)
from quantkit.quant.tensor_cores import (
    add_error_product,
    add_error_product_,
    add_product,
    error_product,
    mirror_,
)

OUTER = 512
"""Columns updated at once for the errors of all earlier ones: as wide as matrix products need to be
fast."""
BLOCK = 128
_PANEL = 512
"""Rows of a large square that are permuted at a time."""


@dataclass(frozen=True)
class Curvature:
    """Curvature of a layer's inputs, in GPTQ's order.

    factor [..., K, K] of the damped Hessian, and energy [..., K], that Hessian's diagonal, are
    permuted by order [..., K]: position i holds channel order[i].
    """

    factor: Tensor
    energy: Tensor
    order: Tensor

    @classmethod
    def of(cls, hessian: Tensor, damping: float, shrinkage: float = 0.0) -> "Curvature":
        """From H = sum of x x^T over tokens, float32 [..., K, K], not mutated."""
        order = _by_energy(hessian)
        return cls._of_(_permuted(hessian, order.flip(-1)), order, damping, shrinkage)

    @classmethod
    def of_(cls, hessian: Tensor, damping: float, shrinkage: float = 0.0) -> "Curvature":
        """The same of one H, [K, K], in its memory."""
        order = _by_energy(hessian)
        return cls._of_(permute_(hessian, order.flip(-1)), order, damping, shrinkage)

    @classmethod
    def _of_(
        cls, reverse: Tensor, order: Tensor, damping: float, shrinkage: float = 0.0
    ) -> "Curvature":
        """From H with its channels in the reverse of `order`, in its memory: Cholesky's factor is
        lower, and an upper one is needed, which that of the reverse is, reversed back."""
        energy = damp_(reverse, damping, shrinkage).diagonal(dim1=-2, dim2=-1).flip(-1)
        factor = mirror_(reverse).mT  # LAPACK's matrices are column by column
        return cls(reverse_(torch.linalg.cholesky(factor, out=factor)), energy, order)

    @property
    def diagonal(self) -> Tensor:
        """Of the Hessian, [..., K], in channel order."""
        return self._in_place(self.energy)

    @cached_property
    def triangles(self) -> tuple["TriangularBlock", ...]:
        """The blocks of BLOCK columns on the factor's diagonal; the last may be smaller."""
        columns = self.factor.shape[-1]
        blocks = [
            self.factor[..., start : start + BLOCK, start : start + BLOCK]
            for start in range(0, columns, BLOCK)
        ]
        whole = columns // BLOCK
        together = TriangularBlock.of(torch.stack(blocks[:whole])).unbind if whole else ()
        return (*together, *(TriangularBlock.of(block) for block in blocks[whole:]))

    @cached_property
    def descent_panels(self) -> tuple["DescentPanel", ...]:
        """Each OUTER columns for a sweep of descent."""
        columns = range(0, self.factor.shape[-1], OUTER)
        return tuple(DescentPanel.of(self.factor[..., at : at + OUTER, at:]) for at in columns)

    @cached_property
    def _row_updates(self) -> dict[tuple[int, int], Tensor]:
        return {}

    def row_update(self, start: int, stop: int) -> Tensor:
        """inv(U_II)^T U_PI^T [..., C, start] of the factor U: change of rows I, start..stop, for
        errors of the rows P before. Kept: all experts of a layer share it."""
        key = start, stop
        if key not in self._row_updates:
            own = slice(start, stop)
            before, triangle = self.factor[..., :start, own].mT, self.factor[..., own, own].mT
            self._row_updates[key] = torch.linalg.solve_triangular(triangle, before, upper=False)
        return self._row_updates[key]

    @property
    def conditional(self) -> Tensor:
        """Cost of a squared error in each channel once the channels after it have compensated for
        it, [..., K], in channel order."""
        return self._in_place(self.factor.diagonal(dim1=-2, dim2=-1).square())

    def _in_place(self, permuted: Tensor) -> Tensor:
        return torch.empty_like(permuted).scatter_(-1, self.order.expand_as(permuted), permuted)

    def solved(self, a: Tensor) -> Tensor:
        """A H^-1 for A [..., N, K], in channel order."""
        order = self.order.unsqueeze(-2).expand_as(a)
        half = torch.linalg.solve_triangular(
            self.factor.mT, a.gather(-1, order), upper=False, left=False
        )
        half = torch.linalg.solve_triangular(self.factor, half, upper=True, left=False)
        return torch.empty_like(a).scatter_(-1, order, half)

    def scaled(self, scale: Tensor) -> "Curvature":
        """The curvature for inputs divided by `scale` [..., K]."""
        s = scale.gather(-1, self.order)
        return Curvature(self.factor / s.unsqueeze(-1), self.energy / s / s, self.order)

    def scaled_(self, scale: Tensor) -> "Curvature":
        """The same in place of this one, which must not be used afterwards; scale [K]."""
        s = scale.gather(-1, self.order)
        return Curvature(self.factor.div_(s.unsqueeze(-1)), self.energy / s / s, self.order)


@dataclass(frozen=True)
class TriangularBlock:
    """A block T [..., C, C] on the diagonal of a factor. pivot [..., C, 1]: its diagonal;
    inverse_t: inv(T)^T, the update from earlier blocks; update: -(pivot inv(T))^T, the update
    inside the block."""

    pivot: Tensor
    inverse_t: Tensor
    update: Tensor

    @classmethod
    def of(cls, block: Tensor) -> "TriangularBlock":
        one = torch.eye(block.shape[-1], device=block.device)
        inverse = torch.linalg.solve_triangular(block, one.expand_as(block), upper=True)
        pivot = block.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).contiguous()
        return cls(pivot, inverse.mT, column_major(-(pivot * inverse).mT))

    @property
    def unbind(self) -> tuple["TriangularBlock", ...]:
        """The blocks along the first dimension."""
        return tuple(map(TriangularBlock, self.pivot, self.inverse_t, self.update))


@dataclass(frozen=True)
class DescentBlock:
    """Of a block of C columns of the Hessian, with A its part below the diagonal, row i divided by
    H_ii.

    change (I + A)^-1 / H_jj [..., C, C]: change of column i for a unit of column j's target; own I
    - (I + A)^-1 [..., C, C]: its change for the rounding error of column j.
    """

    change: Tensor
    own: Tensor

    @classmethod
    def of(cls, hessian: Tensor) -> "DescentBlock":
        diagonal = hessian.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        one = torch.eye(hessian.shape[-1], device=hessian.device)
        inverse = torch.linalg.solve_triangular(
            (hessian / diagonal).tril(-1) + one, one.expand_as(hessian), upper=False
        )
        return cls(inverse / diagonal.mT, column_major(one - inverse))


@dataclass(frozen=True)
class DescentPanel:
    """Up to OUTER columns for a sweep. rows [..., C, R]: of the factor, from the first of these
    columns on; hessian [..., C, C]: these columns' own; blocks: each BLOCK of them."""

    rows: Tensor
    hessian: Tensor
    blocks: tuple[DescentBlock, ...]

    @classmethod
    def of(cls, rows: Tensor) -> "DescentPanel":
        hessian = rows @ rows.mT
        starts = range(0, rows.shape[-2], BLOCK)
        own = (hessian[..., at : at + BLOCK, at : at + BLOCK] for at in starts)
        return cls(rows, hessian, tuple(map(DescentBlock.of, own)))


def column_major(update: Tensor) -> Tensor:
    """[..., C, C] with the coefficients of one column contiguous on a GPU, as its kernel reads
    them."""
    return update.mT.contiguous().mT if update.is_cuda else update


def _by_energy(hessian: Tensor) -> Tensor:
    """Channels of [..., K, K] by descending energy, [..., K]."""
    energy = hessian.diagonal(dim1=-2, dim2=-1)
    return energy.argsort(dim=-1, descending=True, stable=True)


def permute_(square: Tensor, order: Tensor) -> Tensor:
    """[K, K] with rows and columns in `order` [K], in place; needs one panel of memory."""
    for dim in (0, 1):
        for panel in square.split(_PANEL, 1 - dim):
            panel.copy_(panel.index_select(dim, order))
    return square


def _permuted(square: Tensor, order: Tensor) -> Tensor:
    """[..., K, K] with rows and columns in `order` [..., K]; needs one panel of memory besides the
    result."""
    result = torch.empty(square.shape, dtype=square.dtype, device=square.device)
    size = square.shape[-1]
    for out, one, index in zip(
        result.view(-1, size, size), square.reshape(-1, size, size), order.reshape(-1, size)
    ):
        for rows in range(0, size, _PANEL):
            out[rows : rows + _PANEL] = one[index[rows : rows + _PANEL]].index_select(1, index)
    return result


def damp_(hessian: Tensor, damping: float, shrinkage: float = 0.0) -> Tensor:
    """H += damping * mean(diag H) * I + shrinkage * diag H; a zero matrix becomes I, so that
    weights are simply rounded.

    Damping regularizes directions without tokens; shrinkage reduces correlations estimated from few
    tokens.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    extra = damping * diagonal.mean(-1, keepdim=True)
    diagonal += torch.where(extra > 0, extra + shrinkage * diagonal, torch.ones_like(extra))
    return hessian


def reverse_(square: Tensor) -> Tensor:
    """Reverse rows and columns in place, which reverses all values."""
    size = square.shape[-1]
    for start in range(0, (size + 1) // 2, _PANEL):
        stop = min(start + _PANEL, (size + 1) // 2)
        upper, lower = square[..., start:stop, :], square[..., size - stop : size - start, :]
        flipped = upper.flip(-1, -2)
        upper.copy_(lower.flip(-1, -2))
        lower.copy_(flipped)
    return square


def scaled_losses(w: Tensor, scale: Tensor, curvature: Curvature, quantizer: Quantizer) -> Tensor:
    """Loss [C, ..., N] of compensated W s, for inputs divided by s. W float32 [..., N, K], scale
    [C, ..., K]: candidates.

    Rounding W s to scales t and dividing by s is rounding W to t / s: all candidates share one
    factor, and are additional rows.
    """
    scales = fit_scales(w * scale.unsqueeze(-2), quantizer, curvature.conditional / scale.square())
    order = curvature.order
    columns = take(w.mT, order)
    steps = GroupScales(
        _candidates_as_rows(scales),
        group_of_columns(order, w, quantizer),
        take(scale.movedim(0, -1), order),
    )
    columns = columns.unsqueeze(-2).expand(*columns.shape[:-1], len(scale), -1).flatten(-2)
    _, loss = gptq(columns, curvature, quantizer, steps)
    return loss.unflatten(-1, (len(scale), -1)).movedim(-2, 0)


def gptq(
    w: Tensor,
    curvature: Curvature,
    quantizer: Quantizer,
    steps: GroupScales,
    factored_error: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Values of the grid [..., K, N], and loss [..., N], of the transposed W, [..., K, N]: a
    channel is contiguous in memory. All in the order of the curvature. factored_error [..., K, N],
    if given, becomes V^T E, whose square is the loss."""
    columns, factor, round_block = w.shape[-2], curvature.factor, block_rounder(w.device)
    error, values = torch.empty_like(w), torch.empty_like(w)
    loss = torch.zeros_like(w[..., 0, :])
    for outer in range(0, columns, OUTER):
        after = min(outer + OUTER, columns)
        from_before = error_product(factor[..., :outer, outer:after].mT, error[..., :outer, :])
        for start in range(outer, after, BLOCK):
            stop, triangle = min(start + BLOCK, after), curvature.triangles[start // BLOCK]
            before = from_before[..., start - outer : stop - outer, :]
            if start > outer:
                before = add_error_product(
                    before, factor[..., outer:start, start:stop].mT, error[..., outer:start, :]
                )
            block = w[..., start:stop, :]
            target = add_product(block, triangle.inverse_t, before)
            seen_here = (
                torch.empty_like(target)
                if factored_error is None
                else factored_error[..., start:stop, :]
            )
            parts = BlockParts(
                values[..., start:stop, :],
                block,
                error[..., start:stop, :],
                seen_here,
                triangle.pivot,
            )
            round_block(target, triangle.update, quantizer, steps.of(start, stop), parts)
            if factored_error is None:
                loss += seen_here.square_().sum(-2)
    return values, loss if factored_error is None else factored_error.square().sum(-2)


def block_rounder(device: torch.device) -> RoundBlock:
    """The implementation of block rounding for a device; on a GPU one kernel launch."""
    if device.type == "cuda":
        # Triton is part of PyTorch's GPU builds.
        from quantkit.quant.block_kernel import round_block

        return round_block
    return round_block_cpp if device.type == "cpu" and has_cpp() else _round_block_by_torch


def _round_block_by_torch(
    target: Tensor, update: Tensor, quantizer: Quantizer, steps: ColumnScales, parts: BlockParts
) -> None:
    """A `RoundBlock`."""
    aliased = parts.before.data_ptr() == parts.values.data_ptr()
    before = parts.before.clone() if aliased else parts.before
    errors = round_block_torch(target, update, quantizer, steps.spread, parts.values)
    if parts.factored_error is not None and parts.pivot is not None:
        torch.mul(errors, parts.pivot, out=parts.factored_error)
    torch.sub(before, parts.values, out=parts.difference)


def _candidates_as_rows(scales: Scales) -> Scales:
    """Scales of candidates [C, ..., N, G] as those of additional rows, [..., C * N, G]."""
    return scales.map(lambda t: t.movedim(0, -3).flatten(-3, -2))


def put_back(t: Tensor, index: Tensor) -> Tensor:
    """The inverse of `take`, of all rows."""
    return take(t, index.argsort(-1))


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
    """Every column once. factored_error: V^T E, updated after every panel: inside a panel a block's
    gradient E H is brought up to date by the panel's own part of H."""
    round_block, start = block_rounder(values.device), 0
    for panel in curvature.descent_panels:
        errors = factored_error[..., start:, :]
        gradient = error_product(panel.rows, errors)
        less, done = torch.empty_like(gradient), 0
        for block in panel.blocks:
            here = slice(done, done + block.own.shape[-1])
            wanted = gradient[..., here, :]
            if done:
                wanted = add_error_product(
                    wanted, panel.hessian[..., here, :done], less[..., :done, :]
                )
            first, last = start + here.start, start + here.stop
            own = values[..., first:last, :]
            round_block(
                add_product(own, block.change, wanted),
                block.own,
                quantizer,
                steps.of(first, last),
                BlockParts(own, own, less[..., here, :]),
            )
            done = here.stop
        add_error_product_(errors, panel.rows.mT, less)
        start += done


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
