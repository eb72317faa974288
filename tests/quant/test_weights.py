"""The value of a weight is the formula of its format, written out here element by element."""

import pytest
import torch

from quantkit.grids.base import dequantize
from quantkit.grids.e2m1 import E2M1_VALUES
from quantkit.grids.fp8_block import Fp8BlockWeight
from quantkit.grids.int_groups import IntWeight
from quantkit.grids.nvfp4 import Nvfp4Weight


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


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 129), (5, 7), (576, 256)])
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


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: IntWeight(torch.zeros(2, 4), torch.ones(2, 1), None, bits=4),
        lambda: IntWeight(torch.zeros(2, 4, dtype=torch.int8), torch.ones(2, 3), None, bits=4),
        lambda: IntWeight(
            torch.zeros(2, 4, dtype=torch.int8), torch.ones(2, 1).half(), None, bits=4
        ),
        lambda: Nvfp4Weight(
            torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 1), torch.tensor(1.0)
        ),
        lambda: Fp8BlockWeight(torch.zeros(200, 4).to(torch.float8_e4m3fn), torch.ones(1, 1)),
    ],
)
def test_parts_that_do_not_fit_are_refused(wrong):
    with pytest.raises(AssertionError):
        wrong()


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
