"""Routed experts for many tokens: token-expert pairs sorted by expert, each expert's weights multiplied with tiles of its tokens.

Six launches, none of which depends on the routing's values: the sort, and for gate_up with SiLU and for down with the routing weights the
arrangement of the activations and the product; then the sum over each token's experts.
"""

import torch
from torch import Tensor

from quantkit_kernels.cuda.launch import SILU_MUL, WEIGH, sum_pairs
from quantkit_kernels.cuda.layout import Packed
from quantkit_kernels.cuda.plans import sorted_plan
from quantkit_kernels.cuda.tiles import sort_pairs, tile_gemm

SORTED_PAIRS = 16384  # at once: what is kept between the launches takes about 70 KB a pair (R1)


def sorted_experts(
    gate_up: Packed, down: Packed, kind: str, group: int, num_experts: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """What `Experts` computes of x[T, H], topk_ids[T, k] and topk_weights[T, k] float32, all contiguous, by weights packed per expert."""
    pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    plan = sorted_plan(pairs / num_experts)
    slots = sort_pairs(topk_ids, num_experts, plan.tokens)
    intermediate, hidden = gate_up.row_scale.numel() // num_experts // 2, x.shape[1]
    between = torch.empty(slots.order.numel(), intermediate, dtype=x.dtype, device=x.device)
    tile_gemm(gate_up, kind, group, x, between, plan, epilogue=SILU_MUL, slots=slots, top_k=top_k, num_experts=num_experts)
    weighed = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    tile_gemm(down, kind, group, between, weighed, plan, epilogue=WEIGH, slots=slots, num_experts=num_experts, pair_weights=topk_weights)
    y = torch.empty_like(x)
    sum_pairs(weighed, y)
    return y
