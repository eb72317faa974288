"""Which scale a group gets.

A candidate is judged by what it leads to: the consumers' rows (a sample of them) are really
rounded, compensated where the recipe compensates, and the losses relative to each consumer's own
output are added up. For activations of 8 or 4 bits the error of
rounding them is added: of 8 bits on some thousand rows, as the few with large values make most of
it. The identity is always among the candidates, so no group is worse off than without scales.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from quantkit.calibrate.linear_solver import Solver
from quantkit.calibrate.statistics import InputStatistics
from quantkit.grids.e2m1 import input_divisor
from quantkit.models.activation_quant import rounded_to_nvfp4
from quantkit.models.value_heads import ValueHeads
from quantkit.quant.awq import candidate_scales, power_of_two, relative_weight
from quantkit.quant.gptq import Curvature
from quantkit.quant.smooth import activation_loss, smoothing_candidates

BATCH_VALUES = {"cpu": 2**22}
"""Weights that the search rounds at a time, over all candidates, by kind of device: accelerators
want more."""
ACCELERATOR_VALUES = 2**28


@dataclass(frozen=True)
class Consumer:
    """rows float32 [..., n, K]: a sample of a consumer's weight. share: what its relative loss
    counts. solver: what rounds it.

    importance [n]: what a squared error in the output of each row counts; alike without.
    """

    rows: Tensor
    share: float
    solver: Solver
    importance: Tensor | None = None

    def row_weight(self, mean_hessian: Tensor) -> Tensor:
        """[..., n]: times the loss of each row, summed up, they give the share of the loss in the
        mean squared output."""
        importance = (
            torch.ones_like(self.rows[..., 0])
            if self.importance is None
            else self.importance.expand(self.rows.shape[:-1])
        )
        energy = ((self.rows @ mean_hessian) * self.rows).sum(-1)
        return (
            self.share * importance / (energy * importance).sum(-1, keepdim=True).clamp(min=1e-30)
        )


def sample_rows(w: Tensor, count: int) -> Tensor:
    """About `count` evenly spaced rows of [..., N, K], in memory of their own."""
    return w[..., :: max(1, w.shape[-2] // count), :].contiguous()


def choose_scale(
    solver: Solver,
    consumers: Sequence[Consumer],
    curvature: Curvature,
    inputs: InputStatistics,
    exact: bool,
    heads: ValueHeads | None = None,
) -> Tensor:
    """The best scale [..., K] for inputs with this curvature and these statistics, which may have
    leading dimensions too.

    exact: only powers of two, because a 16-bit reader must absorb the scale without rounding.
    heads: see `ScaleGroup`.
    """
    candidates = _candidates(solver, consumers, inputs)
    if heads is not None:
        candidates = heads.alike(candidates)
    if exact:
        candidates = torch.unique_consecutive(power_of_two(candidates), dim=0)
    rows = torch.cat([consumer.rows for consumer in consumers], dim=-2)
    stacks = [
        (own, [one.rows.shape[-2] for one in alike])
        for own, alike in groupby(consumers, key=lambda consumer: consumer.solver)
    ]
    row_weight = torch.cat(
        [consumer.row_weight(inputs.mean_hessian) for consumer in consumers], dim=-1
    )
    losses = []
    for part in candidates.split(_at_once(rows)):
        split = rows.split([sum(lengths) for _, lengths in stacks], dim=-2)
        loss = torch.cat(
            [_losses(own, w, part, lengths, curvature) for (own, lengths), w in zip(stacks, split)],
            dim=-1,
        )
        losses.append((loss * row_weight).sum(-1))
        if "smooth" in solver.methods or solver.activation_bits < 16:
            energy = ((rows * part.unsqueeze(-2)).square() * row_weight.unsqueeze(-1)).sum(-2)
        if solver.activation_bits == 4:  # one by one: rounding holds several copies of the sample
            losses[-1] += torch.stack(
                [
                    nvfp4_loss(inputs.sample / scale.unsqueeze(-2), own)
                    for scale, own in zip(part, energy)
                ]
            )
        elif "smooth" in solver.methods or solver.activation_bits == 8:
            losses[-1] += torch.stack(
                [
                    activation_loss(inputs.rows / scale.unsqueeze(-2), own)
                    for scale, own in zip(part, energy)
                ]
            )
    best = torch.cat(losses).argmin(0)  # [...], the first of equals
    return candidates.gather(0, best[None, ..., None].expand(1, *candidates.shape[1:])).squeeze(0)


def nvfp4_loss(x: Tensor, column_energy: Tensor) -> Tensor:
    """Squared output error per token, float32 [...], of rounding rows x [..., T, K] to NVFP4 under
    the divisor of their largest value.

    column_energy [..., K]: squared norm of each weight column. Errors of channels are taken as
    independent.
    """
    error = rounded_to_nvfp4(x, input_divisor(x.abs().amax((-1, -2), keepdim=True))).sub_(x)
    return (error.square_().mean(-2) * column_energy).sum(-1)


def _losses(
    solver: Solver, rows: Tensor, scale: Tensor, lengths: list[int], curvature: Curvature
) -> Tensor:
    """Loss of every row [C, ..., n] of linears that lie one after the other, `lengths` rows each,
    under candidates [C, ..., K]."""
    amax = torch.stack(
        [(w * scale.unsqueeze(-2)).abs().amax((-1, -2)) for w in rows.split(lengths, dim=-2)],
        dim=-1,
    )
    return solver.losses(
        rows,
        scale,
        amax.repeat_interleave(torch.tensor(lengths, device=rows.device), dim=-1),
        curvature,
    )


def _at_once(rows: Tensor) -> int:
    """Candidates that are tried together on rows [..., n, K]."""
    return max(1, BATCH_VALUES.get(rows.device.type, ACCELERATOR_VALUES) // rows.numel())


def _candidates(solver: Solver, consumers: Sequence[Consumer], inputs: InputStatistics) -> Tensor:
    """All ones first. "smooth" has largest magnitudes of activations and weights, "awq" their sizes
    in the mean; both of them, both. Both are tried with fourth moments of activations of 8 bits,
    too, as a row's step goes by its largest value."""
    rows, recipe, found = [consumer.rows for consumer in consumers], solver.recipe, []
    fourth = (
        [inputs.rows.square().square_().mean(-2).sqrt().sqrt()]
        if solver.activation_bits == 8
        else []
    )
    if "smooth" in solver.methods:
        weight_max = torch.stack([w.abs().amax(-2) for w in rows]).amax(0)
        found += [
            smoothing_candidates(size, weight_max, recipe.scale_points)
            for size in (inputs.absmax, *fourth)
        ]
    if "awq" in solver.methods:
        size = inputs.mean_hessian.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
        weight = relative_weight(rows, solver.group_size)
        found += [
            candidate_scales(one, weight, recipe.scale_points, recipe.weight_points)
            for one in (size, *fourth)
        ]
    return torch.cat(found)
