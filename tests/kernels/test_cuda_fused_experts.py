"""Experts of few tokens, with both products in one launch and one token's in two, on a CUDA device,
against float64."""

import pytest
import torch
from quantkit_kernels import NO_EXPERT, ExpertsBuilder, UnsummedPairs
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.cuda.experts.experts import CudaExperts
from quantkit_kernels.cuda.experts.fused import fused_experts
from quantkit_kernels.cuda.plans import TokensInSharedPlan
from quantkit_kernels.samples import TOLERANCE, distance, random_weight
from quantkit_kernels.self_check import exact_experts

DEVICE = torch.device("cuda")
REASON = why_unusable("linear_int4", "cuda", DEVICE, torch.bfloat16)
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.usefixtures("poisoned_memory"),
]

GRIDS = ("int4-asym-32", "int4-asym-64", "int4-asym-128", "int4-sym-128", "fp4")


def built(grid, count, hidden, intermediate, dtype, rng):
    """A layer whose expert e has the weights number e % 4, and those."""
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    few = [[random_weight(grid, n, k, rng) for n, k in shapes] for _ in range(4)]
    builder = ExpertsBuilder(count, backend="cuda", dtype=dtype, device=DEVICE)
    for index in range(count):
        builder.add(index, *few[index % 4])
    experts = builder.finish()
    assert isinstance(experts, CudaExperts)
    return experts, few


def asked(tokens, top_k, count, hidden, dtype, rng):
    """x, ids of different experts, and weights."""
    x = torch.randn(tokens, hidden, generator=rng, device=DEVICE).to(dtype)
    ids = torch.rand(tokens, count, generator=rng, device=DEVICE).topk(top_k, dim=-1).indices
    return x, ids, torch.rand(tokens, top_k, generator=rng, device=DEVICE)


# Fewer chunks of K than warps, a number of them that warps share unevenly, and more strips than
# blocks.
@pytest.mark.parametrize(
    ("hidden", "intermediate", "count"), [(256, 128, 6), (1152, 384, 9), (2048, 1024, 40)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grid", GRIDS)
def test_few_tokens_match_float64(grid, dtype, hidden, intermediate, count):
    if grid == "fp4" and dtype == torch.float16:
        pytest.skip("FP4 computes in bfloat16 only")
    rng = torch.Generator(DEVICE).manual_seed(0)
    experts, few = built(grid, count, hidden, intermediate, dtype, rng)
    held = (experts.gate_up, experts.down, experts.kind, experts.group, count)
    # As many pairs as one warp lists, as are listed by rank, as one for every thread of a block, as
    # two, and more.
    for tokens, top_k in ((1, 1), (5, 6), (11, 3), (32, 4), (33, 4), (100, 3), (180, 3)):
        x, spread, weights = asked(tokens, top_k, count, hidden, dtype, rng)
        # With experts left empty, and one named several times.
        for ids in (spread, torch.full_like(spread, 4), spread.int()):
            exact = exact_experts(x, ids, weights, few)
            for tiles in (1, 2):
                y, again = (fused_experts(*held, x, ids, weights, tiles).summed() for _ in range(2))
                assert distance(y, exact) < 2 * TOLERANCE[dtype], (tokens, top_k, tiles)
                assert torch.equal(y, again), (tokens, top_k, tiles)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grid", GRIDS)
def test_one_token_with_tokens_in_shared_memory_matches_float64(grid, dtype):
    """Rows that are no whole block, clusters of more blocks than chunks of K, warps that none are
    left for; an expert named twice."""
    if grid == "fp4" and dtype == torch.float16:
        pytest.skip("FP4 computes in bfloat16 only")
    rng = torch.Generator(DEVICE).manual_seed(0)
    for hidden, intermediate in ((256, 128), (1152, 384), (2048, 1024)):
        experts, few = built(grid, 9, hidden, intermediate, dtype, rng)
        for top_k in (1, 6):
            x, spread, weights = asked(1, top_k, 9, hidden, dtype, rng)
            for ids in (spread, torch.full_like(spread, 4), spread.int()):
                exact = exact_experts(x, ids, weights, few)
                for plans in (
                    (TokensInSharedPlan(1, 1, 1), TokensInSharedPlan(1, 2, 1)),
                    (TokensInSharedPlan(1, 3, 2), TokensInSharedPlan(1, 7, 3)),
                    (TokensInSharedPlan(1, 18, 4), TokensInSharedPlan(1, 5, 8)),
                ):
                    y, again = (experts.two_products(x, ids, weights, plans) for _ in range(2))
                    assert distance(y, exact) < 2 * TOLERANCE[dtype], (hidden, top_k, plans)
                    assert torch.equal(y, again), (hidden, top_k, plans)
                assert distance(experts(x, ids, weights), exact) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 2, 8, 40])
