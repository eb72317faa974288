"""What an operator of the quantized model reads in the place of an input."""

from quantkit_kernels import quantize_rows
from torch import Tensor


def as_read(x: Tensor, activation_bits: int) -> Tensor:
    """x float32 [T, K] itself where activations have 16 bits; with 8, rounded to int8 with a step per row, as operators round it."""
    if activation_bits == 16:
        return x
    codes, scale = quantize_rows(x)
    return codes * scale
