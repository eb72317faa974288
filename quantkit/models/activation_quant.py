"""What an operator of the quantized model reads in the place of an input."""

from dataclasses import dataclass

from quantkit_kernels import quantize_rows, round_to_nvfp4
from torch import Tensor

from quantkit.grids.base import QuantizedWeight, Weight
from quantkit.grids.nvfp4 import input_divisor


@dataclass(frozen=True)
class ActivationQuant:
    """How linears read: rounded to `bits`, as operators do it; 16 for not at all. divisor float32
    []: NVFP4's, as it was calibrated; None, where nothing was, for that of the input itself."""

    bits: int = 16
    divisor: Tensor | None = None

    @staticmethod
    def of(weight: Weight | None, bits: int) -> "ActivationQuant":
        """Of a rounded linear, with the divisor that is stored with it."""
        divisor = weight.input_divisor if isinstance(weight, QuantizedWeight) else None
        return ActivationQuant(bits, divisor)

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [..., K] itself, or its values on int8 with a step per row, or on NVFP4."""
        if self.bits == 16:
            return x
        if self.bits == 8:
            codes, scale = quantize_rows(x.flatten(0, -2))
            return (codes * scale).view_as(x)
        divisor = input_divisor(x.abs().amax()) if self.divisor is None else self.divisor
        return fake_quantize_nvfp4(x, divisor)


NO_ACTIVATION_QUANT = ActivationQuant()


def fake_quantize_nvfp4(x: Tensor, divisor: Tensor) -> Tensor:
    """The values float32 [..., K] that `round_to_nvfp4` makes of x."""
    levels, scales = round_to_nvfp4(x, divisor)
    return levels.mul_((scales / divisor).unsqueeze(-1)).flatten(-2)
