"""Steps of groups as GPTQ's columns meet them, which come in the order of a curvature."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.rounding import Rounder, RoundingStep


@dataclass(frozen=True)
class ColumnSteps:
    """Of C columns. step: [..., G, N] of all groups; groups int64 [..., C], or [C] for all: whose
    step each column takes."""

    step: RoundingStep
    groups: Tensor

    @property
    def spread(self) -> RoundingStep:
        """Of every column, [..., C, N]."""
        step, zero = self.step.step, self.step.zero
        return RoundingStep(
            take(step, self.groups), None if zero is None else take(zero, self.groups)
        )


class Steps:
    """Steps [..., N, G] as the columns meet them. groups int64 [..., K]: whose step each takes, in
    the order of the columns; scale [..., K, C] divides the steps of C candidates, whose rows lie
    one after the other in N."""

    def __init__(self, step: RoundingStep, groups: Tensor, scale: Tensor | None = None) -> None:
        self.step = RoundingStep(
            step.step.mT.contiguous(), None if step.zero is None else step.zero.mT.contiguous()
        )
        self.groups, self.scale = groups, scale

    def of(self, start: int, stop: int) -> ColumnSteps:
        """Of columns start..stop."""
        own = ColumnSteps(self.step, self.groups[..., start:stop])
        if self.scale is None:
            return own
        scale, spread = self.scale[..., start:stop, :], own.spread
        step = (
            spread.step.unflatten(-1, (scale.shape[-1], -1)).div_(scale.unsqueeze(-1)).flatten(-2)
        )
        return ColumnSteps(
            RoundingStep(step, spread.zero), torch.arange(stop - start, device=step.device)
        )

    @property
    def of_rows(self) -> RoundingStep:
        """As they were given, [..., N, G], with what has become of them."""
        return RoundingStep(
            self.step.step.mT.contiguous(),
            None if self.step.zero is None else self.step.zero.mT.contiguous(),
        )


def step_groups(order: Tensor, w: Tensor, rounder: Rounder) -> Tensor:
    return order.div(rounder.group_size or w.shape[-1], rounding_mode="floor")


def take(t: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [..., C] of [..., K, N], contiguous."""
    if index.dim() == 1:
        return t.contiguous().index_select(
            -2, index
        )  # whole rows: several times as fast as from what lies transposed
    return t.gather(-2, index.unsqueeze(-1).expand(*index.shape, t.shape[-1]))
