"""Sums of x x^T over tokens in bfloat16: exact products, float32 sums, the lower half of whole
panels, the same by any number of threads."""

import pytest
import torch
from quantkit_kernels.cpu.gram import GramOperand, has_gram

from quantkit.calibrate.input_sums import Observer, panels
from quantkit.calibrate.ranks import Ranks
from quantkit.quant import tensor_cores

on_bf16 = pytest.mark.skipif(not has_gram(), reason="no AVX512_BF16, or no C++ compiler here")


def exact(x):
    rounded = x.bfloat16().double()
    return rounded.t() @ rounded


@on_bf16
@pytest.mark.parametrize("shape", [(1, 1), (37, 100), (2, 64), (129, 65), (300, 1100)], ids=str)
def test_products_are_exact_and_sums_float32(shape):
    torch.manual_seed(0)
    x, before = torch.randn(2 * shape[0], shape[1])[::2], torch.randn(shape[1], shape[1])
    out = before.clone()
    for rows in panels(shape[1]):
        GramOperand(x).add_to(out, rows)
    wanted = before.double() + exact(x)
    assert ((out - wanted).tril().abs() <= 1e-5 * exact(x).diagonal().max() + 1e-6).all()
    above = torch.ones_like(out).triu(64).bool()
    assert torch.equal(out[above], before[above])


@on_bf16
def test_bits_are_those_of_any_number_of_threads():
    torch.manual_seed(1)
    x, before, found = torch.randn(200, 700), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(torch.zeros(700, 700))
            GramOperand(x).add_to(found[-1], slice(0, 1024))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("faster", [True, False])
def test_statistics_are_symmetric_with_and_without(faster, monkeypatch):
    if not faster:
        monkeypatch.setattr(tensor_cores, "has_gram", lambda: False)
    torch.manual_seed(2)
    x, observer = torch.randn(600, 1100), Observer(4, Ranks())
    for part in x.split(200):
        observer("site", part)
    for found in (observer.finish()["site"].mean_hessian, tensor_cores.gram(x) / 600):
        torch.testing.assert_close(found, x.t() @ x / 600, atol=2e-3, rtol=0.0)
        assert torch.equal(found, found.t())
