"""Token-expert pairs sorted by expert, in launches that do not wait for the host."""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.pairs import Slots, empty_slots
from quantkit_kernels.triton import rows
from quantkit_kernels.triton.cards import overlapped

MANY_PAIRS = 8192
"""From so many on, pairs are sorted in two launches whose programs read their own, not in one whose
programs read all."""
_SORTED, _LOOKED_AT = 256, 32
"""Pairs of a program that sorts; how many of them, and of programs, it looks at at once."""


def sort_pairs(topk_ids: Tensor, num_experts: int, tokens: int) -> Slots:
    """Slots for topk_ids int32 or int64 [T, k] in tiles of `tokens`."""
    sort = sort_few_pairs if topk_ids.numel() < MANY_PAIRS else sort_many_pairs
    return sort(topk_ids, num_experts, tokens)


def sort_few_pairs(topk_ids: Tensor, num_experts: int, tokens: int) -> Slots:
    """As `sort_pairs`, in one launch."""
    from quantkit_kernels.triton.experts_kernel import sort_pairs as kernel

    pairs = topk_ids.numel()
    slots = empty_slots(topk_ids, num_experts, tokens)
    block = min(1024, max(128, rows.power_of_two(pairs)))
    experts, how = max(2, rows.power_of_two(num_experts)), overlapped(topk_ids.device)
    kernel[(num_experts,)](
        topk_ids,
        pairs,
        *slots,
        slots.tile_count.numel(),
        num_experts,
        EXPERTS=experts,
        TOKENS=tokens,
        BLOCK=block,
        **how,
    )
    return slots


def sort_many_pairs(topk_ids: Tensor, num_experts: int, tokens: int) -> Slots:
    """As `sort_pairs`, in two."""
    from quantkit_kernels.triton.dense_sort_kernel import place_pairs

    slots, counts = empty_slots(topk_ids, num_experts, tokens), _counted(topk_ids, num_experts)
    blocks, tiles = len(counts), slots.tile_count.numel()
    place_pairs[(blocks,)](
        topk_ids, topk_ids.numel(), counts, blocks, *slots, tiles,
        EXPERTS=counts.shape[1], TOKENS=tokens, BLOCK=_SORTED,
        TILES=rows.power_of_two(-(-tiles // blocks)), SOME=_LOOKED_AT,
        **overlapped(topk_ids.device),
    )  # fmt: skip
    return slots


class Places(NamedTuple):
    """Rows of pairs sorted by expert, without room between experts.

    rows int32 [pairs]: the row of each pair. ends int32 [E]: the row after each expert's last.
    """

    rows: Tensor
    ends: Tensor


def places_of(topk_ids: Tensor, num_experts: int) -> Places:
    """Of topk_ids int32 or int64 [T, k]."""
    from quantkit_kernels.triton.dense_sort_kernel import place_rows

    counts, pairs = _counted(topk_ids, num_experts), topk_ids.numel()
    places = Places(*(counts.new_empty(size) for size in (pairs, num_experts)))
    place_rows[(len(counts),)](
        topk_ids, pairs, counts, len(counts), *places, num_experts,
        EXPERTS=counts.shape[1], BLOCK=_SORTED, SOME=_LOOKED_AT, **overlapped(topk_ids.device),
    )  # fmt: skip
    return places


def _counted(topk_ids: Tensor, num_experts: int) -> Tensor:
    """int32 [blocks, power of two]: pairs of each expert among _SORTED."""
    from quantkit_kernels.triton.dense_sort_kernel import count_pairs

    pairs = topk_ids.numel()
    experts = max(2, rows.power_of_two(num_experts))
    counts = torch.empty(-(-pairs // _SORTED), experts, dtype=torch.int32, device=topk_ids.device)
    count_pairs[(len(counts),)](
        topk_ids, pairs, counts, EXPERTS=experts, BLOCK=_SORTED, **overlapped(topk_ids.device)
    )
    return counts
