"""Experts of few tokens in two launches, and routing's rest in one: on the double of the Triton kernels."""

from collections.abc import Iterator

import pytest
import torch
from ascend import triton_double
from kernel_weights import exact_experts, layer, random_experts
from quantkit_kernels import Routing, ascend, moe_gate, reference
from quantkit_kernels.ascend.chip import COLUMNS, FEW_TOKENS, SPAN
from quantkit_kernels.samples import distance

GRIDS = ("int4-asym-128", "int4-asym-32", "int4-sym-64", "fp4", "int8")


@pytest.fixture(autouse=True)
def launched() -> Iterator[list[str]]:
    with triton_double.installed() as names:
        yield names


@pytest.mark.parametrize("grid", GRIDS)
def test_experts_of_few_tokens_are_two_launches(grid: str, launched: list[str]) -> None:
    rng, kind = torch.Generator().manual_seed(3), grid.split("-")[0]
    weights = random_experts(grid, 6, 256, 128, rng)
    experts = layer(weights, "ascend", torch.bfloat16)
    for tokens, top_k in ((1, 1), (2, 3), (FEW_TOKENS, 6), (FEW_TOKENS + 1, 2)):
        launched.clear()
        x = torch.randn(tokens, 256, generator=rng).bfloat16()
        ids, share = torch.rand(tokens, 6, generator=rng).topk(top_k, dim=-1).indices, torch.rand(tokens, top_k, generator=rng)
        assert distance(experts(x, ids, share), exact_experts(x, ids, share, weights)) < 1.2e-2
        few = tokens <= FEW_TOKENS
        assert launched == ([f"{kind}_gate_up", f"{kind}_down"] if few else [f"{kind}_blocks"] * 2), tokens


def test_gate_ends_with_a_column_tile() -> None:
    """Down's inputs, as many as gate has columns, are whole spans, and a span is whole tiles: up begins with one."""
    assert all(SPAN % columns == 0 for columns in COLUMNS.values())
    for grid in ("int4", "fp4", "int8"):
        assert "multiples of 128" in (ascend.refused(f"experts_{grid}", torch.bfloat16, (256, 192)) or "")
        assert ascend.refused(f"experts_{grid}", torch.bfloat16, (128, 256)) is None


@pytest.mark.parametrize("joined", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_gate(joined: int, tokens: int, launched: list[str]) -> None:
    rng = torch.Generator().manual_seed(tokens)
    x, router = torch.randn(tokens, 512, generator=rng).bfloat16(), torch.randn(40, 512, generator=rng)
    how = Routing(40, 5, n_group=4, topk_group=2, routed_scaling_factor=2.5, num_joined_experts=joined)
    bias = torch.rand(40, generator=rng)
    ids, weights = moe_gate(x, router, bias, how, backend="ascend")
    twin_ids, twin_weights = reference.moe_gate(x, router, bias, how)
    assert torch.equal(ids.long(), twin_ids)
    torch.testing.assert_close(weights, twin_weights, rtol=1e-5, atol=1e-6)
    assert launched == ["router"] * (tokens <= FEW_TOKENS) + ["join"] * bool(joined)


@pytest.mark.parametrize("grid", ["int4-asym-128", "fp4", "int8"])
def test_what_tokens_give_their_experts_is_not_rounded(grid: str) -> None:
    """Of many tokens: the sum is float32's of products and float32 weights."""
    rng = torch.Generator().manual_seed(5)
    experts, tokens = layer(random_experts(grid, 4, 128, 128, rng), "ascend", torch.bfloat16), FEW_TOKENS + 2
    x, ids = torch.randn(tokens, 128, generator=rng).bfloat16(), torch.rand(tokens, 4, generator=rng).topk(2, dim=-1).indices
    share = torch.rand(tokens, 2, generator=rng)
    alone = [experts(x, ids[:, place : place + 1], torch.ones(tokens, 1)).float() * share[:, place : place + 1] for place in (0, 1)]
    assert torch.equal(experts(x, ids, share), (alone[0] + alone[1]).bfloat16())
