"""Experts of one rank among several on a CUDA device: ids that name no expert here add nothing, in
every kernel."""

import pytest
import torch
from quantkit_kernels import NO_EXPERT, ExpertsBuilder
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.samples import TOLERANCE, distance, random_weight
from quantkit_kernels.self_check import exact_experts

DEVICE = torch.device("cuda")
REASON = why_unusable("linear_int4", "cuda", DEVICE, torch.bfloat16)
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.usefixtures("poisoned_memory"),
]

COUNT, HIDDEN, INTERMEDIATE = 12, 512, 1024


# One launch of both products; a launch each for int8; pairs sorted, in tiles that are rounded and
# that are not.
@pytest.mark.parametrize("tokens", [1, 2, 12, 40, 700])
@pytest.mark.parametrize("grid", ["int4-asym-128", "fp4", "int8"])
def test_pairs_of_no_expert_add_nothing(grid: str, tokens: int) -> None:
    rng = torch.Generator(DEVICE).manual_seed(tokens)
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    few = [[random_weight(grid, n, k, rng) for n, k in shapes] for _ in range(4)]
    builder = ExpertsBuilder(COUNT, backend="cuda", dtype=torch.bfloat16, device=DEVICE)
    for index in range(COUNT):
        builder.add(index, *few[index % 4])
    experts = builder.finish()
    experts.asked = 0.5
    x = torch.randn(tokens, HIDDEN, generator=rng, device=DEVICE).bfloat16()
    ids = torch.rand(tokens, COUNT, generator=rng, device=DEVICE).topk(4, dim=-1).indices.int()
    weights = torch.rand(tokens, 4, generator=rng, device=DEVICE)
    gone = torch.rand(tokens, 4, generator=rng, device=DEVICE) < 0.5
    gone[0] = torch.tensor([True, False, True, False], device=DEVICE) if tokens == 1 else True
    found = experts(x, ids.masked_fill(gone, NO_EXPERT), weights)
    assert tokens == 1 or not found[0].any()
    exact = exact_experts(x, ids, weights.masked_fill(gone, 0.0), few)
    assert distance(found, exact) < (2e-2 if grid == "int8" else 2 * TOLERANCE[torch.bfloat16])
    assert not experts(x, torch.full_like(ids, NO_EXPERT), weights).any()
