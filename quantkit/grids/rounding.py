"""A weight grid as calibration sees it: fit a step to a group, snap values to it, and turn the
result into a stored weight.

GPTQ and the scale searches work on any grid through these three verbs. A step is what one unit of
the grid is worth: value = level * step, where the levels are the integers between low - zero and
high - zero, or E2M1's values. Steps are rounded to what the format stores before anything is
snapped to them.

Shapes: [..., N, g] are N rows of one group of g input channels; leading dimensions are experts or
candidates.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from quantkit.grids.e2m1 import E2M1_MAX, E4M3_MAX, E4M3_MIN, encode_e2m1
from quantkit.grids.integer import int_params, int_range, round_int
from quantkit.grids.schemes import IntGrid
from quantkit.grids.weights import (
    FP4_GROUP,
    MX_GROUP,
    Fp4Weight,
    IntWeight,
    Mxfp4Weight,
    RoundedWeight,
)

_CACHED_VALUES = 2**17
_E2M1_EXPONENT = 2
"""Of E2M1's largest value, 6."""
_E8M0_RANGE = (-126, 127)
"""Of exponents that are stored: powers of two that float32 holds as normal numbers."""


@dataclass(frozen=True)
class RoundingStep:
    """step float32 [..., N], what one level is worth; zero float32 [..., N], the integer zero
    point, or None."""

    step: Tensor
    zero: Tensor | None


class Rounder(Protocol):
    @property
    def group_size(self) -> int | None:
        """Input channels that share a step; None for the whole row."""

    def fit(self, groups: Tensor, importance: Tensor | None = None) -> RoundingStep:
        """The step of every group. groups float32 [..., N, g]; importance [..., 1, g] weighs the
        squared error of each channel."""

    def snap(self, w: Tensor, step: RoundingStep) -> Tensor:
        """Nearest values of the grid. w float32 [..., N] or, with a step of [..., N, 1], [..., N,
        g]."""

    def stored(self, step: Tensor) -> Tensor:
        """Steps [..., N] as the nearest that the format holds."""

    def side_by_side(self) -> "Rounder":
        """The same, for all groups of a row at once: [..., G, N, g] in place of [..., N, g]."""

    def weight(self, values: Tensor, step: RoundingStep) -> RoundedWeight:
        """Values already on the grid, float32 [N, K], with the steps [N, G] they were snapped to,
        as a stored weight."""


@dataclass(frozen=True)
class IntRounder:
    """Integers. `shrink` are the fractions of the group's range that `fit` tries; (1.0,) is plain
    minimum and maximum."""

    grid: IntGrid
    scale_dtype: torch.dtype
    shrink: tuple[float, ...] = (1.0,)

    @property
    def group_size(self) -> int | None:
        return self.grid.group_size

    def fit(self, groups: Tensor, importance: Tensor | None = None) -> RoundingStep:
        ends = torch.stack(
            (groups.amin(-1), groups.amax(-1)), dim=-1
        )  # aminmax takes five times as long on a CPU
        return _best(
            self, [self._params(ends * ratio) for ratio in self.shrink], groups, importance
        )

    def _params(self, ends: Tensor) -> RoundingStep:
        """From the two ends of each group's range, [..., N, 2]."""
        scale, zero_point = int_params(ends, self.grid, self.scale_dtype)
        return RoundingStep(scale, None if zero_point is None else zero_point.float())

    def snap(self, w: Tensor, step: RoundingStep) -> Tensor:
        low, high = int_range(self.grid.bits)
        level = (w / step.step).round_()
        if step.zero is None:
            return level.clamp_(low, high).mul_(step.step)
        return level.add_(step.zero).clamp_(low, high).sub_(step.zero).mul_(step.step)

    def stored(self, step: Tensor) -> Tensor:
        return step.to(self.scale_dtype).float()

    def side_by_side(self) -> "IntRounder":
        return self

    def weight(self, values: Tensor, step: RoundingStep) -> IntWeight:
        zero_point = None if step.zero is None else step.zero.to(torch.int8)
        return IntWeight(
            round_int(values, step.step, zero_point, self.grid.bits),
            step.step,
            zero_point,
            self.grid.bits,
        )


