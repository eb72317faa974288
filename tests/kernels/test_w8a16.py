"""Weight-only int8: the bytes that are held, without a compiler, and what is refused."""

import pytest
import torch
from quantkit_kernels import prepare
from quantkit_kernels.cpu import w8a16
from quantkit_kernels.samples import TOLERANCE, distance, exact_linear, random_weight


@pytest.mark.parametrize("grid", ["w8a16-32", "w8a16-128", "w8a16-channel"])
def test_a_byte_a_code_is_held(grid):
    weight = random_weight(grid, 64, 256, torch.Generator().manual_seed(1))
    linear = prepare(weight, backend="cpu")
    assert linear.backend == "cpu"
    assert linear.nbytes == 64 * 256 + 4 * weight[1].numel()


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
def test_without_a_compiler_rows_are_expanded(rows, monkeypatch):
    rng = torch.Generator()
    rng.manual_seed(0)
    weight, x = random_weight("w8a16-32", 48, 96, rng), torch.randn(rows, 96, generator=rng)
    linear = prepare(weight, backend="cpu", dtype=torch.float32)
    own = linear(x)
    monkeypatch.setattr(w8a16, "once", lambda name: None)
    for y in (own, linear(x)):
        assert distance(y, exact_linear(x, weight)) < TOLERANCE[torch.float32]


def test_an_odd_number_of_inputs_with_one_scale():
    weight = random_weight("w8a16-channel", 17, 45, torch.Generator().manual_seed(2))
    x = torch.randn(3, 45)
    y = prepare(weight, backend="cpu", dtype=torch.float32)(x)
    assert distance(y, exact_linear(x, weight)) < TOLERANCE[torch.float32]
