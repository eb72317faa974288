"""NVFP4 on FP4 units, without such a card: the bytes that cuBLAS is described to read, and the
product over these bytes in torch."""

import sys

import pytest
import torch
from quantkit_kernels import backends
from quantkit_kernels.backends import choose, serving, why_unusable
from quantkit_kernels.samples import TOLERANCE, distance, random_weight
from quantkit_kernels.scaled_mm.layout import rounded_to_nvfp4, swizzled
from quantkit_kernels.scaled_mm.linear import linear, product
from quantkit_kernels.weights import Fp4, decode_e2m1, dequantize

CUDA = torch.device("cuda")


def place(row, group, groups):
    """Of a scale in the blocks: NVIDIA's description of the layout, word for word."""
    tiles_of_a_row = -(-groups // 4)
    tile = (row // 128) * tiles_of_a_row + group // 4
    return tile * 512 + (row % 128 % 32) * 16 + (row % 128 // 32) * 4 + group % 4


@pytest.mark.parametrize(("n", "groups"), [(128, 4), (1, 1), (129, 5)])
def test_every_scale_lies_where_the_layout_says(n, groups):
    scales = torch.randint(1, 127, (n, groups), dtype=torch.uint8)
    found = swizzled(scales.view(torch.float8_e4m3fn)).view(torch.uint8)
    assert len(found) == -(-n // 128) * -(-groups // 4) * 512
    for row in range(n):
        for group in range(groups):
            assert found[place(row, group, groups)] == scales[row, group]
    assert found.count_nonzero() == n * groups


def test_activations_are_rounded_to_the_nearest_code_and_to_the_even_one_of_two():
    values = torch.tensor(
        [0.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0, -0.75, 2.6, 0.1, -1.0, 4.0]
    )
    codes, scales, whole = rounded_to_nvfp4(values.view(1, 16) * 448)
    assert codes.tolist() == [[0, 0, 1, 2, 2, 4, 4, 6, 6, 14, 7, 10, 5, 0, 10, 6]]
    assert float(scales[0, 0]) == 448.0
    assert float(whole) == 1.0
    zeros = rounded_to_nvfp4(torch.zeros(2, 32))
    assert not decode_e2m1(zeros[0]).any()


def product_of_bytes(x, x_scales, weight, scales):
    """What the card would compute, in float64 from the bytes it would be given."""

    def values(codes, blocks):
        assert codes.dtype == torch.float4_e2m1fn_x2
        both = codes.view(torch.uint8)
        numbers = decode_e2m1(torch.stack([both & 15, both >> 4], dim=-1).flatten(1)).double()
        groups = numbers.shape[1] // 16
        places = torch.tensor(
            [[place(row, group, groups) for group in range(groups)] for row in range(len(numbers))]
        )
        return (numbers.unflatten(1, (-1, 16)) * blocks.double()[places].unsqueeze(-1)).flatten(1)

    return (values(x, x_scales) @ values(weight, scales).T).bfloat16()


@pytest.mark.parametrize("stacked", [False, True])
def test_a_linear_is_the_product_of_both_as_they_were_rounded(stacked, monkeypatch, caplog):
    module = sys.modules[linear.__module__]
    monkeypatch.setattr(module, "product", product_of_bytes)
    weight = random_weight("fp4", 48, 96, torch.Generator().manual_seed(1))
    assert isinstance(weight, Fp4)
    if stacked:  # of two tensors with global scales of their own
        weight = weight._replace(global_scale=torch.linspace(0.01, 0.02, 48))
    x = torch.randn(5, 96).bfloat16()
    module._warn.cache_clear()
    found = linear(weight, torch.bfloat16, torch.device("cpu"))(x)
    assert "what runs is W4A4" in caplog.text
    exact = (
        dequantize(Fp4(*rounded_to_nvfp4(x)), torch.float64) @ dequantize(weight, torch.float64).T
    )
    assert distance(found, exact) < TOLERANCE[torch.bfloat16]


@pytest.mark.skipif(
    torch.__version__.startswith("2.10."),
    reason="without a device torch 2.10 knows NVFP4 with a second scale only",
)
def test_torch_takes_what_the_product_is_given():
    """Its own rules for the shapes, without a device."""
    weight, x = (
        torch.zeros(rows, 64, dtype=torch.uint8, device="meta").view(torch.float4_e2m1fn_x2)
        for rows in (48, 5)
    )
    scales, x_scales = (
        torch.zeros(2 * 512, dtype=torch.uint8, device="meta").view(torch.float8_e4m3fn)
        for _ in range(2)
    )
    assert product(x, x_scales, weight, scales).shape == (5, 48)


@pytest.mark.parametrize(
    ("capability", "fits"),
    [((9, 0), False), ((10, 0), True), ((12, 0), True)],
)
def test_it_is_for_cards_with_fp4_units_and_for_who_asks(capability, fits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    reason = why_unusable("linear_fp4", "scaled_mm", CUDA, torch.bfloat16, ((64, 128),))
    assert (reason is None) == fits
    if not fits:
        assert f"this device has {capability[0]}.{capability[1]}" in str(reason)
    else:
        assert choose("linear_fp4", "scaled_mm", CUDA, torch.bfloat16, ((64, 128),)) == "scaled_mm"
        assert "multiples of 16" in str(
            why_unusable("linear_fp4", "scaled_mm", CUDA, torch.bfloat16, ((60, 128),))
        )
    # Activations of 16 bits are what the scheme says.
    others = [
        name for name in backends.BACKENDS if name not in ("scaled_mm", "reference", "expanded")
    ]
    real = why_unusable
    monkeypatch.setattr(
        backends,
        "why_unusable",
        lambda operator, name, *a: "not here" if name in others else real(operator, name, *a),
    )
    assert serving("linear_fp4", "auto", CUDA) == "reference"