@dataclass(frozen=True)
class Fp4Rounder:
    """E2M1 with an e4m3 scale per 16 channels under `global_scale` float32 [] or [..., N].

    `fit` starts from amax / 6 and tries the e4m3 values `neighbours` steps away: a smaller scale
    clips the largest value and is finer for the rest, a larger one lets it fall on 4 instead of 6.
    """

    global_scale: Tensor
    neighbours: tuple[int, ...] = (0,)

    @property
    def group_size(self) -> int | None:
        return FP4_GROUP

    def fit(self, groups: Tensor, importance: Tensor | None = None) -> RoundingStep:
        amax = groups.abs().amax(dim=-1)
        base = (amax / E2M1_MAX / self.global_scale).clamp(E4M3_MIN, E4M3_MAX)
        base = torch.where(amax > 0, base, torch.ones_like(base)).to(torch.float8_e4m3fn)
        # Positive e4m3 values are ordered as their bits are, so a neighbour is one bit pattern
        # away.
        bits = base.view(torch.int8).to(torch.int16)
        steps = []
        for offset in self.neighbours:
            scale = (bits + offset).clamp(1, 0x7E).to(torch.int8).view(torch.float8_e4m3fn)
            steps.append(RoundingStep(scale.float() * self.global_scale, None))
        return _best(self, steps, groups, importance)

    def snap(self, w: Tensor, step: RoundingStep) -> Tensor:
        return _snap_e2m1(w, step.step)

    def stored(self, step: Tensor) -> Tensor:
        return (step / self.global_scale).clamp(E4M3_MIN, E4M3_MAX).to(
            torch.float8_e4m3fn
        ).float() * self.global_scale

    def side_by_side(self) -> "Fp4Rounder":
        return (
            self
            if self.global_scale.dim() == 0
            else replace(self, global_scale=self.global_scale.unsqueeze(-2))
        )

    def weight(self, values: Tensor, step: RoundingStep) -> Fp4Weight:
        """All rows of one tensor share one global scale."""
        multiplier = self.global_scale.flatten()[0]
        codes = encode_e2m1(
            values.unflatten(-1, (-1, FP4_GROUP)) / step.step.unsqueeze(-1)
        ).flatten(-2)
        return Fp4Weight(codes, (step.step / multiplier).to(torch.float8_e4m3fn), multiplier)


@dataclass(frozen=True)
class Mxfp4Rounder:
    """E2M1 with a power of two per 32 channels: the largest under which the group's largest value
    stays above 4, and those `raised` by.

    The first lets values beyond 6 saturate, as compressed-tensors and OCP's MX have it; the next
    keeps all, with steps twice as wide.
    """

    raised: tuple[int, ...] = (0,)

    @property
    def group_size(self) -> int | None:
        return MX_GROUP

    def fit(self, groups: Tensor, importance: Tensor | None = None) -> RoundingStep:
        amax = groups.abs().amax(dim=-1)
        power = torch.where(amax > 0, amax.frexp().exponent - 1 - _E2M1_EXPONENT, 0)
        steps = [
            RoundingStep(torch.ldexp(torch.ones_like(amax), (power + up).clamp(*_E8M0_RANGE)), None)
            for up in self.raised
        ]
        return _best(self, steps, groups, importance)

    def snap(self, w: Tensor, step: RoundingStep) -> Tensor:
        return _snap_e2m1(w, step.step)

    def stored(self, step: Tensor) -> Tensor:
        return step.log2().round().clamp(*_E8M0_RANGE).exp2()

    def side_by_side(self) -> "Mxfp4Rounder":
        return self

    def weight(self, values: Tensor, step: RoundingStep) -> Mxfp4Weight:
        codes = encode_e2m1(values.unflatten(-1, (-1, MX_GROUP)) / step.step.unsqueeze(-1)).flatten(
            -2
        )
        return Mxfp4Weight(codes, (step.step.frexp().exponent - 1 + 127).to(torch.uint8))


