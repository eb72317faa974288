"""Products on tensor cores are of the operands rounded to TF32, for as long as is asked and no longer."""

import pytest
import torch

from quantkit.quant.tensor_cores import tensor_core_products


@tensor_core_products()
def failing() -> None:
    with tensor_core_products():
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    raise ZeroDivisionError


def test_what_was_set_before_is_set_again() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing()
        assert torch.backends.cuda.matmul.fp32_precision == before


def test_products_of_a_processor_are_those_of_float32() -> None:
    a, b = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    with tensor_core_products():
        product = a @ b
    assert torch.equal(product, a @ b)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_operands_have_eleven_bits() -> None:
    a, b = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0)).cuda()
    exact = a.double() @ b.double()
    with tensor_core_products():
        rounded = a @ b
    assert (a @ b - exact).abs().max() < 1e-4
    assert 1e-3 < (rounded - exact).abs().max() < 0.1
