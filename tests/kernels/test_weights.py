"""The values that codes stand for, from the definition of each grid."""

import torch
from quantkit_kernels import Fp4, Int4, dequantize
from quantkit_kernels.weights import decode_e2m1


def test_every_e2m1_code():
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    decoded = decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist()
    assert decoded == values + [-value for value in values]


def test_dequantize_uses_the_group_of_each_column():
    codes = torch.arange(64).remainder(16).sub(8).to(torch.int8).view(1, 64)
    scale, zero_point = torch.tensor([[0.5, 2.0]]), torch.tensor([[3, -1]], dtype=torch.int8)
    weight = dequantize(Int4(codes, scale, zero_point))
    assert weight[0, 5].item() == (codes[0, 5].item() - 3) * 0.5
    assert weight[0, 40].item() == (codes[0, 40].item() + 1) * 2.0


def test_fp4_multiplies_both_scales_and_takes_one_global_scale_per_row():
    codes = torch.full((2, 32), 15, dtype=torch.uint8)
    scale = torch.tensor([[1.0, 2.0], [4.0, 0.5]]).to(torch.float8_e4m3fn)
    weight = dequantize(Fp4(codes, scale, torch.tensor([0.5, 3.0])))
    assert weight[:, [0, 16]].tolist() == [[-3.0, -6.0], [-72.0, -9.0]]
