"""FP8: e4m3 values, an FP32 scale per block of rows x columns, or per output channel."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.grids.base import (
    Grid,
    QuantizedWeight,
    Quantizer,
    Scales,
    Weight,
    extremes_of,
    relative_error,
)
from quantkit.grids.int_groups import scale_divisor_range
from quantkit.grids.nvfp4 import E4M3_MAX

FP8_BLOCK = 128


@dataclass(frozen=True)
class Fp8BlockGrid(Grid):
    """scale_rows x group_size weights share a scale: blocks of 128 x 128 (DeepSeek's), or one
    output channel. Inputs are rounded to e4m3, too, under a scale per token and group_size
    channels."""

    scale_rows: int = FP8_BLOCK
    group_size: int | None = FP8_BLOCK

    bits = 8
    symmetric = True
    activation_bits = 8
    kind = engine_name = "fp8"

    @property
    def label(self) -> str:
        return "fp8" if self == Fp8BlockGrid() else "fp8-channel"

    @property
    def substitutes(self) -> tuple[Grid, ...]:
        return tuple(dict.fromkeys((self, FP8_CHANNEL)))

    def rank_multiple(self, *, inputs: bool) -> int:
        return (self.group_size or 1) if inputs else self.scale_rows

    def quantizer(self, amax: Tensor, scale_dtype: torch.dtype, fit_points: int) -> "Fp8Quantizer":
        return Fp8Quantizer(self.scale_rows, self.group_size, max(fit_points, 1))


FP8_CHANNEL = Fp8BlockGrid(1, None)


@dataclass(frozen=True, eq=False)
class Fp8BlockWeight(QuantizedWeight):
    """w = codes * scale, a scale per block of rows x columns; blocks at the edges may be partial.

    DeepSeek-V3 has blocks of 128 x 128; a scale per channel is a block of 1 x K, one for the
    tensor N x K. codes float8_e4m3fn [N, K]; scale float32 [ceil(N / rows), ceil(K /
    columns)], a multiplier.
    """

    codes: Tensor
    scale: Tensor
    block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)

    def __post_init__(self) -> None:
        assert self.codes.dtype == torch.float8_e4m3fn, f"codes are {self.codes.dtype}"
        assert self.scale.dtype == torch.float32, f"scale is {self.scale.dtype}"
        blocks = tuple(-(-size // side) for size, side in zip(self.codes.shape, self.block))
        assert tuple(self.scale.shape) == blocks, (
            f"scale {tuple(self.scale.shape)} for codes {tuple(self.codes.shape)}"
        )

    @property
    def grid(self) -> Fp8BlockGrid:
        rows, columns = self.block
        whole = rows == 1 and columns == self.shape[1]
        return Fp8BlockGrid(rows, None if whole else columns)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        values = self.codes.float()
        (rows, columns), (tall, wide) = values.shape, self.block
        row_scale = self.scale.repeat_interleave(tall, dim=0)[:rows]  # [N, column blocks]
        whole = columns // wide
        values[:, : whole * wide].unflatten(1, (whole, wide)).mul_(row_scale[:, :whole, None])
        if columns % wide:
            values[:, whole * wide :].mul_(row_scale[:, whole:])
        return values.to(dtype)

    def difference(self, name: str, stored: Weight) -> float:
        other = Fp8BlockWeight.of(stored)
        same = torch.equal(self.codes.view(torch.uint8), other.codes.view(torch.uint8))
        assert same, f"codes of {name} differ"
        return relative_error(self.scale, other.scale)

    def divisor_range(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """1 where rows share a scale."""
        if self.block[0] == 1:
            return scale_divisor_range(self.scale, torch.finfo(dtype))
        ones = torch.ones(self.shape[0], device=self.scale.device)
        return ones, ones

    def divide_rows(self, divisor: Tensor, dtype: torch.dtype) -> "Fp8BlockWeight":
        return replace(self, scale=self.scale / divisor[:: self.block[0], None])


@dataclass(frozen=True)
class Fp8Quantizer(Quantizer):
    """e4m3 under the scale that maps the largest value of `scale_rows` rows to 448; of one row, the
    best of `points` scales from there to twice that, under which mantissas differ."""

    scale_rows: int
    group_size: int | None
    points: int = 1

    kind = "fp8"

    def fit(self, groups: Tensor, importance: Tensor | None = None) -> Scales:
        least = self._of_rows(extremes_of(groups).abs().amax(-1)) / E4M3_MAX
        least = torch.where(least > 0, least, torch.ones_like(least))
        points = self.points if self.scale_rows == 1 else 1
        candidates = [Scales(least * 2 ** (i / points), None) for i in range(points)]
        return self.best(candidates, groups, importance)

    def _of_rows(self, amax: Tensor) -> Tensor:
        """The largest of amax [..., N] in each run of `scale_rows`, for every row."""
        rows = amax.shape[-1]
        parts = amax.split(self.scale_rows, dim=-1) if self.scale_rows > 1 else ()
        shared = [part.amax(-1, keepdim=True).expand_as(part) for part in parts]
        return torch.cat(shared, dim=-1) if shared and rows else amax

    def quantize(self, w: Tensor, scales: Scales) -> Tensor:
        return round_e4m3(w, scales.scale)

    def nearest_scale(self, scale: Tensor) -> Tensor:
        return scale

    def encode(self, values: Tensor, scales: Scales) -> Fp8BlockWeight:
        columns = values.shape[-1]
        wide = self.group_size or columns
        levels = values.unflatten(-1, (-1, wide)) / scales.scale.unsqueeze(-1)
        codes = levels.flatten(-2).to(torch.float8_e4m3fn)
        scale = scales.scale[:: self.scale_rows].contiguous()
        return Fp8BlockWeight(codes, scale, (self.scale_rows, wide))


def round_e4m3(w: Tensor, scale: Tensor) -> Tensor:
    """Nearest values of scale times e4m3, both float32 of shapes that broadcast."""
    level = (w / scale).clamp_(-E4M3_MAX, E4M3_MAX)
    return level.to(torch.float8_e4m3fn).float().mul_(scale)
