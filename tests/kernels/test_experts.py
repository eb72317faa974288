"""Routed experts of every backend against a float64 loop over tokens: ragged, skewed and empty
routings."""

import pytest
import torch
from kernel_weights import exact_experts, layer, random_experts
from quantkit_kernels import (
    BACKENDS,
    NO_EXPERT,
    ExpertBiases,
    ExpertsBuilder,
    Gating,
    prepare_experts,
)
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.expanded.experts import ExpandedLayout
from quantkit_kernels.reference.experts import LoopExperts
from quantkit_kernels.samples import GRIDS, TOLERANCE, distance
from quantkit_kernels.weights import Dense

HIDDEN, INTERMEDIATE, COUNT = 256, 128, 6


def routing(tokens, top_k, rng):
    ids = torch.rand(tokens, COUNT, generator=rng).topk(top_k, dim=-1).indices
    return ids, torch.rand(tokens, top_k, generator=rng)


def skip_unusable(grid, backend, dtype):
    shapes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    reason = why_unusable(
        f"experts_{grid.split('-')[0]}", backend, torch.device("cpu"), dtype, shapes
    )
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", tuple(TOLERANCE), ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grid", GRIDS)
def test_experts_match_float64(grid, backend, dtype):
    skip_unusable(grid, backend, dtype)
    rng = torch.Generator().manual_seed(0)
    weights = random_experts(grid, COUNT, HIDDEN, INTERMEDIATE, rng)
    experts = layer(weights, backend, dtype)
    # Two products with a rounding between them. An int8 step of the intermediate is 1/127 of its
    # largest value, in any dtype.
    tolerance = 2e-2 if grid == "int8" else 2 * TOLERANCE[dtype]
    for tokens, top_k in ((0, 2), (1, 1), (1, 3), (5, 2), (33, 4), (19, 2)):
        x = torch.randn(tokens, HIDDEN, generator=rng).to(dtype)
        ids, topk_weights = routing(tokens, top_k, rng)
        if tokens == 19:
            ids[:] = 4  # the other experts are empty, this one is named twice
        y = experts(x, ids, topk_weights)
        assert (y.dtype, y.shape) == (dtype, x.shape)
        exact = exact_experts(x, ids, topk_weights, weights)
        assert not tokens or distance(y, exact) < tolerance, tokens
        assert torch.equal(experts(x, ids.int(), topk_weights), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "expanded", "cpu"])
