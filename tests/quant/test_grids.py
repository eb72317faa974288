"""Grids: the value of a weight is the formula of its format, rounding gives the nearest codes under
a scale that the format can store, with the codes and scales of other people's libraries; quantizers
agree with that, and fit better where asked to."""

import golden
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nearest import quantize_fp4, quantize_int
from refused import refused

from quantkit.grids.base import dequantize, round_to_nearest
from quantkit.grids.e2m1 import E2M1_VALUES, encode_e2m1
from quantkit.grids.fp8_block import Fp8BlockWeight
from quantkit.grids.int_groups import IntGrid, IntQuantizer, IntWeight
from quantkit.grids.nvfp4 import Nvfp4Quantizer, Nvfp4Weight, global_scale
from quantkit.quant.packing import pack_pairs


def test_int_weight_is_codes_less_zero_point_times_scale():
    codes = torch.tensor([[-8, 7, 0, 3], [1, -1, 5, -6]], dtype=torch.int8)
    scale = torch.tensor([[0.5, 2.0], [0.25, 3.0]])
    zero_point = torch.tensor([[-8, 1], [0, 7]], dtype=torch.int8)
    expected = [[0.0, 7.5, -2.0, 4.0], [0.25, -0.25, -6.0, -39.0]]
    assert dequantize(IntWeight(codes, scale, zero_point, bits=4)).tolist() == expected
    assert dequantize(IntWeight(codes, scale, None, bits=4)).tolist() == [
        [-4.0, 3.5, 0.0, 6.0],
        [0.25, -0.25, 15.0, -18.0],
    ]


def test_fp4_weight_has_two_levels_of_scale():
    codes = torch.arange(32, dtype=torch.uint8).remainder(16).reshape(1, 32)
    scale = torch.tensor([[2.0, 0.5]]).to(torch.float8_e4m3fn)
    expected = [value * 2.0 * 0.25 for value in E2M1_VALUES] + [
        value * 0.5 * 0.25 for value in E2M1_VALUES
    ]
    assert dequantize(Nvfp4Weight(codes, scale, torch.tensor(0.25))).flatten().tolist() == expected


