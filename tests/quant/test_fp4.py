"""NVFP4: the codes and scales of ModelOpt and compressed-tensors, and rounding to the nearest of 16
values."""

import golden
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nearest import quantize_fp4
from refused import refused

from quantkit.grids.base import dequantize
from quantkit.grids.e2m1 import E2M1_MAX, E2M1_VALUES, encode_e2m1
from quantkit.grids.nvfp4 import global_scale
from quantkit.quant.packing import pack_pairs


def test_golden_codes_and_scales():
    """Packed bytes are those of both libraries, scales those of ModelOpt (which gives a group of
    zeros the scale 1)."""
    vectors = golden.load("nvfp4_g16")
    expected = vectors["modelopt_0_47_fp32_input"]
    weight = quantize_fp4(golden.tensor(vectors["input_weight"]).float())
    assert torch.equal(pack_pairs(weight.codes), golden.tensor(expected["weight"]))
    assert torch.equal(
        weight.scale.view(torch.uint8), golden.tensor(expected["weight_scale"]).view(torch.uint8)
    )
    assert torch.equal(weight.global_scale, golden.tensor(expected["weight_scale_2"]))


def test_codes_are_the_nearest_of_all_values():
    x = torch.linspace(-8, 8, 4001)
    distance = (x[:, None] - torch.tensor(E2M1_VALUES)).abs()
    chosen = distance.gather(1, encode_e2m1(x).long()[:, None])[:, 0]
    assert torch.equal(chosen, distance.amin(dim=1))


@settings(deadline=None, max_examples=500)
@given(st.floats(min_value=2.0**-90, max_value=2.0**90, width=32))
def test_global_scale_survives_being_inverted_twice(amax):
    scale = global_scale(torch.tensor(amax))
    assert torch.equal(scale.reciprocal().reciprocal(), scale)
    torch.testing.assert_close(scale, torch.tensor(amax) / 2688, rtol=2e-7, atol=0)


def test_shared_global_scale_is_used():
    gate = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    shared = global_scale(torch.tensor(50.0))
    weight = quantize_fp4(gate, global_scale=shared)
    assert weight.global_scale is shared
    assert (dequantize(weight) - gate).abs().max() < 0.6 * gate.abs().max() / E2M1_MAX * 2


@pytest.mark.parametrize("rows", [1, 3])
def test_zeros_stay_zero(rows):
    weight = quantize_fp4(torch.zeros(rows, 32))
    assert weight.global_scale == 1
    assert bool((dequantize(weight) == 0).all())


def test_groups_far_below_the_largest_keep_their_sign_and_size():
    """Scales go down to the smallest e4m3; below it a group is lost, but never becomes NaN."""
    w = torch.ones(1, 48)
    w[:, 16:32] *= 1e-4
    w[:, 32:] *= -1e-9
    value = dequantize(quantize_fp4(w))
    torch.testing.assert_close(value[:, :32], w[:, :32], rtol=0.1, atol=0)
    assert bool((value[:, 32:] == 0).all())


def test_inputs_that_do_not_fill_a_group_are_refused():
    with refused("FP4 groups of 16 do not divide 24 input channels"):
        quantize_fp4(torch.ones(2, 24))