def test_experts_round_what_is_between_to_nvfp4_too(backend, dtype):
    skip_unusable("fp4", backend, dtype)
    rng = torch.Generator().manual_seed(8)
    weights = random_experts("fp4-w4a4", COUNT, HIDDEN, INTERMEDIATE, rng)
    experts = layer(weights, backend, dtype)
    assert experts.backend == backend
    x = torch.randn(33, HIDDEN, generator=rng).to(dtype)
    ids, topk_weights = routing(33, 4, rng)
    # What a rounding of 16 bits puts on the other side of a half is a step of four bits away;
    # without the second rounding it is 0.09.
    assert (
        distance(experts(x, ids, topk_weights), exact_experts(x, ids, topk_weights, weights)) < 0.04
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grid", ["int4-asym-128", "int8", "w8a16-128", "dense"])
def test_ids_of_no_expert_add_nothing(grid, backend):
    """The numbers are those of the experts that are named: a part of them, or none. Infinities of an
    expert that was not asked for are dropped where every expert computes every token, as in a
    captured decode step."""
    skip_unusable(grid, backend, torch.float32)
    rng = torch.Generator().manual_seed(6)
    weights = random_experts(grid, COUNT, HIDDEN, INTERMEDIATE, rng)
    if grid == "dense":
        weights[2][5] = Dense(torch.full((HIDDEN, INTERMEDIATE), 3e38))
    experts = layer(weights, backend, torch.float32)
    assert experts.takes_none == isinstance(experts, LoopExperts)
    if not experts.takes_none:
        return
    x = torch.randn(9, HIDDEN, generator=rng)
    ids, topk_weights = routing(9, 3, rng)
    ids[ids == 5] = 0  # some are named twice
    gone = torch.rand(9, 3, generator=rng) < 0.5
    gone[:2], gone[2] = True, False
    assert isinstance(experts, LoopExperts)
    expected = experts(x, ids, topk_weights.masked_fill(gone, 0.0))
    for compute in (experts.sorted, experts.unsorted):
        found = compute(x, ids.masked_fill(gone, NO_EXPERT), topk_weights)
        assert not found[:2].any()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not experts(x[:2], ids[:2].masked_fill(gone[:2], NO_EXPERT), topk_weights[:2]).any()


@pytest.mark.parametrize("grid", ["dense", "int4-asym-128", "int8", "fp4"])
@pytest.mark.parametrize("backend", ["reference", "auto", "expanded", "grouped"])
@pytest.mark.parametrize("biased", [True, False])
def test_clamped_experts_with_biases_match_float64(grid, backend, biased):
    """gpt-oss's, on every backend that has linears of the grid; values are large enough to be
    clamped."""
    if backend == "grouped" and grid == "int8":
        pytest.skip("int8 rounds its activations")
    rng = torch.Generator().manual_seed(10)
    weights, gating = (
        random_experts(grid, COUNT, HIDDEN, INTERMEDIATE, rng),
        Gating(1.702, 7.0, 1.0),
    )
    sizes = (INTERMEDIATE, INTERMEDIATE, HIDDEN)
    biases = [
        ExpertBiases(*(torch.randn(size, generator=rng) * 3 for size in sizes))
        for _ in range(COUNT)
    ]
    builder = ExpertsBuilder(
        COUNT,
        backend="auto" if backend == "grouped" else backend,
        dtype=torch.bfloat16,
        gating=gating,
    )
    layout = ExpandedLayout(COUNT, weights[0][0], torch.bfloat16, torch.device("cpu"), gating)
    for expert in (3, 0, 5, 1, 2, 4):
        one = tuple(projection[expert] for projection in weights)
        if backend == "grouped":
            layout.place(expert, one[0], one[1], one[2], biases[expert] if biased else None)
        else:
            builder.add(expert, one[0], one[1], one[2], biases=biases[expert] if biased else None)
    experts = layout.finish() if backend == "grouped" else builder.finish()
    x = 8 * torch.randn(33, HIDDEN, generator=rng).bfloat16()
    ids, topk_weights = routing(33, 3, rng)
    exact = exact_experts(x, ids, topk_weights, weights, gating, biases if biased else None)
    for compute in (
        (experts, experts.unsorted, experts.sorted)
        if isinstance(experts, LoopExperts)
        else (experts,)
    ):
        assert distance(compute(x, ids, topk_weights), exact) < 2 * TOLERANCE[torch.bfloat16]


def test_builder_takes_any_order_and_refuses_what_does_not_fit():
    rng = torch.Generator().manual_seed(7)
    weights = random_experts("int4-sym-128", 3, HIDDEN, INTERMEDIATE, rng)
    gate, up, down = weights

    def expert(index):
        return gate[index], up[index], down[index]

    builder = ExpertsBuilder(3, backend="reference", dtype=torch.float32)
    builder.add(2, *expert(2))
    builder.add(0, *expert(0))
    with pytest.raises(ValueError, match="already added"):
        builder.add(0, *expert(0))
    with pytest.raises(ValueError, match=r"index: 3"):
        builder.add(3, *expert(0))
    other = random_experts("int4-asym-128", 1, HIDDEN, INTERMEDIATE, rng)
    for wrong, words in (
        ([side[0] for side in other], "differs from the first"),
        ((gate[1], up[1], gate[1]), "down: shape"),
        ((gate[1], Dense(torch.zeros(INTERMEDIATE, HIDDEN)), down[1]), "one grid"),
    ):
        with pytest.raises(ValueError, match=words):
            builder.add(1, *wrong)
    with pytest.raises(ValueError, match="never added"):
        builder.finish()
    builder.add(1, *expert(1))
    experts = builder.finish()
    x, (ids, topk_weights) = torch.randn(4, HIDDEN, generator=rng), routing(4, 1, rng)
    ids = ids % 3
    together = prepare_experts(gate, up, down, backend="reference", dtype=torch.float32)
    assert torch.equal(experts(x, ids, topk_weights), together(x, ids, topk_weights))
