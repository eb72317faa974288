"""Sorting token-expert pairs into blocks of one expert each, by shapes alone."""

import pytest
import torch
from quantkit_kernels.ascend.experts import group_pairs


@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), [(1, 1, 1), (3, 8, 256), (33, 4, 6), (300, 2, 5)])
@pytest.mark.parametrize("skewed", [False, True])
def test_every_pair_has_a_row_in_a_block_of_its_expert(tokens: int, top_k: int, num_experts: int, skewed: bool) -> None:
    block = 16
    rng = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, num_experts, generator=rng).topk(min(top_k, num_experts), dim=-1).indices
    if skewed:
        ids = torch.full_like(ids, num_experts - 1)
    slots, experts = group_pairs(ids, num_experts, block)
    pairs = ids.numel()
    assert len(slots.unique()) == pairs
    assert torch.equal(experts[slots // block].long(), ids.flatten())
    assert len(experts) == pairs // block + min(pairs, num_experts)  # known before the ids are
    used = torch.zeros(len(experts), dtype=torch.bool).index_fill_(0, slots // block, True)
    assert torch.equal(experts >= 0, used)
