"""What every weight grid is: the parameters (`Grid`), a weight stored on it (`QuantizedWeight`),
and rounding to it (`Quantizer`).

A grid is one file of this folder, and its classes answer every question about it: callers ask for
properties and call methods, and never for the class. A weight W is [N=out, K=in], whatever format
it is stored in: formats unpack to a `QuantizedWeight` and pack from one, so converting is unpacking
and packing. Integers are signed everywhere (an unsigned int4 code q with zero point z is q - 8 with
z - 8), and global NVFP4 scales are multipliers everywhere. G is the number of groups along K, K /
group_size; a scale per channel is G = 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self, TypeAlias

import torch
from quantkit_kernels.cpu.nearest import extremes, has_nearest, nearest
from torch import Tensor

from quantkit.common.errors import UsageError

if TYPE_CHECKING:
    from quantkit_kernels import Weight as KernelWeight

_CACHED_VALUES = 2**17
"""Values that stay in a CPU's cache while candidate scales are tried on them."""


class Grid(ABC):
    """The values that weights may take. Subclasses are frozen dataclasses: grids with equal
    parameters are equal.

    bits: of one code. group_size: input channels that share a scale; None for a whole row (or, for
    FP8, a block). symmetric: whether there are no zero points. activation_bits: to which the inputs
    of a linear are quantized where the grid itself says so (integers in groups, NVFP4); for the
    other grids the format says it, and this is 16.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    activation_bits: int

    scale_rows = 1
    """Output channels that share a scale."""
    coarse_scales = False
    """Scales so coarse that rows can be divided exactly by powers of two alone."""
    power_scales = False
    """Scales are powers of two (MX): many of a linear's scales are equal, and inputs that are
    rounded have such scales, too, in groups of 32."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """int4, int8, fp4 or fp8: the element type, as kernels name it."""

    @property
    @abstractmethod
    def label(self) -> str:
        """A short name for reports, unique for the parameters. Stored in manifests and reports."""

    @property
    def engine_name(self) -> str:
        """The name in engines' profiles (`GridName`); the label where they have none."""
        return self.label

    @abstractmethod
    def quantizer(self, amax: Tensor, scale_dtype: torch.dtype, fit_points: int) -> "Quantizer":
        """Rounds to this grid. amax float32 [] or [..., N]: the largest magnitude of the tensor,
        fused siblings included. scale_dtype: what the format stores integer grids' scales in.
        fit_points: candidate scales tried for each group; 0 for the group's extremes alone."""

    @property
    def has_input_scales(self) -> bool:
        """Whether inputs are rounded under a scale that calibration finds and a weight brings."""
        return False

    @property
    def is_integer(self) -> bool:
        return self.kind.startswith("int")

    @property
    def equivalents(self) -> tuple["Grid", ...]:
        """Other grids on which a weight of this one can be stored without rounding."""
        return ()

    @property
    def substitutes(self) -> tuple["Grid", ...]:
        """This grid, then those that an engine without it may be given in its place."""
        return (self,)

    def with_group_size(self, size: int) -> "Grid | None":
        """The grid with another group size; None where its groups have one size."""
        return None

    def rank_multiple(self, *, inputs: bool) -> int:
        """What the input channels (or outputs) of one tensor-parallel rank must be a multiple of
        for engines to split the stored tensors."""
        return 1

    def check_inputs(self, name: str, width: int) -> None:
        """Raises UsageError where the linear `name` cannot be cut into shares of `width` input
        features. Any share will do unless a grid says otherwise."""
        return None


class Levels(NamedTuple):
    """A weight as level - zero_point, times scale. values float32 [N, K]: codes, or their E2M1
    values; zero_point and scale float32 or int8 [N, G]."""

    values: Tensor
    zero_point: Tensor | None
    scale: Tensor
    group_size: int
    bits: int
    is_e2m1: bool