@pytest.mark.parametrize("grid", ["int4-asym-128", "fp4", "int8"])
def test_unsummed_pairs_add_up_to_the_call(grid, tokens):
    """By both kernels for few tokens; int8 and many tokens come summed."""
    rng = torch.Generator(DEVICE).manual_seed(4)
    experts, _ = built(grid, 24, 1024, 512, torch.bfloat16, rng)
    for _ in range(3):  # counters are zero again behind each
        x, ids, weights = asked(tokens, 6, 24, 1024, torch.bfloat16, rng)
        expected, found = experts(x, ids, weights), experts.unsummed(x, ids, weights)
        assert isinstance(found, UnsummedPairs) == (grid != "int8" and tokens < 40)
        assert torch.equal(found.summed() if isinstance(found, UnsummedPairs) else found, expected)
    experts.routed_share = 0.5
    assert isinstance(experts.unsummed(x, ids, weights), torch.Tensor), "ids may be NO_EXPERT"


@pytest.mark.parametrize("grid", ["int4-asym-128", "fp4"])
def test_replays_of_a_graph_with_changing_routing(grid):
    """The counters that blocks wait by are zero again after every launch, whatever experts it
    used."""
    rng = torch.Generator(DEVICE).manual_seed(3)
    experts, few = built(grid, 24, 512, 256, torch.bfloat16, rng)
    x, ids, weights = asked(16, 4, 24, 512, torch.bfloat16, rng)
    experts(x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = experts(x, ids, weights)
    for turn in range(20):
        ids.copy_(
            torch.randint(0, 1 + turn % 24, (16, 4), generator=rng, device=DEVICE)
        )  # some counters lie fallow and come back
        graph.replay()
        assert distance(y, exact_experts(x, ids, weights, few)) < 2 * TOLERANCE[torch.bfloat16]


# One launch of both products; a launch each for int8; pairs sorted, in tiles that are rounded and
# that are not.
@pytest.mark.parametrize("tokens", [1, 2, 12, 40, 700])
@pytest.mark.parametrize("grid", ["int4-asym-128", "fp4", "int8"])
def test_pairs_of_no_expert_add_nothing(grid, tokens):
    """Experts of one rank among several: ids that name none here."""
    rng = torch.Generator(DEVICE).manual_seed(tokens)
    experts, few = built(grid, 12, 512, 1024, torch.bfloat16, rng)
    experts.routed_share = 0.5
    x, ids, weights = asked(tokens, 4, 12, 512, torch.bfloat16, rng)
    ids, gone = ids.int(), torch.rand(tokens, 4, generator=rng, device=DEVICE) < 0.5
    gone[0] = torch.tensor([True, False, True, False], device=DEVICE) if tokens == 1 else True
    found = experts(x, ids.masked_fill(gone, NO_EXPERT), weights)
    assert tokens == 1 or not found[0].any()
    exact = exact_experts(x, ids, weights.masked_fill(gone, 0.0), few)
    assert distance(found, exact) < (2e-2 if grid == "int8" else 2 * TOLERANCE[torch.bfloat16])
    assert not experts(x, torch.full_like(ids, NO_EXPERT), weights).any()
