"""GPTQ (arXiv 2210.17323): round column by column, letting the columns still to come make up for the error so far.

Minimises tr(E H E^T), E = W - Q and H = X^T X, over the values Q of a grid. Written with one upper triangular factor
H = V V^T instead of the inverse of H: the loss is the squared norm of E V, whose column k depends on columns <= k of E only.
Columns of a block C that make all earlier error E_P good are W_C + E_P V_PC inv(V_CC), so one product per block and the
inverse of a small triangle replace the update of all later columns, and one Cholesky replaces three.

Scaling channels by s turns H into D^-1 H D^-1 (D = diag s) and V into D^-1 V: a scale search needs no further factoring.

Two things the paper does not have, both free of any change of format:
- the order. Groups with the most energy go first, and so do the most energetic channels of a group, when there are still many
  others left to compensate; a group stays whole, so its step can still be fitted to what the earlier groups left over.
- sweeps of coordinate descent afterwards. Each column is rounded again, given the final error of ALL others, not only earlier ones.

Shapes: w [..., N, K], factors [..., K, K]; leading dimensions (experts, candidates) broadcast and run as one batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.quant.rounding import Rounder, Step

BLOCK = 128
STRIP = 16


@dataclass(frozen=True)
class Rounded:
    """values float32 [..., N, K] on the grid; step and zero [..., N, G]; loss float32 [..., N] = diag(E H E^T), damping included."""

    values: Tensor
    step: Step
    loss: Tensor


@dataclass(frozen=True)
class Curvature:
    """What GPTQ needs to know of a layer's inputs, in the order it works.

    unscaled [..., K, K], the damped Hessian, and factor [..., K, K] are permuted by order [..., K]: position i holds channel order[i].
    scale [..., K], in that order, divides the inputs; the factor has it in, the Hessian gets it when it is asked for.
    """

    unscaled: Tensor
    factor: Tensor
    order: Tensor
    scale: Tensor | None = None

    @classmethod
    def of(cls, hessian: Tensor, damping: float, group_size: int | None) -> "Curvature":
        """From H = sum of x x^T over tokens, float32 [..., K, K], not mutated."""
        order = energy_order(hessian.diagonal(dim1=-2, dim2=-1), group_size)
        permuted = hessian.gather(-1, order.unsqueeze(-2).expand_as(hessian)).gather(-2, order.unsqueeze(-1).expand_as(hessian))
        permuted = damp_(permuted, damping)
        return cls(permuted, factor(permuted), order)

    @property
    def hessian(self) -> Tensor:
        s = self.scale
        return self.unscaled if s is None else self.unscaled / s.unsqueeze(-1) / s.unsqueeze(-2)

    @property
    def diagonal(self) -> Tensor:
        """Of the Hessian, [..., K]."""
        diagonal = self.unscaled.diagonal(dim1=-2, dim2=-1)
        return diagonal if self.scale is None else diagonal / self.scale / self.scale

    def scaled(self, scale: Tensor) -> "Curvature":
        """The curvature for inputs divided by `scale` [..., K]; leading dimensions of either may be candidates."""
        assert self.scale is None
        s = scale.gather(-1, self.order.expand_as(scale))
        return Curvature(self.unscaled, self.factor / s.unsqueeze(-1), self.order, s)

    def into_scaled(self, scale: Tensor) -> "Curvature":
        """The same in the memory of this one, which is no more; scale [K]."""
        s = scale.gather(-1, self.order)
        return Curvature(self.unscaled.div_(s.unsqueeze(-1)).div_(s.unsqueeze(-2)), self.factor.div_(s.unsqueeze(-1)), self.order)


def energy_order(energy: Tensor, group_size: int | None) -> Tensor:
    """Channels [..., K] by falling energy, groups kept whole: int64 [..., K]."""
    groups = energy.unflatten(-1, (-1, group_size or energy.shape[-1]))
    within = groups.argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(0, energy.shape[-1], groups.shape[-1], device=energy.device).unsqueeze(-1)
    by_group = groups.sum(-1).argsort(dim=-1, descending=True, stable=True).unsqueeze(-1).expand_as(within)
    return (within + first).gather(-2, by_group).flatten(-2)


def damped(hessian: Tensor, damping: float) -> Tensor:
    """`damp_`, not in place."""
    return damp_(hessian.clone(), damping)


def damp_(hessian: Tensor, damping: float) -> Tensor:
    """H += damping * mean(diag H) * I; a channel that never fired gets 1, so that its weight is simply rounded."""
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    extra = damping * diagonal.mean(-1, keepdim=True)
    diagonal += torch.where(extra > 0, extra, torch.ones_like(extra))
    return hessian


def factor(hessian: Tensor) -> Tensor:
    """Upper triangular V [..., K, K] with V V^T = H, H symmetric positive definite float32.

    V is the Cholesky factor of H with its channels in reverse order, reversed back.
    """
    return torch.linalg.cholesky(hessian.flip(-1, -2)).flip(-1, -2)


def compensate(w: Tensor, curvature: Curvature, rounder: Rounder, sweeps: int = 1) -> Rounded:
    """Values of the grid for W float32 [..., N, K], channels in their own order: GPTQ, then `sweeps` of coordinate descent."""
    batch = _broadcast(w[..., 0, 0], curvature.order[..., 0])
    order = curvature.order.expand(*batch, -1)
    wide = order.unsqueeze(-2).expand(*batch, *w.shape[-2:])
    permuted = w.expand(*batch, *w.shape[-2:]).gather(-1, wide)
    result = gptq(permuted, curvature.factor, rounder)
    if sweeps:
        result = descend(permuted, result, curvature.hessian, rounder, sweeps)
    values = torch.empty_like(result.values).scatter_(-1, wide, result.values)
    if rounder.group_size is None:
        return Rounded(values, result.step, result.loss)
    groups = order[..., :: rounder.group_size].div(rounder.group_size, rounding_mode="floor")
    groups = groups.unsqueeze(-2).expand_as(result.step.step)
    step, zero = (None if t is None else torch.empty_like(t).scatter_(-1, groups, t) for t in (result.step.step, result.step.zero))
    assert step is not None
    return Rounded(values, Step(step, zero), result.loss)


def descend(w: Tensor, rounded: Rounded, hessian: Tensor, rounder: Rounder, sweeps: int) -> Rounded:
    """Coordinate descent over the columns, steps held fixed: tr(E H E^T) never rises.

    With all other columns fixed the best value of column j is q_j + (E H)_j / H_jj, rounded. H is damped as in `gptq`.
    """
    columns = w.shape[-1]
    group_size = rounder.group_size or columns
    values = rounded.values.clone()
    pivot = hessian.diagonal(dim1=-2, dim2=-1)
    zeros = rounded.step.zero
    for start in [*range(0, columns, BLOCK)] * sweeps:
        stop = min(start + BLOCK, columns)
        pull = ((w - values) @ hessian[..., start:stop]).transpose(-1, -2).contiguous()  # [..., columns of the block, N]
        block = values[..., start:stop].transpose(-1, -2).contiguous()
        square = hessian[..., start:stop, start:stop]
        for strip in range(0, stop - start, STRIP):
            end = min(strip + STRIP, stop - start)
            change = torch.empty_like(pull[..., strip:end, :])
            for i in range(strip, end):
                group = (start + i) // group_size
                step = Step(rounded.step.step[..., group], None if zeros is None else zeros[..., group])
                value = rounder.snap(block[..., i, :] + pull[..., i, :] / pivot[..., start + i, None], step)
                change[..., i - strip, :] = value - block[..., i, :]
                block[..., i, :] = value
                if i + 1 < end:
                    pull[..., i + 1 : end, :] -= square[..., i + 1 : end, i, None] * change[..., i - strip, None, :]
            if end < stop - start:
                pull[..., end:, :] -= square[..., end:, strip:end] @ change
        values[..., start:stop] = block.transpose(-1, -2)
    error = w - values
    return Rounded(values, rounded.step, ((error @ hessian) * error).sum(-1))


def gptq(w: Tensor, factor: Tensor, rounder: Rounder) -> Rounded:
    """Values of the grid for W under the loss given by `factor`, in the order of the channels.

    Steps of a group are fitted when its first column comes up, to the columns as compensated so far. A grid with one step
    per row has them fitted at the start.
    """
    columns = w.shape[-1]
    group_size = rounder.group_size or columns
    assert columns % group_size == 0, f"group size {group_size} does not divide {columns} channels"
    batch = _broadcast(w[..., 0, 0], factor[..., 0, 0])
    w, factor = w.expand(*batch, *w.shape[-2:]), factor.expand(*batch, *factor.shape[-2:])
    conditional = factor.diagonal(dim1=-2, dim2=-1).square().unsqueeze(-2)  # [..., 1, K]: what an error costs once later columns react
    row_step = rounder.fit(w, conditional) if rounder.group_size is None else None

    error = torch.zeros(*batch, *w.shape[-2:], dtype=torch.float32, device=w.device)
    values = torch.empty_like(error)
    loss = torch.zeros(*batch, w.shape[-2], dtype=torch.float32, device=w.device)
    steps: list[Step] = [] if row_step is None else [row_step]
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        triangle = factor[..., start:stop, start:stop]
        inverse = torch.linalg.solve_triangular(triangle, torch.eye(stop - start, device=w.device).expand_as(triangle), upper=True)
        carried = error[..., :start] @ factor[..., :start, start:stop]
        target = torch.baddbmm(
            w[..., start:stop].reshape(-1, w.shape[-2], stop - start),
            carried.reshape(-1, w.shape[-2], stop - start),
            inverse.reshape(-1, stop - start, stop - start),
        )
        block = _Block(target.view(*batch, *target.shape[-2:]), inverse, triangle, conditional[..., start:stop])
        for strip in range(start, stop, STRIP):
            if rounder.group_size is not None and strip % group_size == 0:
                steps.append(block.fit(rounder, strip - start, group_size))
            block.round_strip(rounder, steps[-1], strip - start, min(strip + STRIP, stop) - start)
        values[..., start:stop] = block.values()
        loss += block.loss
        error[..., start:stop] = w[..., start:stop] - values[..., start:stop]
    zero = None if steps[0].zero is None else torch.stack([s.zero for s in steps if s.zero is not None], dim=-1)
    return Rounded(values, Step(torch.stack([s.step for s in steps], dim=-1), zero), loss)


def _broadcast(a: Tensor, b: Tensor) -> torch.Size:
    """The common shape. (torch.broadcast_shapes would import a symbolic algebra package, for more than a second.)"""
    return torch.broadcast_tensors(a, b)[0].shape


class _Block:
    """The columns in work. Kept transposed, [..., columns, N], so that one column is one run of memory."""

    def __init__(self, target: Tensor, inverse: Tensor, triangle: Tensor, conditional: Tensor) -> None:
        self.target = target.transpose(-1, -2).contiguous()
        self.rounded = torch.empty_like(self.target)
        self.inverse = inverse
        self.pivot = triangle.diagonal(dim1=-2, dim2=-1)
        self.conditional = conditional
        self.loss = torch.zeros_like(self.target[..., 0, :])

    def fit(self, rounder: Rounder, start: int, group_size: int) -> Step:
        part = slice(start, start + group_size)
        return rounder.fit(self.target[..., part, :].transpose(-1, -2), self.conditional[..., part])

    def round_strip(self, rounder: Rounder, step: Step, start: int, stop: int) -> None:
        """Round columns start..stop one by one, then let the rest of the block react to all of them at once."""
        errors = torch.empty_like(self.target[..., start:stop, :])
        for i in range(start, stop):
            column = self.target[..., i, :]
            value = rounder.snap(column, step)
            error = (column - value) * self.pivot[..., i, None]
            self.rounded[..., i, :] = value
            errors[..., i - start, :] = error
            if i + 1 < stop:
                self.target[..., i + 1 : stop, :] -= self.inverse[..., i, i + 1 : stop, None] * error.unsqueeze(-2)
        self.loss += errors.square().sum(-2)
        if stop < self.target.shape[-2]:
            self.target[..., stop:, :] -= self.inverse[..., start:stop, stop:].transpose(-1, -2) @ errors

    def values(self) -> Tensor:
        return self.rounded.transpose(-1, -2)


def rounding_loss(w: Tensor, values: Tensor, factor: Tensor) -> Tensor:
    """diag(E H E^T) [..., N] of any values: what `gptq` minimises."""
    return ((w - values) @ factor).square().sum(-1)
