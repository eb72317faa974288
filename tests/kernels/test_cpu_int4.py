"""Int4 products of many rows on a CPU: over expanded blocks, as exact as torch's operator, which
they stand in for."""

import pytest
import torch
from quantkit_kernels import prepare
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.cpu import int4
from quantkit_kernels.samples import TOLERANCE, distance, exact_linear, random_weight
from quantkit_kernels.weights import dequantize

pytestmark = pytest.mark.skipif(
    why_unusable("linear_int4", "cpu", torch.device("cpu")) is not None or not int4.can_be_had(),
    reason="no library",
)


@pytest.mark.parametrize("grid", ["int4-asym-32", "int4-asym-128"])
@pytest.mark.parametrize("n", [int4.BLOCK, 5 * int4.BLOCK + 16, 3 * int4.BLOCK + 48, 16, 2080])
def test_many_rows_are_as_exact_as_few(grid, n):
    rng = torch.Generator().manual_seed(n)
    weight = random_weight(grid, n, 1024, rng)
    linear = prepare(weight, backend="cpu", dtype=torch.bfloat16)
    x = torch.randn(130, 1024, generator=rng).bfloat16()
    assert distance(linear(x), exact_linear(x, weight)) < TOLERANCE[torch.bfloat16]
    assert distance(linear(x[:8]), linear(x)[:8].double()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_expanded_rows_are_the_weight(dtype):
    weight = random_weight(
        "int4-asym-128", 3 * int4.BLOCK + 16, 256, torch.Generator().manual_seed(1)
    )
    linear = prepare(weight, backend="cpu", dtype=torch.bfloat16)
    scale, offset = (side.float().contiguous() for side in linear.sides.unbind(-1))
    for start, stop in (
        (0, 3 * int4.BLOCK + 16),
        (int4.BLOCK, 2 * int4.BLOCK),
        (2 * int4.BLOCK, 3 * int4.BLOCK + 16),
    ):
        rows = int4.expand(linear.packed, scale, offset, 128, start, stop, dtype)
        assert rows.dtype == dtype
        assert distance(rows, dequantize(weight)[start:stop].double()) < TOLERANCE[torch.bfloat16]
    rounded = int4.expand(linear.packed, scale, offset, 128, 0, int4.BLOCK, torch.bfloat16)
    assert torch.equal(
        rounded,
        int4.expand(linear.packed, scale, offset, 128, 0, int4.BLOCK, torch.float32).bfloat16(),
    )


def test_codes_in_any_order_of_memory_are_packed_alike():
    codes = torch.randint(-8, 8, (int4.BLOCK + 16, 64), dtype=torch.int8)
    assert torch.equal(int4.pack(codes.t().contiguous().t()), int4.pack(codes))


def test_without_a_compiler_it_is_torch_s_operator(monkeypatch):
    weight = random_weight("int4-asym-32", 128, 256, torch.Generator().manual_seed(2))
    x = torch.randn(200, 256).bfloat16()
    monkeypatch.setattr(int4, "can_be_had", lambda: False)
    linear = prepare(weight, backend="cpu", dtype=torch.bfloat16)
    expected = torch.ops.aten._weight_int4pack_mm_for_cpu(x, linear.packed, 32, linear.sides)
    assert torch.equal(linear(x), expected)
    assert distance(expected, exact_linear(x, weight)) < TOLERANCE[torch.bfloat16]