@pytest.mark.parametrize("shape", [(256, 384), (130, 129), (5, 7)])
def test_fp8_block_weight_scales_each_block(shape):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=generator)
    value = dequantize(Fp8BlockWeight(codes, scale))
    for row in range(0, shape[0], 41):
        for column in range(0, shape[1], 37):
            assert (
                value[row, column] == codes[row, column].float() * scale[row // 128, column // 128]
            )


def test_dequantize_rounds_once_and_leaves_the_weight_alone():
    codes = torch.tensor([[3, -5]], dtype=torch.int8)
    weight = IntWeight(codes, torch.tensor([[0.3]]), torch.tensor([[1]], dtype=torch.int8), bits=4)
    assert torch.equal(dequantize(weight, torch.bfloat16), torch.tensor([[0.6, -1.8]]).bfloat16())
    assert codes.tolist() == [[3, -5]]
    plain = torch.tensor([[1.0]], dtype=torch.bfloat16)
    assert dequantize(plain, torch.bfloat16) is plain


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_divided_by_powers_of_two_without_touching_a_code(dtype):
    scale = torch.tensor([[0.5, 3e-4], [2.0, 7.0]]).to(dtype).float()
    weight = IntWeight(
        torch.tensor([[-8, 7, 0, 3], [1, -1, 5, -6]], dtype=torch.int8), scale, None, bits=4
    )
    _check_division(weight, dtype)


def test_fp4_rows_are_divided_within_the_range_of_their_scales():
    scale = torch.tensor([[448.0, 2.0], [1.5, 0.01], [4.0, 8.0]]).to(torch.float8_e4m3fn)
    weight = Nvfp4Weight(
        torch.arange(96, dtype=torch.uint8).remainder(16).reshape(3, 32), scale, torch.tensor(0.25)
    )
    least, largest = _check_division(weight, torch.float8_e4m3fn)
    assert (least.tolist(), largest.tolist()) == ([1.0, 2.0**-8, 2.0**-5], [2.0**7, 1.0, 2.0**8])


def _check_division(weight, dtype):
    least, largest = weight.divisor_range(dtype)
    for divisor in (least, largest):
        divided = weight.divide_rows(divisor, dtype)
        assert torch.equal(divided.codes, weight.codes)
        assert torch.equal(dequantize(divided), dequantize(weight) / divisor[:, None])
        assert torch.equal(divided.scale.to(dtype).float(), divided.scale.float())
    return least, largest


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
    # Ends of a group lie half a step outside, where its zero is rounded.
    assert grid.symmetric or bool((error <= 1.2 * weight.scale.unsqueeze(-1)).all())
    for other in (-1, 1):  # no neighbouring code is nearer
        codes = (weight.codes + other).clamp(low, high)
        neighbour = type(weight)(codes, weight.scale, weight.zero_point, weight.bits)
        worse = (dequantize(neighbour) - w).unflatten(1, (-1, weight.group_size)).abs()
        assert bool((error <= worse * (1 + 1e-5)).all())
    assert weight.codes.min() >= low
    assert weight.codes.max() <= high


@pytest.mark.parametrize("grid", _GRIDS)
def test_zero_stays_exactly_zero(grid):
    """Beside other values, and where all are below the smallest scale."""
    w = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)) + 2.0
    w[:, ::3] = 0.0
    value = dequantize(quantize_int(w, grid, scale_dtype=torch.float16))
    assert bool((value[:, ::3] == 0).all())
    small = quantize_int(torch.full((2, 32), 1e-12), grid, scale_dtype=torch.float16)
    assert bool((small.scale == 1).all())
    assert bool((dequantize(small) == 0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_values_no_scale_can_hold_are_refused(bad):
    w = torch.ones(2, 32)
    w[1, 5] = bad
    with refused(r"not finite or too large for scales in float16"):
        quantize_int(w, IntGrid(4, 32, False), scale_dtype=torch.float16)


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


def test_zeros_stay_zero():
    weight = quantize_fp4(torch.zeros(3, 32))
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


INT4 = IntGrid(4, 128, symmetric=False)
GRIDS = [INT4, IntGrid(4, 32, symmetric=True), IntGrid(8, None, symmetric=True)]


def weight(rows=24, columns=256):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * torch.linspace(
        0.1, 4, columns
    )


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_plain_fit_is_round_to_nearest(grid):
    w = weight()
    values, scales = round_to_nearest(w, IntQuantizer(grid, torch.float16))
    expected = quantize_int(w, grid, scale_dtype=torch.float16)
    assert torch.equal(values, dequantize(expected))
    stored = IntQuantizer(grid, torch.float16).encode(values, scales)
    assert torch.equal(stored.codes, expected.codes)


def test_plain_fp4_fit_is_round_to_nearest():
    w = weight()
    quantizer = Nvfp4Quantizer(global_scale(w.abs().amax()))
    values, scales = round_to_nearest(w, quantizer)
    expected = quantize_fp4(w)
    assert torch.equal(values, dequantize(expected))
    stored = quantizer.encode(values, scales)
    assert torch.equal(stored.codes % 8, expected.codes % 8), "but for the sign of zero"
    assert torch.equal(dequantize(stored), values)
    assert torch.equal(stored.scale.float(), expected.scale.float())


def test_fitting_lowers_the_weighted_error_of_every_row():
    w, importance = weight(), torch.linspace(9, 1, 256).square()
    plain, _ = round_to_nearest(w, IntQuantizer(INT4, torch.float16))
    fitted, _ = round_to_nearest(
        w, IntQuantizer(INT4, torch.float16, (1.0, 0.9, 0.8, 0.7)), importance
    )
    before, after = (((w - values).square() * importance).sum(-1) for values in (plain, fitted))
    assert (after <= before).all()
    assert after.sum() < 0.9 * before.sum()


def test_fp4_global_scale_per_row():
    """Rows of several tensors stacked: each under its own global scale, as if rounded apart."""
    w = weight()
    amax = torch.cat([w[:10].abs().amax().expand(10), w[10:].abs().amax().expand(14)])
    together, _ = round_to_nearest(w, Nvfp4Quantizer(global_scale(amax)))
    assert torch.equal(together[:10], dequantize(quantize_fp4(w[:10])))
    assert torch.equal(together[10:], dequantize(quantize_fp4(w[10:])))
