"""Launches of many_pairs_kernel.py: three, and the host does not wait for the device."""

import torch
from torch import Tensor

from quantkit_kernels.pairs import Slots, empty_slots
from quantkit_kernels.triton.rows import power_of_two

_BLOCK, _STEP, _EACH, _BLOCKS = 256, 64, 16, 256


def sort_many_pairs(topk_ids: Tensor, num_experts: int, tokens: int) -> Slots:
    """Slots for topk_ids int32 or int64 [T, k], contiguous, in tiles of `tokens`; unused tiles have no pairs."""
    from quantkit_kernels.triton.many_pairs_kernel import count_before, count_pairs, place_pairs

    pairs, slots = topk_ids.numel(), empty_slots(topk_ids, num_experts, tokens)
    blocks, tiles, experts = -(-pairs // _BLOCK), slots.tile_count.numel(), max(_STEP, power_of_two(num_experts))
    room = torch.empty((blocks + 1) * experts, dtype=torch.int32, device=topk_ids.device)
    totals, counts = room[:experts], room[experts:]
    count_pairs[(blocks,)](topk_ids, pairs, counts, EXPERTS=experts, BLOCK=_BLOCK)
    count_before[(experts // _EACH,)](counts, totals, blocks, EXPERTS=experts, EACH=_EACH, BLOCKS=min(_BLOCKS, power_of_two(blocks)))
    sizes = {"EXPERTS": experts, "TOKENS": tokens, "BLOCK": _BLOCK, "TILES": power_of_two(-(-tiles // blocks)), "STEP": _STEP}
    place_pairs[(blocks,)](topk_ids, pairs, counts, totals, *slots, tiles, **sizes)
    return slots