def _snap_e2m1(w: Tensor, step: Tensor) -> Tensor:
    level = w / step
    # Spacing of E2M1 at |level|: 1/2 up to 2, 1 up to 4, 2 up to 6. Rounding to even in it is RNE
    # on the codes.
    spacing = torch.where(level.abs() < 2, 0.5, torch.where(level.abs() < 4, 1.0, 2.0))
    return (level / spacing).round_().mul_(spacing).clamp_(-E2M1_MAX, E2M1_MAX).mul_(step)


def _best(
    rounder: Rounder, candidates: list[RoundingStep], groups: Tensor, importance: Tensor | None
) -> RoundingStep:
    """Of several steps, the one with the least (weighted) squared error, row by row; the first of
    equals."""
    best = candidates[0]
    if len(candidates) == 1:
        return best
    error = _squared_error(rounder, best, groups, importance)
    for step in candidates[1:]:
        other = _squared_error(rounder, step, groups, importance)
        better = other < error
        error = torch.where(better, other, error)
        zero = (
            None
            if best.zero is None or step.zero is None
            else torch.where(better, step.zero, best.zero)
        )
        best = RoundingStep(torch.where(better, step.step, best.step), zero)
    return best


def _squared_error(
    rounder: Rounder, step: RoundingStep, groups: Tensor, importance: Tensor | None
) -> Tensor:
    wide = RoundingStep(
        step.step.unsqueeze(-1), None if step.zero is None else step.zero.unsqueeze(-1)
    )
    error = rounder.snap(groups, wide).sub_(groups).square_()
    return error.sum(-1) if importance is None else error.mul_(importance).sum(-1)


def fit_steps(w: Tensor, rounder: Rounder, importance: Tensor | None = None) -> RoundingStep:
    """Steps [..., N, G] for W float32 [..., N, K]. importance [..., K] weighs channels."""
    groups = _groups(w, rounder)
    if importance is not None:
        importance = importance.unflatten(-1, (-1, rounder.group_size or w.shape[-1])).unsqueeze(
            -2
        )  # [..., G, 1, g]
    step = _in_parts(rounder.side_by_side().fit, groups, importance)
    return RoundingStep(
        step.step.transpose(-1, -2), None if step.zero is None else step.zero.transpose(-1, -2)
    )


def _in_parts(
    fit: Callable[[Tensor, Tensor | None], RoundingStep], groups: Tensor, importance: Tensor | None
) -> RoundingStep:
    """Steps [..., G, N] of [..., G, N, g]; on a CPU a few groups at a time, which stay in its cache
    while steps are tried."""
    count = groups.shape[-3]
    at_once = (
        max(1, _CACHED_VALUES * count // groups.numel()) if groups.device.type == "cpu" else count
    )
    if at_once >= count:
        return fit(groups, importance)
    parts = [
        fit(some, None if importance is None else importance[..., start : start + at_once, :, :])
        for start, some in zip(range(0, count, at_once), groups.split(at_once, dim=-3))
    ]
    zeros = [part.zero for part in parts if part.zero is not None]
    return RoundingStep(
        torch.cat([part.step for part in parts], dim=-2),
        torch.cat(zeros, dim=-2) if zeros else None,
    )


def round_to_nearest(
    w: Tensor, rounder: Rounder, importance: Tensor | None = None
) -> tuple[Tensor, RoundingStep]:
    """W float32 [..., N, K] -> its values on the grid, and the steps [..., N, G] that `fit_steps`
    gives."""
    step = fit_steps(w, rounder, importance)
    zero = None if step.zero is None else step.zero.transpose(-1, -2).unsqueeze(-1)
    wide = RoundingStep(step.step.transpose(-1, -2).unsqueeze(-1), zero)
    return rounder.side_by_side().snap(_groups(w, rounder), wide).transpose(-2, -3).flatten(
        -2
    ), step


def _groups(w: Tensor, rounder: Rounder) -> Tensor:
    """[..., N, K] -> [..., G, N, g]."""
    group_size = rounder.group_size or w.shape[-1]
    assert w.shape[-1] % group_size == 0, (
        f"group size {group_size} does not divide {w.shape[-1]} channels"
    )
    return w.unflatten(-1, (-1, group_size)).transpose(-2, -3)
