"""What a step with guesses needs before the host knows, found on the device: which guesses were
right, the rows of the pass that checks the next ones, and where guesses behind guesses lie in the
cache.

Each is one launch of Triton on a GPU (device_rows_kernel.py): PyTorch takes some ten short ones for
it.
"""

import functools

import torch
from quantkit_kernels.backends import why_unusable
from torch import Tensor


def accepted(known: Tensor, chosen: Tensor) -> Tensor:
    """known int64 [B, 2 + most]: of each sequence the row of its newest token, how many tokens it
    has, and its guesses, -1 where there is none -> the three of `accepted.Accepted`, int64 [3,
    B]."""
    if by_kernel(chosen.device):
        from quantkit.executor.runner.device_rows_kernel import accepted as launched

        return launched(known, chosen)
    return accepted_by_operators(known, chosen)


def accepted_by_operators(known: Tensor, chosen: Tensor) -> Tensor:
    first, newest, guesses = known[:, 0], known[:, 1], known[:, 2:]
    behind = first[:, None] + torch.arange(guesses.shape[1], device=chosen.device)
    same = chosen[behind.clamp(max=len(chosen) - 1)] == guesses
    right = same.long().cumprod(dim=1).sum(dim=1)
    return torch.stack((right, first + right, newest + right))


def next_rows(known: Tensor, chosen: Tensor, guessed: Tensor, block_size: int) -> Tensor:
    """Token ids, places in their sequences and slots of the pass behind: int64 [3, B * each], every
    sequence's newest token and the new guesses behind it.

    known int32 [B, 2 + n]: of each sequence the row of its newest token in the pass that was, how
    many tokens it had, and its blocks.
    chosen int64 [R]: the tokens chosen in that pass. guessed int64 [each * B]: how many guesses
    were right, then the new ones, one row of sequences after the other.
    """
    if by_kernel(chosen.device):
        from quantkit.executor.runner.device_rows_kernel import next_rows as launched

        return launched(known, chosen, guessed, block_size)
    return next_rows_by_operators(known, chosen, guessed, block_size)


def next_rows_by_operators(
    known: Tensor, chosen: Tensor, guessed: Tensor, block_size: int
) -> Tensor:
    number = len(known)
    each, (right, guesses) = len(guessed) // number, (guessed[:number], guessed[number:])
    tokens = torch.cat((chosen[known[:, 0] + right], guesses)).view(each, number).t()
    places = (known[:, 1] + right)[:, None] + torch.arange(each, device=chosen.device)
    slots = known[:, 2:].gather(1, places // block_size).long() * block_size + places % block_size
    return torch.stack((tokens, places, slots)).view(3, -1)


def cache_places(places: Tensor, tables: Tensor, block_size: int, reach: int) -> Tensor:
    """Positions and slots, int64 [2, B], of places int64 [B] in sequences whose blocks are in
    tables int32 [B, n]. Those from `reach` on, and those without a block, are nobody's: they lie in
    block 0, and see what the tables have."""
    if by_kernel(places.device):
        from quantkit.executor.runner.device_rows_kernel import cache_places as launched

        return launched(places, tables, block_size, reach)
    return cache_places_by_operators(places, tables, block_size, reach)


def cache_places_by_operators(
    places: Tensor, tables: Tensor, block_size: int, reach: int
) -> Tensor:
    end = min(reach, tables.shape[1] * block_size)
    within = places.clamp(max=end - 1)
    found = tables.gather(1, (within // block_size)[:, None])[:, 0].long()
    return torch.stack(
        (within, torch.where(places < end, found, 0) * block_size + places % block_size)
    )


@functools.cache
def by_kernel(device: torch.device) -> bool:
    """Whether Triton runs on this device."""
    return device.type == "cuda" and why_unusable("likeliest", "triton", device) is None
