"""The layout of the Ascend FP4 kernels, byte for byte."""

import hashlib

import golden
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import QuantkitError
from quantkit.quant.fp4 import quantize_fp4
from quantkit.quant.npu_tiles import single_scale, tile_fp4, untile_fp4
from quantkit.quant.packing import unpack_pairs


def test_golden_bytes() -> None:
    vectors = golden.load("chitu_npu_native_layout")
    row, pair = torch.arange(256)[:, None], torch.arange(32)[None]
    codes = unpack_pairs(((7 * row + 13 * pair) % 256).to(torch.uint8))
    tiles = tile_fp4(codes)
    assert tiles.flatten()[:128].tolist() == vectors["first_128_bytes"]
    assert hashlib.sha256(tiles.numpy().tobytes()).hexdigest() == vectors["sha256"]


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 3), columns=st.integers(1, 3))
def test_untile_inverts_tile(seed: int, rows: int, columns: int) -> None:
    codes = torch.randint(0, 16, (256 * rows, 64 * columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(untile_fp4(tile_fp4(codes)), codes)


@pytest.mark.parametrize("shape", [(576, 128), (256, 96)])
def test_weights_that_do_not_fill_tiles_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(QuantkitError, match=f"{shape[0]} x {shape[1]} does not fit"):
        tile_fp4(torch.zeros(shape, dtype=torch.uint8))


def test_single_scale_is_the_product_in_bfloat16() -> None:
    weight = quantize_fp4(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))
    scale = single_scale(weight)
    assert scale.shape == (4, 4)
    assert scale[3, 1] == (weight.scale[1, 3].float() * weight.global_scale).bfloat16()
