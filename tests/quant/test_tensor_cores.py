"""Products on tensor cores are of the operands rounded to TF32, for as long as is asked and no
longer; a processor's large ones of what errors carry are in BF16, and GPTQ and descent lose nothing
by it."""

import pytest
import torch

from quantkit.quant import tensor_cores
from quantkit.quant.tensor_cores import (
    LARGE,
    add_error_product_,
    add_sample_product_,
    error_product,
    sample_linear,
    sample_products,
    tensor_core_products,
)


@tensor_core_products()
def failing():
    with tensor_core_products():
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    raise ZeroDivisionError


def test_what_was_set_before_is_set_again():
    before = torch.backends.cuda.matmul.fp32_precision
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing()
        assert torch.backends.cuda.matmul.fp32_precision == before


def test_products_of_calibration_tokens_have_float32_sums():
    """Of operands rounded to BF16 where the processor has that, and never more than rounded."""
    a, b = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    with sample_products():
        product = (a @ b).double()
    assert torch.equal(sample_linear(a, b.t()).double(), product)
    rounded, exact = a.bfloat16().double() @ b.bfloat16().double(), a.double() @ b.double()
    assert min((product - one).abs().max() for one in (rounded, exact)) < 1e-4
    assert (a @ b - exact).abs().max() < 1e-4, "no longer than wanted"


@pytest.mark.parametrize(("known", "rounds"), [
    (("avx512_bf16",), True), (("avx512_bf16", "amx_bf16"), False), ((), False)])  # fmt: skip
def test_operands_are_rounded_before_where_a_processor_has_bf16_and_no_tiles(
    known, rounds, monkeypatch
):
    """oneDNN would not round them there; the result has 8 bits then, and sums over calls 24."""
    torch.manual_seed(0)
    x, w = torch.randn(1024, 256), torch.randn(256, 256)
    assert x.numel() * 256 == LARGE
    monkeypatch.setattr(tensor_cores, "_has", lambda name: name in known)
    rounded = x.bfloat16() @ w.bfloat16().t()
    assert torch.equal(sample_linear(x, w), rounded.float()) == rounds
    torch.testing.assert_close(sample_linear(x, w), x @ w.t(), rtol=2**-7, atol=0.3)
    total = torch.ones(256, 256)
    add_sample_product_(total, x, x)
    torch.testing.assert_close(total, 1 + x.t() @ x, rtol=2**-7, atol=0.6)
    small = sample_linear(x[:8], w)
    torch.testing.assert_close(small, x[:8] @ w.t(), rtol=0, atol=0.5)


def test_large_products_of_a_processor_are_in_bf16_where_it_has_them(monkeypatch):
    torch.manual_seed(0)
    a, b = torch.randn(2, 128, 1024), torch.randn(2, 1024, 512)
    assert LARGE == 128 * 1024 * 512

    def added():
        left = torch.ones(2, 128, 512)
        add_error_product_(left, a[:1], b)
        return left

    rounded, exact = a.bfloat16().double() @ b.bfloat16().double(), a.double() @ b.double()
    monkeypatch.setattr(tensor_cores, "_has_bf16", lambda: True)
    product = error_product(a, b)
    torch.testing.assert_close(product.double(), rounded, rtol=2**-8, atol=0.05)
    assert (product - exact).norm() > 1e-3 * exact.norm()
    assert torch.equal(added(), 1 + error_product(a[:1], b))
    assert torch.equal(error_product(a, b[..., 1:]), a @ b[..., 1:]), "below LARGE in float32"
    monkeypatch.setattr(tensor_cores, "_has_bf16", lambda: False)
    assert torch.equal(error_product(a, b), a @ b)
    torch.testing.assert_close(added(), 1 + a[:1] @ b, rtol=0, atol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_operands_have_eleven_bits():
    a, b = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0)).cuda()
    exact = a.double() @ b.double()
    with tensor_core_products():
        rounded = a @ b
    assert (a @ b - exact).abs().max() < 1e-4
    assert 1e-3 < (rounded - exact).abs().max() < 0.1
