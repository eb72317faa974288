"""Activation quantization, simulated in calibration."""

from dataclasses import dataclass

import torch
from quantkit_kernels import quantize_rows, round_to_mx, round_to_nvfp4
from quantkit_kernels.codes import decode, encode
from torch import Tensor

from quantkit.grids.base import Grid, QuantizedWeight, Weight
from quantkit.grids.nvfp4 import input_divisor


@dataclass(frozen=True)
class ActivationQuant:
    """Dynamic quantization of a linear's input to `bits`, as the operators do it; 16 for none.
    divisor float32 []: NVFP4's calibrated global divisor; None to derive it from the input. grid:
    of the weight; where it is MXFP4, MXFP8 or FP8, so are inputs."""

    bits: int = 16
    divisor: Tensor | None = None
    grid: Grid | None = None

    @staticmethod
    def of(weight: Weight | None, bits: int, grid: Grid | None = None) -> "ActivationQuant":
        """For a quantized linear, with the divisor that is stored with it."""
        divisor = weight.input_divisor if isinstance(weight, QuantizedWeight) else None
        return ActivationQuant(bits, divisor, grid)

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [..., K], or its values rounded to int8 with a scale per row, to NVFP4, to MXFP4
        or MXFP8, or to e4m3 with a scale per row and the grid's group."""
        if self.bits == 16:
            return x
        if self.grid is not None and self.grid.power_scales:
            levels, scales = round_to_mx(x, self.bits)
            return levels.mul_(scales.unsqueeze(-1)).flatten(-2)
        if self.grid is not None and self.grid.kind == "fp8":
            groups = x.unflatten(-1, (-1, self.grid.group_size or x.shape[-1]))
            return decode(*encode(groups, torch.float8_e4m3fn)).flatten(-2)
        if self.bits == 8:
            codes, scale = quantize_rows(x.flatten(0, -2))
            return (codes * scale).view_as(x)
        divisor = input_divisor(x.abs().amax()) if self.divisor is None else self.divisor
        return fake_quantize_nvfp4(x, divisor)


NO_ACTIVATION_QUANT = ActivationQuant()


def fake_quantize_nvfp4(x: Tensor, divisor: Tensor) -> Tensor:
    """x float32 [..., K] rounded to NVFP4 by `round_to_nvfp4`, and decoded."""
    levels, scales = round_to_nvfp4(x, divisor)
    return levels.mul_((scales / divisor).unsqueeze(-1)).flatten(-2)
