"""Accepted guesses and the next rows by Triton are those by PyTorch's own operators.

Run on a GPU, or where Triton is installed by its interpreter: TRITON_INTERPRET=1.
"""

import os
import random

import pytest
import torch

from quantkit.executor.runner.decode_batch import (
    accepted_in_torch,
    cache_slots_in_torch,
    next_rows_in_torch,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no CUDA device here"
)


def test_as_by_operators():
    """Sequences with as many guesses and with fewer, none at all, and the last row's beyond the
    chosen tokens."""
    from quantkit.executor.runner.decode_batch_triton import accepted, cache_slots, next_rows

    draw = random.Random(1)
    for _ in range(40):
        number, most, told, chosen = (draw.randrange(1, 9), draw.randrange(4), [], [])
        for one in range(number):
            drafts = [draw.randrange(2) for _ in range(draw.randrange(most + 1) if one else most)]
            told.append([len(chosen), draw.randrange(1, 90), *drafts, *[-1] * (most - len(drafts))])
            chosen += [draw.randrange(2) for _ in range(len(drafts) + 1)]
        known, there = torch.tensor(told, device=DEVICE), torch.tensor(chosen, device=DEVICE)
        found = accepted(known, there)
        assert torch.equal(found, accepted_in_torch(known, there))
        each, blocks = (
            draw.randrange(1, 5),
            torch.tensor([draw.sample(range(1, 50), 3) for _ in range(number)], device=DEVICE),
        )
        own = torch.cat((known[:, :2], blocks), dim=1).int()
        guesses = torch.tensor(
            [draw.randrange(99) for _ in range((each - 1) * number)],
            device=DEVICE,
            dtype=torch.int64,
        )
        guessed = torch.cat((found[0], guesses))
        assert torch.equal(
            next_rows(own, there, guessed, 64), next_rows_in_torch(own, there, guessed, 64)
        )
        places, reach = (
            torch.tensor([draw.randrange(30) for _ in range(number)], device=DEVICE),
            draw.choice((1 << 40, 12)),
        )
        tables = blocks.int()
        assert torch.equal(
            cache_slots(places, tables, 8, reach), cache_slots_in_torch(places, tables, 8, reach)
        )
