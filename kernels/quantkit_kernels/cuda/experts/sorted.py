"""Routed experts of many tokens: token-expert pairs are sorted by expert, then each expert's
weights are multiplied with its tokens.

Six launches, and none depends on the routing's values: the sort; for gate_up with SiLU the
arrangement of the activations and the product; for down with the routing weights the same two; the
sum over each token's experts.
"""

import torch
from torch import Tensor

from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.experts.sum_pairs import sum_rounded_pairs
from quantkit_kernels.cuda.launch import SILU_MUL, WEIGH, checked, stream_of
from quantkit_kernels.cuda.layout import PackedStrips
from quantkit_kernels.cuda.linears.tiles import multiply_tiles
from quantkit_kernels.cuda.plans import ExpertTilesPlan, TilePerBlockPlan
from quantkit_kernels.pairs import Slots, empty_slots

SORTED_PAIRS = 81920
"""Pairs that are computed at once. What is kept between the launches takes about 45 KB a pair (R1).
8192 tokens of R1 ask for 73,728: in two parts a rank of four of an H200 takes 1.04 of the time for
a whole prompt."""


def sort_pairs(topk_ids: Tensor, num_experts: int, tokens: int) -> Slots:
    """Slots for topk_ids int32 or int64 [T, k] in tiles of `tokens`: one launch, and the host does
    not wait for the device."""
    slots = empty_slots(topk_ids, num_experts, tokens)
    sizes = (
        topk_ids.element_size() // 4,
        topk_ids.numel(),
        num_experts,
        tokens,
        slots.tile_count.numel(),
    )
    checked(
        library().qk_sort_pairs(
            topk_ids.data_ptr(),
            *sizes,
            *(one.data_ptr() for one in slots),
            stream_of(topk_ids.device),
        )
    )
    return slots


def sorted_experts(
    gate_up: PackedStrips,
    down: PackedStrips,
    kind: str,
    group: int,
    num_experts: int,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    plan: TilePerBlockPlan | ExpertTilesPlan,
    some_none: bool = False,
    limit: float = 0.0,
) -> Tensor:
    """What `Experts` computes of x[T, H], topk_ids[T, k] and topk_weights[T, k] float32, all
    contiguous, by weights packed per expert.
    some_none: whether ids may be NO_EXPERT. limit: as of `fused_experts`."""
    pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    slots = sort_pairs(topk_ids, num_experts, plan.tokens)
    intermediate, hidden = gate_up.row_scale.numel() // num_experts // 2, x.shape[1]
    between = torch.empty(slots.order.numel(), intermediate, dtype=x.dtype, device=x.device)
    multiply_tiles(
        gate_up,
        kind,
        group,
        x,
        between,
        plan,
        epilogue=SILU_MUL,
        limit=limit,
        slots=slots,
        top_k=top_k,
        num_experts=num_experts,
    )
    weighed = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    packed = (down, kind, group)
    multiply_tiles(
        *packed,
        between,
        weighed,
        plan,
        epilogue=WEIGH,
        slots=slots,
        num_experts=num_experts,
        pair_weights=topk_weights,
    )
    y = torch.empty_like(x)
    sum_rounded_pairs(weighed, y, topk_ids if some_none else None)
    return y
