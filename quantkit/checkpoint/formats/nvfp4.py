"""What the NVFP4 formats share: codes two to a byte in the marker's tensor, uint8 [N, K / 2], the even input in the low bits."""

from collections.abc import Mapping

import torch

from quantkit.checkpoint.formats.base import Along, Format, require_multiple
from quantkit.checkpoint.header import TensorSpec
from quantkit.quant.weights import FP4_GROUP
from quantkit.schemes import Fp4Grid, Grid

CODE_PAIRS: tuple[Along, ...] = (("N", 1), ("K", 2))
GROUP_SCALES: tuple[Along, ...] = (("N", 1), ("K", FP4_GROUP))


class Nvfp4(Format):
    scale_dtype = torch.float8_e4m3fn
    marker_dtype = torch.uint8

    def holds(self, grid: Grid) -> bool:
        return isinstance(grid, Fp4Grid)

    def stored(self, module: str, tensors: Mapping[str, TensorSpec], grid: Grid | None) -> tuple[tuple[int, int], Grid | None]:
        rows, pairs = tensors[module + self.marker].shape
        return (rows, pairs * 2), grid


def code_shapes(module: str, shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the bytes of codes and of the group scales of a linear [N, K]."""
    rows, columns = shape
    require_multiple(module, "input channels", columns, FP4_GROUP)
    return (rows, columns // 2), (rows, columns // FP4_GROUP)
