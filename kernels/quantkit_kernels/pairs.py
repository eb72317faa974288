"""Token-expert pairs sorted by expert: what kernels for many tokens read, of any card."""

from typing import NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """Token-expert pairs sorted by expert. Each expert has tiles of its own, and each tile has slots for a fixed number of pairs.

    tile_expert int32 [tiles]: the expert of a tile, -1 for tiles that are not used. tile_count int32 [tiles]: the pairs in a tile.
    order int32 [tiles * tokens of a tile]: the pair in a slot, undefined in the slots that a tile does not use.
    """

    tile_expert: Tensor
    tile_count: Tensor
    order: Tensor


def empty_slots(topk_ids: Tensor, num_experts: int, tokens: int) -> Slots:
    """Room for the pairs of topk_ids [T, k] in tiles of `tokens`, as many tiles as they can need."""
    pairs = topk_ids.numel()
    tiles = min(pairs, num_experts) + pairs // tokens
    return Slots(*(torch.empty(size, dtype=torch.int32, device=topk_ids.device) for size in (tiles, tiles, tiles * tokens)))
