"""FP8 blocks: against the separate implementation that writes the test checkpoints."""

import make_model
import pytest
import torch
from nearest import quantize_fp8_block

from quantkit.grids.base import dequantize


@pytest.mark.parametrize("shape", [(128, 256), (576, 384), (130, 200), (3, 5)])
def test_codes_and_scales_of_deepseek(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scale = make_model.fp8_blocks(w)
    weight = quantize_fp8_block(w)
    assert torch.equal(weight.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(weight.scale, scale)
    assert (
        (dequantize(weight) - w).abs() <= w.abs() / 16 + scale.max() * 2**-9
    ).all()  # 3 bits of mantissa


def test_zeros_stay_zero():
    weight = quantize_fp8_block(torch.zeros(130, 130))
    assert bool((weight.scale == 1).all())
    assert bool((dequantize(weight) == 0).all())
