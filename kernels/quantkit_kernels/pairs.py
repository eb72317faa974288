"""Token-expert pairs: sorted by expert, as kernels for many tokens read them, of any card, and with
results that are not summed."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """Token-expert pairs sorted by expert. Each expert has tiles of its own, and each tile has
    slots for a fixed number of pairs.

    tile_expert int32 [tiles]: the expert of a tile, -1 for tiles that are not used. tile_count
    int32 [tiles]: the pairs in a tile. order int32 [tiles * tokens of a tile]: the pair in a slot,
    undefined in the slots that a tile does not use.
    """

    tile_expert: Tensor
    tile_count: Tensor
    order: Tensor


def empty_slots(topk_ids: Tensor, num_experts: int, tokens: int) -> Slots:
    """Room for the pairs of topk_ids [T, k] in tiles of `tokens`, as many tiles as they can
    need."""
    pairs = topk_ids.numel()
    tiles = min(pairs, num_experts) + pairs // tokens
    return Slots(
        *(
            torch.empty(size, dtype=torch.int32, device=topk_ids.device)
            for size in (tiles, tiles, tiles * tokens)
        )
    )


class UnsummedPairs(NamedTuple):
    """What each token's experts make of it, times its weight, not yet added up. They have to be
    added it up, once.

    weighed float32 [T * k, H], a token's k pairs side by side. dtype: of the sum. counters int32,
    which become zero with the sum, or None.
    add_up: does both, and returns [T, H].
    """

    weighed: Tensor
    tokens: int
    dtype: torch.dtype
    counters: Tensor | None
    add_up: Callable[["UnsummedPairs"], Tensor]

    def summed(self) -> Tensor:
        return self.add_up(self)
