"""Triton's experts with 16-bit weights: odd sizes, biases and gates, few tokens and many, on a GPU
or in Triton's interpreter."""

import pytest
import torch
from kernel_weights import exact_experts, layer, placed, random_experts
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.samples import TOLERANCE, distance
from quantkit_kernels.triton.dense_experts import PLANS, DenseExperts
from quantkit_kernels.triton.experts import in_parts
from quantkit_kernels.triton.sorted_pairs import places_of, sort_few_pairs, sort_many_pairs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COUNT = 5


def made(weights, dtype):
    experts = layer(placed(weights, DEVICE), "triton", dtype)
    assert isinstance(experts, DenseExperts)
    return experts


@pytest.fixture(autouse=True)
def _usable():
    reason = why_unusable("experts_dense", "triton", DEVICE, torch.bfloat16)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 48), (200, 72), (96, 136)])
def test_sizes_that_fill_no_tile(hidden, intermediate, dtype):
    rng = torch.Generator().manual_seed(hidden)
    weights = random_experts("dense", COUNT, hidden, intermediate, rng)
    experts = made(weights, dtype)
    for tokens, top_k in ((1, 1), (1, 3), (9, 2), (70, 4)):
        x = torch.randn(tokens, hidden, generator=rng).to(dtype)
        ids = torch.rand(tokens, COUNT, generator=rng).topk(top_k).indices
        topk_weights = torch.rand(tokens, top_k, generator=rng)
        expected = exact_experts(x, ids, topk_weights, weights)
        for plan in PLANS:
            y = experts.by_plan(x.to(DEVICE), ids.int().to(DEVICE), topk_weights.to(DEVICE), plan)
            assert distance(y.cpu(), expected) < 2 * TOLERANCE[dtype], (tokens, plan)


def test_more_pairs_than_are_computed_at_once(monkeypatch):
    """Parts are of as many tokens each: one token would be computed by kernels of its own."""
    rng = torch.Generator().manual_seed(1)
    experts = made(random_experts("dense", COUNT, 64, 48, rng), torch.bfloat16)
    x = torch.randn(51, 64, generator=rng).bfloat16().to(DEVICE)
    ids, topk_weights = (
        torch.randint(COUNT, (51, 3), generator=rng).to(DEVICE),
        torch.rand(51, 3, generator=rng).to(DEVICE),
    )
    whole = experts(x, ids, topk_weights)
    kept = 32 * (4 * 64 + 2 * 48)
    monkeypatch.setattr("quantkit_kernels.triton.dense_experts.KEPT_BYTES", kept)
    assert torch.equal(experts(x, ids, topk_weights), whole)
    sizes = in_parts(
        lambda part, *_: torch.tensor([len(part)]), x, ids, topk_weights, experts, kept
    )
    assert sizes.tolist() == [9, 9, 9, 9, 9, 6]


@pytest.mark.parametrize(
    ("tokens", "top_k", "count", "tile"),
    [(300, 2, 5, 16), (1000, 3, 60, 32), (7, 1, 3, 16), (130, 8, 64, 128)],
)
def test_many_pairs_are_sorted_as_few_are(tokens, top_k, count, tile):
    rng = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, count, generator=rng).topk(top_k).indices.to(DEVICE)
    found, expected = (sort(ids, count, tile) for sort in (sort_many_pairs, sort_few_pairs))
    assert torch.equal(found.tile_expert, expected.tile_expert)
    used = expected.tile_expert >= 0
    assert torch.equal(found.tile_count[used], expected.tile_count[used])
    filled = (torch.arange(tile, device=DEVICE) < found.tile_count[:, None]) & used[:, None]
    assert torch.equal(found.order.view(-1, tile)[filled], expected.order.view(-1, tile)[filled])
    places = places_of(ids.int(), count)
    order = ids.flatten().sort(stable=True)
    assert torch.equal(
        places.rows[order.indices], torch.arange(tokens * top_k, device=DEVICE).int()
    )
    assert torch.equal(places.ends, ids.flatten().bincount(minlength=count).cumsum(0).int())