class QuantizedWeight(ABC):
    """The value of one linear's weight [N, K] on a grid. Subclasses are frozen dataclasses of
    tensors; their fields say dtypes and shapes."""

    codes: Tensor
    input_divisor: Tensor | None = None

    @classmethod
    def of(cls, weight: "Weight") -> Self:
        """`weight`, which must be of this class: formats that store one kind of weight call it."""
        assert isinstance(weight, cls), f"{type(weight).__name__}, not {cls.__name__}"
        return weight

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """The grid it is on. A row that is one group counts as a scale per channel."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense value [N, K] in `dtype`, computed in float32 and rounded once."""

    def rows(self, start: int, stop: int) -> "Weight":
        """Output features start..stop."""
        return self.dequantize()[start:stop]

    def columns(self, name: str, start: int, stop: int) -> "Weight":
        """Input features start..stop of the linear `name`, on group boundaries, or inside a group
        where all of it goes to whole smaller groups that keep its scale."""
        return self.dequantize()[:, start:stop].contiguous()

    def kernel_weight(
        self, dtype: torch.dtype, activation_bits: int = 16, *, in_groups: bool = False
    ) -> "KernelWeight":
        """The operand of kernels: dense in `dtype` for a grid without operators. activation_bits:
        of the checkpoint's format. in_groups: the grid has groups, and a row with one scale is one
        of them."""
        from quantkit_kernels import Dense

        return Dense(self.dequantize(dtype))

    def levels(self) -> Levels | None:
        """Codes and scales; None for a grid without scales of rows and groups."""
        return None

    def with_scale_dtype(self, dtype: torch.dtype) -> Self | None:
        """The weight with scales rounded to what a format stores; None where `dtype` cannot hold
        one of them. Grids whose scales have a dtype of their own are unchanged."""
        return self

    @abstractmethod
    def difference(self, name: str, stored: "Weight") -> float:
        """Largest relative difference to the weight of the same linear `name` as another format
        stores it. Codes must be equal."""

    def divisor_range(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The least and the largest power of two [N] that each row can be divided by with its
        scales normal numbers of `dtype`, which stores them; 1 always can."""
        raise AssertionError(f"rows of {type(self).__name__} are not scaled")

    def divide_rows(self, divisor: Tensor, dtype: torch.dtype) -> Self:
        """The weight with row n divided by divisor[n]: the same codes with other scales, rounded to
        `dtype`, which stores them. Exact for a power of two within `divisor_range`."""
        raise AssertionError(f"rows of {type(self).__name__} are not scaled")


class GroupedWeight(QuantizedWeight):
    """A weight with scales of rows and groups: every 2-D tensor of it has its rows."""

    @abstractmethod
    def levels(self) -> Levels: ...

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        found = self.levels()
        values = found.values.unflatten(1, (-1, found.group_size))
        if found.zero_point is not None:
            values -= found.zero_point.unsqueeze(-1)
        return values.mul_(found.scale.unsqueeze(-1)).flatten(1).to(dtype)

    def matrices(self) -> dict[str, Tensor]:
        """Its codes, and what has an element for each row and group, by the names of fields."""
        parts = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        return {name: part for name, part in parts.items() if part.dim() == 2}

    def rows(self, start: int, stop: int) -> Self:
        return replace(self, **{name: part[start:stop] for name, part in self.matrices().items()})  # type: ignore[type-var]


Weight: TypeAlias = Tensor | QuantizedWeight


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dense value [N, K] in `dtype`; a plain tensor is only cast."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)


def cut_rows(weight: Weight, start: int, stop: int) -> Weight:
    """Rows of W [N, K]: output features start..stop."""
    return weight[start:stop] if isinstance(weight, Tensor) else weight.rows(start, stop)


def cut_columns(weight: Weight, name: str, start: int, stop: int) -> Weight:
    """Columns of W [N, K]: input features start..stop; the ranks' outputs add up to the whole."""
    if isinstance(weight, Tensor):
        return weight[:, start:stop].contiguous()
    return weight.columns(name, start, stop)


def grid_label(grid: Grid | None) -> str:
    """The label of a grid; None is a linear that is not quantized."""
    return "16-bit" if grid is None else grid.label


def check_group(name: str, group: int, smallest: int, stored: int, width: int) -> None:
    """Raises UsageError for shares whose groups would be smaller than the operators'."""
    if group < smallest:
        raise UsageError(
            f"{name} cannot be cut into shares of {width} input features in groups of {stored}",
            "use a smaller --tp",
        )


def relative_error(before: Tensor, after: Tensor) -> float:
    """Largest |after / before - 1|, in few passes. Where before is 0, after must be too, as casts
    keep it."""
    if not before.numel():
        return 0.0
    smallest, largest = torch.div(after.to(before.dtype), before).nan_to_num_(nan=1.0).aminmax()
    return max(float(largest) - 1, 1 - float(smallest))


@dataclass(frozen=True)
class Scales:
    """scale float32 [..., N], what one level is worth: value = level * scale, the levels being
    integers less the zero point, or E2M1's values. zero_point float32 [..., N], integers; or
    None."""

    scale: Tensor
    zero_point: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Scales":
        """Both tensors changed alike."""
        return Scales(
            change(self.scale), None if self.zero_point is None else change(self.zero_point)
        )


class Quantizer(ABC):
    """Rounding to a grid, as GPTQ and the scale searches need it. Scales are rounded to what the
    format stores before anything is rounded to them, so storing loses nothing.

    Shapes: [..., N, g] are N rows of one group of g input channels; leading dimensions are experts
    or candidates.
    """

    group_size: int | None
    """Input channels that share a scale; None for the whole row."""
    kind: ClassVar[str] = "int"
    """int, fp4 (E2M1) or fp8 (e4m3)."""
    code_range: tuple[int, int] | None = None
    """Smallest and largest integer code; None for floats."""

    @abstractmethod
    def fit(self, groups: Tensor, importance: Tensor | None = None) -> Scales:
        """The scales of every group. groups float32 [..., N, g]; importance [..., 1, g] weighs the
        squared error of each channel."""

    @abstractmethod
    def quantize(self, w: Tensor, scales: Scales) -> Tensor:
        """Nearest values of the grid. w float32 [..., N] or, with scales of [..., N, 1], [..., N,
        g]."""

    @abstractmethod
    def nearest_scale(self, scale: Tensor) -> Tensor:
        """Scales [..., N] as the nearest that the format holds."""

    def for_group_batch(self) -> "Quantizer":
        """The same, for all groups of a row at once: [..., G, N, g] in place of [..., N, g]."""
        return self

    @abstractmethod
    def encode(self, values: Tensor, scales: Scales) -> QuantizedWeight:
        """Values already on the grid, float32 [N, K], with the scales [N, G] they were rounded
        to, as a weight."""

    def best(self, candidates: list[Scales], groups: Tensor, importance: Tensor | None) -> Scales:
        """Of several scales, those with the least (weighted) squared error, row by row; the first
        of equals."""
        best = candidates[0]
        if len(candidates) == 1:
            return best
        on_gpu = groups.is_cuda and groups.dim() <= 4 and groups.stride(-1) == 1
        if on_gpu or has_nearest(groups):
            if on_gpu:  # Triton is part of PyTorch's GPU builds.
                from quantkit.grids.best_scale_kernel import best_scale
            else:
                from quantkit_kernels.cpu.nearest import best_scale

            points = [one.zero_point for one in candidates if one.zero_point is not None]
            sizes = torch.stack([one.scale for one in candidates])
            zeros = torch.stack(points) if points else None
            return Scales(*best_scale(groups, sizes, zeros, importance, self.kind, self.code_range))
        error = self._squared_error(best, groups, importance)
        for scales in candidates[1:]:
            other = self._squared_error(scales, groups, importance)
            better = other < error
            error = torch.where(better, other, error)
            zero_point = (
                None
                if best.zero_point is None or scales.zero_point is None
                else torch.where(better, scales.zero_point, best.zero_point)
            )
            best = Scales(torch.where(better, scales.scale, best.scale), zero_point)
        return best

    def _squared_error(self, scales: Scales, groups: Tensor, importance: Tensor | None) -> Tensor:
        wide = scales.map(lambda t: t.unsqueeze(-1))
        error = self.quantize(groups, wide).sub_(groups).square_()
        return error.sum(-1) if importance is None else error.mul_(importance).sum(-1)


def extremes_of(groups: Tensor) -> Tensor:
    """groups float32 [..., G, N, g] -> least and largest of each, [..., G, N, 2]."""
    if has_nearest(groups):
        return extremes(groups)
    # aminmax takes five times as long on a CPU
    return torch.stack((groups.amin(-1), groups.amax(-1)), dim=-1)


def fit_scales(w: Tensor, quantizer: Quantizer, importance: Tensor | None = None) -> Scales:
    """Scales [..., N, G] for W float32 [..., N, K]. importance [..., K] weighs channels."""
    groups = _groups(w, quantizer)
    if importance is not None:
        size = quantizer.group_size or w.shape[-1]
        importance = importance.unflatten(-1, (-1, size)).unsqueeze(-2)  # [..., G, 1, g]
    scales = _fit_in_parts(quantizer.for_group_batch(), groups, importance)
    return scales.map(lambda t: t.transpose(-1, -2))


def _fit_in_parts(quantizer: Quantizer, groups: Tensor, importance: Tensor | None) -> Scales:
    """Scales [..., G, N] of [..., G, N, g]; on a CPU a few groups at a time, which stay in its
    cache while candidates are tried, or by C++ their scales."""
    count, values = groups.shape[-3], groups.numel()
    if has_nearest(groups):
        values //= groups.shape[-1]
    at_once = max(1, _CACHED_VALUES * count // values) if groups.device.type == "cpu" else count
    if at_once >= count:
        return quantizer.fit(groups, importance)
    parts = [
        quantizer.fit(
            some, None if importance is None else importance[..., start : start + at_once, :, :]
        )
        for start, some in zip(range(0, count, at_once), groups.split(at_once, dim=-3))
    ]
    zero_points = [part.zero_point for part in parts if part.zero_point is not None]
    return Scales(
        torch.cat([part.scale for part in parts], dim=-2),
        torch.cat(zero_points, dim=-2) if zero_points else None,
    )


def round_to_nearest(
    w: Tensor, quantizer: Quantizer, importance: Tensor | None = None
) -> tuple[Tensor, Scales]:
    """W float32 [..., N, K] -> its values on the grid, and the scales [..., N, G] that `fit_scales`
    gives."""
    scales = fit_scales(w, quantizer, importance)
    return round_to_scales(w, quantizer, scales), scales


def round_to_scales(w: Tensor, quantizer: Quantizer, scales: Scales) -> Tensor:
    """W float32 [..., N, K] as the nearest values on the grid of scales [..., N, G]."""
    groups, by_group = _groups(w, quantizer), scales.map(lambda t: t.transpose(-1, -2))
    if has_nearest(groups):
        own = by_group.scale, by_group.zero_point
        return nearest(groups, *own, quantizer.kind, quantizer.code_range)
    wide = by_group.map(lambda t: t.unsqueeze(-1))
    values = quantizer.for_group_batch().quantize(groups, wide)
    return values.transpose(-2, -3).flatten(-2)


def _groups(w: Tensor, quantizer: Quantizer) -> Tensor:
    """[..., N, K] -> [..., G, N, g]."""
    group_size = quantizer.group_size or w.shape[-1]
    assert w.shape[-1] % group_size == 0, (
        f"group size {group_size} does not divide {w.shape[-1]} channels"
    )
    return w.unflatten(-1, (-1, group_size)).transpose(-2, -3)
