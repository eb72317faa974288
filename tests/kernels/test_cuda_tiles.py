"""Linears by a plan of every kind, and sorted experts, on a CUDA device, against float64: every
format, grid and ragged shape."""

import pytest
import torch
from kernel_weights import exact_experts, layer, placed, random_experts
from quantkit_kernels import ExpertsBuilder, Gating, prepare
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.cuda.experts.experts import CudaExperts
from quantkit_kernels.cuda.experts.sorted import sorted_experts
from quantkit_kernels.cuda.linears.linear import CudaLinear
from quantkit_kernels.cuda.plans import (
    ExpertTilesPlan,
    TileAndSharePlan,
    TilePerBlockPlan,
    TokensInSharedPlan,
    persistent_tiles_plans,
)
from quantkit_kernels.samples import TOLERANCE, distance, exact_linear, random_weight

DEVICE = torch.device("cuda")
REASON = why_unusable("linear_int4", "cuda", DEVICE, torch.bfloat16)
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.usefixtures("poisoned_memory"),
]

GRIDS = ("int4-asym-32", "int4-asym-64", "int4-asym-128", "int4-sym-128", "int8", "fp4")
FOUR_BITS = tuple(grid for grid in GRIDS if grid != "int8")
# Relative error of one activation at the next int8 code, times the square root of K: halfway
# between two codes it goes either way.
ONE_CODE = 3 / 127
SHAPES = ((32, 2), (32, 4), (64, 2), (64, 4), (128, 2), (128, 3), (256, 2))
FOUR_BIT_SHAPES = ((24, 2), (48, 2))


def generator():
    return torch.Generator(DEVICE).manual_seed(0)


def tolerance(grid, dtype, k):
    """Of a product over K input features: what rounding explains, and with int8 one activation of a
    token at the next code."""
    return TOLERANCE[dtype] + (ONE_CODE / k**0.5 if grid == "int8" else 0.0)


def problems(grid, dtype, shapes, token_counts):
    """For every [N, K] and number of tokens: the prepared weight, x [M, K], the exact result, and
    (N, K, M) to tell where it was."""
    if grid == "fp4" and dtype == torch.float16:
        pytest.skip("FP4 computes in bfloat16 only")
    rng = generator()
    for n, k in shapes:
        weight = random_weight(grid, n, k, rng)
        linear = prepare(weight, backend="cuda", dtype=dtype)
        assert isinstance(linear, CudaLinear)
        for m in token_counts:
            x = torch.randn(m, k, generator=rng, device=DEVICE).to(dtype)
            yield linear, x, exact_linear(x, weight), (n, k, m)


