"""GPTQ (arXiv 2210.17323): round column by column, letting the columns still to come make up for the error so far.

Minimises tr(E H E^T), E = W - Q and H = X^T X, over the values Q of a grid. Written with one upper triangular factor
H = V V^T instead of the inverse of H: the loss is the squared norm of E V, whose column k depends on columns <= k of E only.
Columns of a block C that make all earlier error E_P good are W_C + E_P V_PC inv(V_CC), so one product per block and the
inverse of a small triangle replace the update of all later columns, and one Cholesky replaces three.

Scaling channels by s turns H into D^-1 H D^-1 (D = diag s) and V into D^-1 V: a scale search needs no further factoring.

The order is by falling energy of the channels ("static activation ordering"): the largest go first, when there are still many others
left to compensate. Steps are fitted beforehand, to the groups as they lie in memory, so the format needs no record of the order.

Shapes: w [..., N, K], factors [..., K, K]; leading dimensions (experts, candidates) broadcast and run as one batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.quant.rounding import Rounder, Step, fit_steps

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
    def of(cls, hessian: Tensor, damping: float, shrinkage: float = 0.0) -> "Curvature":
        """From H = sum of x x^T over tokens, float32 [..., K, K], not mutated."""
        order = hessian.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
        permuted = hessian.gather(-1, order.unsqueeze(-2).expand_as(hessian)).gather(-2, order.unsqueeze(-1).expand_as(hessian))
        permuted = damp_(permuted, damping, shrinkage)
        return cls(permuted, factor(permuted), order)

    @property
    def hessian(self) -> Tensor:
        s = self.scale
        return self.unscaled if s is None else self.unscaled / s.unsqueeze(-1) / s.unsqueeze(-2)

    @property
    def diagonal(self) -> Tensor:
        """Of the Hessian, [..., K], in the order of the channels."""
        diagonal = self.unscaled.diagonal(dim1=-2, dim2=-1)
        return self._in_place(diagonal if self.scale is None else diagonal / self.scale / self.scale)

    @property
    def conditional(self) -> Tensor:
        """What a squared error in each channel costs once the channels after it have made up for it, [..., K], in their own order."""
        return self._in_place(self.factor.diagonal(dim1=-2, dim2=-1).square())

    def _in_place(self, permuted: Tensor) -> Tensor:
        return torch.empty_like(permuted).scatter_(-1, self.order.expand_as(permuted), permuted)

    def scaled(self, scale: Tensor) -> "Curvature":
        """The curvature for inputs divided by `scale` [..., K]; leading dimensions of either may be candidates."""
        assert self.scale is None
        s = scale.gather(-1, self.order.expand_as(scale))
        return Curvature(self.unscaled, self.factor / s.unsqueeze(-1), self.order, s)

    def into_scaled(self, scale: Tensor) -> "Curvature":
        """The same in the memory of this one, which is no more; scale [K]."""
        s = scale.gather(-1, self.order)
        return Curvature(self.unscaled.div_(s.unsqueeze(-1)).div_(s.unsqueeze(-2)), self.factor.div_(s.unsqueeze(-1)), self.order)


def damped(hessian: Tensor, damping: float, shrinkage: float = 0.0) -> Tensor:
    """`damp_`, not in place."""
    return damp_(hessian.clone(), damping, shrinkage)


def damp_(hessian: Tensor, damping: float, shrinkage: float = 0.0) -> Tensor:
    """H += damping * mean(diag H) * I + shrinkage * diag H; all zeros become I, so that weights are simply rounded.

    Damping guards the directions that no token took; shrinkage doubts the correlations that few tokens show.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    extra = damping * diagonal.mean(-1, keepdim=True)
    diagonal += torch.where(extra > 0, extra + shrinkage * diagonal, torch.ones_like(extra))
    return hessian


def factor(hessian: Tensor) -> Tensor:
    """Upper triangular V [..., K, K] with V V^T = H, H symmetric positive definite float32.

    V is the Cholesky factor of H with its channels in reverse order, reversed back.
    """
    return torch.linalg.cholesky(hessian.flip(-1, -2)).flip(-1, -2)


def compensate(w: Tensor, curvature: Curvature, rounder: Rounder) -> Rounded:
    """Values of the grid for W float32 [..., N, K], channels as they lie in memory."""
    batch = _broadcast(w[..., 0, 0], curvature.factor[..., 0, 0])
    w = w.expand(*batch, *w.shape[-2:])
    step = fit_steps(w, rounder, curvature.conditional)
    order = curvature.order.expand(*batch, -1)
    wide = order.unsqueeze(-2).expand_as(w)
    groups = order.div(rounder.group_size or w.shape[-1], rounding_mode="floor")
    result = gptq(w.gather(-1, wide), curvature.factor, rounder, step, groups)
    return Rounded(torch.empty_like(result.values).scatter_(-1, wide, result.values), step, result.loss)


def gptq(w: Tensor, factor: Tensor, rounder: Rounder, step: Step, groups: Tensor) -> Rounded:
    """Values of the grid for W under the loss of `factor`, channels in its order. groups int64 [..., K]: whose step each channel takes."""
    columns = w.shape[-1]
    batch = _broadcast(w[..., 0, 0], factor[..., 0, 0])
    w, factor = w.expand(*batch, *w.shape[-2:]), factor.expand(*batch, *factor.shape[-2:])
    groups = groups.expand(*batch, columns)

    error = torch.zeros(*batch, *w.shape[-2:], dtype=torch.float32, device=w.device)
    values = torch.empty_like(error)
    loss = torch.zeros(*batch, w.shape[-2], dtype=torch.float32, device=w.device)
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
        block = _Block(target.view(*batch, *target.shape[-2:]), inverse, triangle, _columns(step, groups[..., start:stop]))
        for strip in range(0, stop - start, STRIP):
            block.round_strip(rounder, strip, min(strip + STRIP, stop - start))
        values[..., start:stop] = block.values()
        loss += block.loss
        error[..., start:stop] = w[..., start:stop] - values[..., start:stop]
    return Rounded(values, step, loss)


def _columns(step: Step, groups: Tensor) -> Step:
    """Steps [..., N, G] of the groups [..., C] that columns belong to, as [..., C, N]."""

    def pick(t: Tensor) -> Tensor:
        return t.transpose(-1, -2).gather(-2, groups.unsqueeze(-1).expand(*groups.shape, t.shape[-2]))

    return Step(pick(step.step), None if step.zero is None else pick(step.zero))


def _broadcast(a: Tensor, b: Tensor) -> torch.Size:
    """The common shape. (torch.broadcast_shapes would import a symbolic algebra package, for more than a second.)"""
    return torch.broadcast_tensors(a, b)[0].shape


class _Block:
    """The columns in work. Kept transposed, [..., columns, N], so that one column is one run of memory; step alike."""

    def __init__(self, target: Tensor, inverse: Tensor, triangle: Tensor, step: Step) -> None:
        self.target = target.transpose(-1, -2).contiguous()
        self.rounded = torch.empty_like(self.target)
        self.inverse = inverse
        self.pivot = triangle.diagonal(dim1=-2, dim2=-1)
        self.step = step
        self.loss = torch.zeros_like(self.target[..., 0, :])

    def round_strip(self, rounder: Rounder, start: int, stop: int) -> None:
        """Round columns start..stop one by one, then let the rest of the block react to all of them at once."""
        errors = torch.empty_like(self.target[..., start:stop, :])
        zeros = self.step.zero
        for i in range(start, stop):
            column = self.target[..., i, :]
            value = rounder.snap(column, Step(self.step.step[..., i, :], None if zeros is None else zeros[..., i, :]))
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
