"""Activation quantization, simulated in calibration."""

from dataclasses import dataclass

from quantkit_kernels import quantize_rows, round_to_nvfp4
from torch import Tensor

from quantkit.grids.base import QuantizedWeight, Weight
from quantkit.grids.nvfp4 import input_divisor


@dataclass(frozen=True)
class ActivationQuant:
    """Dynamic quantization of a linear's input to `bits`, as the operators do it; 16 for none.
    divisor float32 []: NVFP4's calibrated global divisor; None to derive it from the input."""

    bits: int = 16
    divisor: Tensor | None = None

    @staticmethod
    def of(weight: Weight | None, bits: int) -> "ActivationQuant":
        """For a quantized linear, with the divisor that is stored with it."""
        divisor = weight.input_divisor if isinstance(weight, QuantizedWeight) else None
        return ActivationQuant(bits, divisor)

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [..., K], or its values rounded to int8 with a scale per row, or to NVFP4."""
        if self.bits == 16:
            return x
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