def every_tile(grid, tokens, n, k):
    """Of rows that are no whole strip, or no whole block; K of one stage and of more than the ring
    holds."""
    shapes = SHAPES if grid == "int8" else SHAPES + FOUR_BIT_SHAPES
    splits = range(1, min(8, k // 128) + 1)
    return [TilePerBlockPlan(*shape, split) for shape in shapes for split in splits]


def shares(grid, tokens, n, k):
    """All tiles whole, one left over, nearly as many as blocks; parts of one stage and of several;
    a last tile that is no whole one."""
    return [
        TileAndSharePlan(width, blocks)
        for blocks in ((1,) if n <= 256 else (5, 6, 8, 9))
        for width in (32, 64)
        if tokens <= width
    ]


def in_shared_memory(grid, tokens, n, k):
    """K of fewer chunks than warps or blocks, of more than the ring holds, and of a number that
    does not come out even; rows that are no whole block, and warps that none are left for."""
    return [
        TokensInSharedPlan(1 if tokens <= 8 else 2, wn, split)
        for wn in (1, 2, 3, 5, 7, 18)
        for split in (1, 2, 3, 8)
    ]


def persistent(grid, tokens, n, k):
    """One tile and many for each block, K shorter and longer than the ring, rows that are no whole
    cluster's, every part of a tile."""
    return [*persistent_tiles_plans(max(tokens, 129))]  # all of them


PLANS = {
    "tiles": (every_tile, GRIDS, ((80, 128), (2112, 1408), (250, 2048)), (1, 17, 70, 300)),
    "shares": (shares, FOUR_BITS, ((250, 1024), (2112, 1408), (2112, 7168)), (1, 17, 32, 33, 64)),
    "shared": (
        in_shared_memory,
        FOUR_BITS,
        ((80, 128), (2112, 1408), (1140, 7168)),
        (1, 5, 8, 9, 16),
    ),
    "persistent": (
        persistent,
        ("int8",),
        ((80, 128), (2112, 1408), (250, 2048), (40000, 512)),
        (1, 20, 70, 129, 200, 256, 300, 600, 1000),
    ),
}
"""By kind: the plans of a product, grids, [N, K] and numbers of tokens."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kind", "grid"), [(kind, grid) for kind, (_, grids, *_) in PLANS.items() for grid in grids]
)
def test_every_plan_matches_float64(kind, grid, dtype):
    plans, _, shapes, counts = PLANS[kind]
    for linear, x, exact, where in problems(grid, dtype, shapes, counts):
        n, k, m = where
        multiply = linear.few_tokens if kind == "shared" else linear.tiles
        for plan in plans(grid, m, n, k):
            y = multiply(x, plan)
            assert distance(y, exact) < tolerance(grid, dtype, k), (plan, where)
            assert kind in ("tiles", "persistent") or torch.equal(y, multiply(x, plan)), plan


@pytest.mark.parametrize("grid", GRIDS)
def test_every_number_of_tokens_matches_float64(grid):
    """Whatever kernel is chosen, at R1's q_b (measured) and for a shape without measurements, and
    the same result twice."""
    counts = (1, 8, 9, 16, 17, 32, 33, 65, 128, 129, 300, 600, 1025, 4096)
    given = problems(grid, torch.bfloat16, ((24576, 1536), (1000, 640)), counts)
    for linear, x, exact, where in given:
        y = linear(x)
        assert distance(y, exact) < TOLERANCE[torch.bfloat16], where
        assert torch.equal(y, linear(x)), where


@pytest.mark.parametrize("grid", GRIDS)
def test_clamped_experts_match_float64(grid):
    """By every kernel of few and of many tokens."""
    rng, on_cpu, gating = generator(), torch.Generator().manual_seed(0), Gating(limit=2.0)
    weights = random_experts(grid, 7, 256, 384, on_cpu)
    builder = ExpertsBuilder(7, device=DEVICE, gating=gating)
    for index, one in enumerate(zip(*placed(weights, DEVICE))):
        builder.add(index, *one)
    experts = builder.finish()
    assert isinstance(experts, CudaExperts)
    for tokens in (1, 2, 9, 40, 300):
        x = 8 * torch.randn(tokens, 256, generator=rng, device=DEVICE).bfloat16()
        ids = torch.rand(tokens, 7, generator=rng, device=DEVICE).topk(3, dim=-1).indices
        given = (x, ids, torch.rand(tokens, 3, generator=rng, device=DEVICE))
        exact = exact_experts(*(one.cpu() for one in given), weights, gating, None).to(DEVICE)
        for compute in (experts, experts.few_tokens, experts.many_tokens):
            assert distance(compute(*given), exact) < 2e-2, (tokens, compute)


@pytest.mark.parametrize("grid", GRIDS)
def test_sorted_experts_match_float64(grid):
    rng, on_cpu = generator(), torch.Generator().manual_seed(0)
    hidden, intermediate, count = 256, 384, 7
    weights = random_experts(grid, count, hidden, intermediate, on_cpu)
    experts = layer(placed(weights, DEVICE), "cuda", torch.bfloat16)
    assert isinstance(experts, CudaExperts)
    # Widths of every step of 32, and several tiles an expert.
    for tokens, top_k in ((1, 1), (33, 4), (200, 3), (300, 7), (900, 2)):
        x = torch.randn(tokens, hidden, generator=rng, device=DEVICE).bfloat16()
        spread = torch.rand(tokens, count, generator=rng, device=DEVICE).topk(top_k, dim=-1).indices
        topk_weights = torch.rand(tokens, top_k, generator=rng, device=DEVICE)
        # With experts left empty, and one named several times.
        for ids in (spread, torch.full_like(spread, 4), spread.int()):
            exact = exact_experts(x.cpu(), ids.cpu(), topk_weights.cpu(), weights).to(DEVICE)
            plans = [ExpertTilesPlan(96), ExpertTilesPlan(160)]
            plans += [
                TilePerBlockPlan(width, 2, 1)
                for width in ((32,) if grid == "int8" else (24, 32, 48))
            ]
            for plan in plans:
                held = (experts.gate_up, experts.down, experts.kind, experts.group, count)
                y = sorted_experts(*held, x, ids.contiguous(), topk_weights, plan)
                assert distance(y, exact) < 2e-2, (tokens, plan)
                assert torch.equal(
                    y, sorted_experts(*held, x, ids.contiguous(), topk_weights, plan)
                )
            few = experts.few_tokens(x, ids.contiguous(), topk_weights)
            assert distance(experts(x, ids, topk_weights), few.double()) < 2e-2
