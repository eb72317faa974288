"""Integer rounding: nearest codes under a scale that the format can store."""

import golden
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nearest import quantize_int
from refused import refused

from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid, int_params, round_int

_GRIDS = [
    IntGrid(4, 32, False),
    IntGrid(4, 32, True),
    IntGrid(4, None, True),
    IntGrid(8, None, True),
]


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    grid=st.sampled_from(_GRIDS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    offset=st.sampled_from([0.0, 3.0, -3.0]),
    size=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_codes_are_the_nearest(seed, grid, dtype, offset, size):
    w = (torch.randn(6, 96, generator=torch.Generator().manual_seed(seed)) + offset) * size
    weight = quantize_int(w, grid, scale_dtype=dtype)
    assert torch.equal(weight.scale.to(dtype).float(), weight.scale)
    low, high = (-8, 7) if grid.bits == 4 else (-127, 127)
    error = (dequantize(weight) - w).unflatten(1, (-1, weight.group_size)).abs()
    for other in (-1, 1):  # no neighbouring code is nearer
        codes = (weight.codes + other).clamp(low, high)
        neighbour = type(weight)(codes, weight.scale, weight.zero_point, weight.bits)
        worse = (dequantize(neighbour) - w).unflatten(1, (-1, weight.group_size)).abs()
        assert bool((error <= worse * (1 + 1e-5)).all())
    assert weight.codes.min() >= low
    assert weight.codes.max() <= high


@pytest.mark.parametrize("grid", _GRIDS)
def test_zero_stays_exactly_zero(grid):
    w = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)) + 2.0
    w[:, ::3] = 0.0
    value = dequantize(quantize_int(w, grid, scale_dtype=torch.float16))
    assert bool((value[:, ::3] == 0).all())


@pytest.mark.parametrize("grid", _GRIDS)
@pytest.mark.parametrize("size", [0.0, 1e-12])
def test_weights_below_the_smallest_scale_become_zero(grid, size):
    weight = quantize_int(torch.full((2, 32), size), grid, scale_dtype=torch.float16)
    assert bool((weight.scale == 1).all())
    assert bool((dequantize(weight) == 0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_values_no_scale_can_hold_are_refused(bad):
    w = torch.ones(2, 32)
    w[1, 5] = bad
    with refused(r"not finite or too large for scales in float16"):
        quantize_int(w, IntGrid(4, 32, False), scale_dtype=torch.float16)


def test_group_size_that_does_not_divide_is_refused():
    with refused("group size 32 does not divide 40 input channels"):
        quantize_int(torch.ones(2, 40), IntGrid(4, 32, False), scale_dtype=torch.float16)


def test_a_slice_of_columns_rounds_as_the_whole():
    """What error compensation relies on: column by column under the scales of the group."""
    w = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    scale, zero_point = int_params(w.unflatten(1, (-1, 32)), IntGrid(4, 32, False), torch.float16)
    whole = round_int(w, scale, zero_point, 4)
    column = round_int(w[:, 40:41], scale[:, 1:], zero_point[:, 1:], 4)
    assert torch.equal(column, whole[:, 40:41])


def test_int8_codes_and_scales_of_omni_infer():
    """amax / 127 in float32, never -128: the golden bytes."""
    vectors = golden.load("int8_per_channel")
    expected = vectors["amax_over_127_fp32"]
    weight = quantize_int(
        golden.tensor(vectors["input_weight"]).float(),
        IntGrid(8, None, True),
        scale_dtype=torch.float32,
    )
    assert torch.equal(weight.codes, golden.tensor(expected["weight"]))
    assert torch.equal(weight.scale, golden.tensor(expected["weight_scale"]))


def test_symmetric_int4_scales_of_compressed_tensors():
    vectors = golden.load("ct_pack_quantized_g32_sym")
    weight = quantize_int(
        golden.tensor(vectors["input_weight"]).float(),
        IntGrid(4, 32, True),
        scale_dtype=torch.bfloat16,
    )
    assert torch.equal(weight.scale.bfloat16(), golden.tensor(vectors["tensors"]["weight_scale"]))
