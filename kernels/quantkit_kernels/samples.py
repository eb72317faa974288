"""Random weights of every grid, and the exact results to hold an operator against: what the check, the benchmark and the tests share."""

import torch
from torch import Tensor

from quantkit_kernels.linear import quantize_rows
from quantkit_kernels.weights import Dense, Fp4, Int4, Int8, Weight, dequantize

GRIDS = ("int4-asym-32", "int4-asym-64", "int4-asym-128", "int4-sym-128", "int8", "fp4", "dense")
# By norm ratio: what rounding of the result, and inside 16-bit operators of operands and scales too, explains.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def random_weight(grid: str, n: int, k: int, rng: torch.Generator) -> Weight:
    """A weight W[n, k] whose product with unit activations is about one, with every code in use. It lives on the generator's device."""
    device = rng.device
    if grid == "dense":
        return Dense(torch.randn(n, k, generator=rng, device=device) / k**0.5)
    if grid == "int8":
        scale = (0.5 + torch.rand(n, 1, generator=rng, device=device)) / (70 * k**0.5)
        return Int8(torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=rng, device=device), scale)
    if grid == "fp4":
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=rng, device=device)
        scale = (0.25 + 3 * torch.rand(n, k // 16, generator=rng, device=device)).to(torch.float8_e4m3fn)
        return Fp4(codes, scale, torch.tensor(0.2 / k**0.5, device=device))
    _, symmetry, group = grid.split("-")
    groups = k // int(group)
    codes = torch.randint(-8, 8, (n, k), dtype=torch.int8, generator=rng, device=device)
    scale = (0.5 + torch.rand(n, groups, generator=rng, device=device)) / (5 * k**0.5)
    zero_point = None
    if symmetry == "asym":
        zero_point = torch.randint(-8, 8, (n, groups), dtype=torch.int8, generator=rng, device=device)
    return Int4(codes, scale, zero_point)


def exact_linear(x: Tensor, weight: Weight) -> Tensor:
    """x[M, K] @ W.T in float64, from the values the codes stand for; for int8 over activations rounded as the operator states."""
    if isinstance(weight, Int8):
        codes, scale = quantize_rows(x)
        return (codes.double() * scale.double()) @ dequantize(weight, torch.float64).T
    return x.double() @ dequantize(weight, torch.float64).T


def exact_expert(x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
    """One expert over x[M, H] in float64; what enters `down` is rounded to x's dtype, as an operator's intermediate is."""
    between = torch.nn.functional.silu(exact_linear(x, gate)) * exact_linear(x, up)
    return exact_linear(between.to(x.dtype), down)


def distance(out: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the norm of `exact`; infinite where `out` holds NaN."""
    assert out.shape == exact.shape, (out.shape, exact.shape)
    ratio = (torch.linalg.vector_norm(out.double() - exact) / torch.linalg.vector_norm(exact)).item()
    return ratio if ratio == ratio else float("inf")
