"""FP8 in blocks: e4m3 values, an FP32 scale per block of rows x columns. Read and copied, never
rounded to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.base import Grid, QuantizedWeight, Quantizer, Weight

FP8_BLOCK = 128


@dataclass(frozen=True)
class Fp8BlockGrid(Grid):
    """Blocks of 128 x 128 (DeepSeek's). Such linears stay as the source has them."""

    group_size: None = None

    bits = 8
    symmetric = True
    activation_bits = 16
    needs_rounding = False
    kind = label = "fp8"

    def quantizer(self, amax: Tensor, scale_dtype: torch.dtype, fit_points: int) -> Quantizer:
        raise AssertionError(f"nothing is rounded to {self}")


@dataclass(frozen=True, eq=False)
class Fp8BlockWeight(QuantizedWeight):
    """w = codes * scale, a scale per block of rows x columns; blocks at the edges may be partial.

    DeepSeek-V3 has blocks of 128 x 128, MXFP8 of 1 x 32; a scale per channel is a block of 1 x K,
    one for the tensor N x K. codes float8_e4m3fn [N, K]; scale float32 [ceil(N / rows), ceil(K /
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
        return Fp8BlockGrid()

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
        raise AssertionError("FP8 blocks convert to plain weights only")
