"""Integers of 4 or 8 bits with a scale, and optionally a zero point, per group of input channels or
per output channel: w = (code - zero_point) * scale.

Scales are rounded to the dtype the format stores BEFORE codes are computed, so packing loses
nothing and every code is the nearest one under the scale that the engine will really use.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.grids.base import (
    Grid,
    GroupedWeight,
    Levels,
    Quantizer,
    Scales,
    Weight,
    check_group,
    extremes_of,
    relative_error,
)

if TYPE_CHECKING:
    from quantkit_kernels import Weight as KernelWeight

_SMALLEST_GROUP, _LARGEST_GROUP = 32, 128
"""Groups of the int4 operators."""
_OPERATOR_GROUPS = (32, 64, 128)
_SHRINK = {4: 0.05, 8: 0.02}
"""Spacing of the fractions of a group's range that a fit tries, by bits."""


@dataclass(frozen=True)
class IntGrid(Grid):
    """One scale per `group_size` input channels of a row, or per row where it is None.

    activation_bits: 8 for int4 in groups whose linears round their inputs to int8, with a scale per
    token. For every other grid of integers the format says so.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    activation_bits: int = 16

    @property
    def kind(self) -> str:
        return f"int{self.bits}"

    @property
    def label(self) -> str:
        parts = (
            self.kind,
            *([f"g{self.group_size}"] if self.group_size else []),
            *([] if self.symmetric else ["zero-points"]),
            *(["a8"] if self.activation_bits == 8 else []),
        )
        return "-".join(parts)

    @property
    def engine_name(self) -> str:
        match self.bits, self.group_size, self.symmetric, self.activation_bits:
            case 8, None, True, 16:
                return "int8"
            case 8, _, True, 16:
                return "int8-groups"
            case 4, _, _, 8:
                return "int4-w4a8"
            case 4, None, _, 16:
                return "int4-channel"
            case 4, _, True, 16:
                return "int4-symmetric"
            case 4, _, False, 16:
                return "int4-asymmetric"
        return self.label

    @property
    def substitutes(self) -> tuple[Grid, ...]:
        return (self,) if self.symmetric else (self, replace(self, symmetric=True))

    def with_group_size(self, size: int) -> "IntGrid":
        return replace(self, group_size=size)

    def rank_multiple(self, *, inputs: bool) -> int:
        """Four bits are packed eight to a word along the outputs."""
        if inputs:
            return self.group_size or 1
        return 8 if self.bits == 4 else 1

    def check_inputs(self, name: str, width: int) -> None:
        if self.bits == 4 or self.group_size:
            stored = self.group_size or width
            check_group(name, math.gcd(stored, width), _SMALLEST_GROUP, stored, width)

    def quantizer(self, amax: Tensor, scale_dtype: torch.dtype, fit_points: int) -> "IntQuantizer":
        shrink = tuple(1 - _SHRINK[self.bits] * i for i in range(max(fit_points, 1)))
        return IntQuantizer(self, scale_dtype, shrink)


@dataclass(frozen=True, eq=False)
class IntWeight(GroupedWeight):
    """w = (codes - zero_point) * scale, a scale per row and group of K / G input channels.

    codes int8 [N, K] in -8..7 or -127..127; scale float32 [N, G], already rounded to what the
    format stores; zero_point int8 [N, G], or None for a symmetric grid.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bits: int

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        assert self.bits in (4, 8), f"{self.bits} bits"
        assert self.codes.dtype == torch.int8, f"codes are {self.codes.dtype}"
        assert self.scale.dtype == torch.float32, f"scale is {self.scale.dtype}"
        assert self.scale.shape[0] == rows, f"scale {tuple(self.scale.shape)} for {rows} rows"
        assert columns % self.scale.shape[1] == 0, (
            f"{self.scale.shape[1]} groups do not divide {columns} columns"
        )
        if self.zero_point is not None:
            assert self.zero_point.dtype == torch.int8, f"zero_point is {self.zero_point.dtype}"
            assert self.zero_point.shape == self.scale.shape, (
                f"zero_point {tuple(self.zero_point.shape)}, scale {tuple(self.scale.shape)}"
            )

    @property
    def per_channel(self) -> bool:
        return self.scale.shape[1] == 1

    @property
    def grid(self) -> IntGrid:
        size = None if self.per_channel else self.group_size
        return IntGrid(self.bits, size, symmetric=self.zero_point is None)

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]

    @property
    def points(self) -> Tensor:
        """`zero_point`, zeros for a symmetric grid."""
        zeros = torch.zeros_like(self.scale, dtype=torch.int8)
        return zeros if self.zero_point is None else self.zero_point

    def columns(self, name: str, start: int, stop: int) -> "IntWeight":
        codes = self.codes[:, start:stop].contiguous()
        if self.bits == 8 and self.per_channel:
            return replace(self, codes=codes)
        stored, group = self.group_size, math.gcd(self.group_size, stop - start)
        check_group(name, group, _SMALLEST_GROUP, stored, stop - start)

        def regroup(values: Tensor) -> Tensor:
            """[N, K / stored] -> [N, (stop - start) / group]: repeated where groups get smaller."""
            smaller = values.repeat_interleave(stored // group, dim=1)
            return smaller[:, start // group : stop // group].contiguous()

        points = None if self.zero_point is None else regroup(self.zero_point)
        return IntWeight(codes, regroup(self.scale), points, self.bits)

    def kernel_weight(
        self, dtype: torch.dtype, activation_bits: int = 16, *, in_groups: bool = False
    ) -> "KernelWeight":
        """Symmetric weights per channel run with int8 activations where the format has them, int4
        codes a byte each; other int4 is weight-only, or rounds its inputs to int8 where it is
        symmetric in groups. Groups longer than the operators' have their scales repeated. Other
        int8 is weight-only where it is symmetric; with zero points it is dense."""
        from quantkit_kernels import W8A16, Int4, Int4Int8, Int8
        from quantkit_kernels.weights import w8a16_groups

        symmetric = self.zero_point is None
        one_scale = self.per_channel and not (self.bits == 4 and in_groups)
        if symmetric and activation_bits == 8 and one_scale:
            return Int8(self.codes, self.scale)
        if self.bits == 4 and (
            self.group_size in _OPERATOR_GROUPS or self.group_size % _LARGEST_GROUP == 0
        ):
            copies = max(1, self.group_size // _LARGEST_GROUP)
            points = (
                None if self.zero_point is None else self.zero_point.repeat_interleave(copies, 1)
            )
            operand = Int4Int8 if activation_bits == 8 and symmetric else Int4
            return operand(self.codes, self.scale.repeat_interleave(copies, 1), points)
        if self.bits == 8 and symmetric and w8a16_groups(self.shape[1], self.group_size):
            return W8A16(self.codes, self.scale)
        return super().kernel_weight(dtype)

    def levels(self) -> Levels:
        points = None if self.zero_point is None else self.zero_point.float()
        return Levels(
            self.codes.float(), points, self.scale, self.group_size, self.bits, is_e2m1=False
        )

    def with_scale_dtype(self, dtype: torch.dtype) -> "IntWeight | None":
        scale = self.scale.to(dtype).float()
        if not bool(torch.isfinite(scale).all()) or bool(((scale == 0) & (self.scale != 0)).any()):
            return None
        return replace(self, scale=scale)

    def difference(self, name: str, stored: Weight) -> float:
        other = IntWeight.of(stored)
        assert torch.equal(self.codes, other.codes), f"codes of {name} differ"
        assert torch.equal(self.points, other.points), f"zero points of {name} differ"
        return relative_error(self.scale, other.scale)

    def divisor_range(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return scale_divisor_range(self.scale, torch.finfo(dtype))

    def divide_rows(self, divisor: Tensor, dtype: torch.dtype) -> "IntWeight":
        return replace(self, scale=(self.scale / divisor[:, None]).to(dtype).float())


def scale_divisor_range(scale: Tensor, stored: torch.finfo) -> tuple[Tensor, Tensor]:
    """scale float32 [N, G] -> the least and largest power of two [N] under which a row's scales
    stay normal numbers of the stored dtype."""
    least = (scale.amax(1) / stored.max).log2().ceil().clamp(max=0).exp2()
    largest = (scale.amin(1) / stored.smallest_normal).log2().floor().clamp(min=0).exp2()
    return least, largest


@dataclass(frozen=True)
class IntQuantizer(Quantizer):
    """`shrink` are the fractions of the group's range that `fit` tries; (1.0,) is minimum and
    maximum alone."""

    grid: IntGrid
    scale_dtype: torch.dtype
    shrink: tuple[float, ...] = (1.0,)

    @property
    def group_size(self) -> int | None:  # type: ignore[override]
        return self.grid.group_size

    @property
    def code_range(self) -> tuple[int, int]:  # type: ignore[override]
        return int_range(self.grid.bits)

    def fit(self, groups: Tensor, importance: Tensor | None = None) -> Scales:
        extremes = extremes_of(groups)
        candidates = [self._scales(extremes * ratio) for ratio in self.shrink]
        return self.best(candidates, groups, importance)

    def _scales(self, extremes: Tensor) -> Scales:
        """From the minimum and maximum of each group, [..., N, 2]."""
        scale, zero_point = int_params(extremes, self.grid, self.scale_dtype)
        return Scales(scale, None if zero_point is None else zero_point.float())

    def quantize(self, w: Tensor, scales: Scales) -> Tensor:
        low, high = self.code_range
        level = (w / scales.scale).round_()
        if scales.zero_point is None:
            return level.clamp_(low, high).mul_(scales.scale)
        level = level.add_(scales.zero_point).clamp_(low, high)
        return level.sub_(scales.zero_point).mul_(scales.scale)

    def nearest_scale(self, scale: Tensor) -> Tensor:
        return scale.to(self.scale_dtype).float()

    def encode(self, values: Tensor, scales: Scales) -> IntWeight:
        points, bits = scales.zero_point, self.grid.bits
        zero_point = None if points is None else points.to(torch.int8)
        codes = round_int(values, scales.scale, zero_point, bits)
        return IntWeight(codes, scales.scale, zero_point, bits)


def int_range(bits: int) -> tuple[int, int]:
    """Smallest and largest code. Eight bits never use -128: omni-infer's kernels and the symmetric
    grid do not have it."""
    assert bits in (4, 8), f"{bits} bits"
    return (-8, 7) if bits == 4 else (-127, 127)


def int_params(
    groups: Tensor, grid: IntGrid, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of every group, from its extremes.

    groups float32 [..., g] -> scale float32 [...] exactly representable in `scale_dtype`,
    zero_point int8 [...] or None.

    Asymmetric: scale = (max - min) / 15 with min <= 0 <= max forced, so that zero stays exact.
    Symmetric: half the range of the grid, amax / 7.5 or amax / 127 (compressed-tensors' rule for
    int4; it clips +amax by half a scale and uses all 16 codes). A scale that rounds to zero becomes
    1: its codes are all zero.
    """
    low, high = int_range(grid.bits)
    if grid.symmetric:
        scale = groups.abs().amax(dim=-1) / ((high - low) / 2)
        return _stored_scale(scale, scale_dtype), None
    minimum = groups.amin(dim=-1).clamp(max=0.0)
    maximum = groups.amax(dim=-1).clamp(min=0.0)
    scale = _stored_scale((maximum - minimum) / (high - low), scale_dtype)
    zero_point = (low - minimum / scale).round().clamp(low, high).to(torch.int8)
    return scale, zero_point


def _stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    stored = scale.to(dtype).float()
    if not bool(torch.isfinite(stored).all()):
        raise QuantkitError(
            f"a weight is not finite or too large for scales in {str(dtype).removeprefix('torch.')}",
            "check the source weights",
        )
    return torch.where(stored > 0, stored, torch.ones_like(stored))


def round_int(w: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int) -> Tensor:
    """Nearest codes (ties to even): w float32 [N, K], scale and zero_point [N, G] -> int8 [N,
    K]."""
    low, high = int_range(bits)
    codes = w.unflatten(1, (scale.shape[1], -1)).div(scale.unsqueeze(-1)).round_()
    if zero_point is not None:
        codes += zero_point.unsqueeze(-1)
    return codes.clamp_(low, high).to(torch.int8).flatten(-2)
