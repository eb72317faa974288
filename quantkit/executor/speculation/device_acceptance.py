"""Which guesses of a step were right, found on the device: what guesses behind them need before the
host knows."""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.common.devices import to_device
from quantkit.executor.runner.device_rows import accepted
from quantkit.executor.scheduler.sequence import Sequence


class Accepted(NamedTuple):
    """Of B sequences, int64 [B] each. right: guesses up to the first wrong one; rows: the row
    behind which a sequence's newest token was chosen; newest: that token's place in the
    sequence."""

    right: Tensor
    rows: Tensor
    newest: Tensor

    @classmethod
    def of(cls, counts: list[tuple[Sequence, int]], chosen: Tensor) -> "Accepted":
        """counts: rows of each sequence, its newest token's and its drafts'; chosen int64 [R]: the
        tokens chosen behind the rows, not appended yet."""
        most = max(count for _, count in counts) - 1
        told, row = [], 0
        for sequence, count in counts:
            drafts = sequence.drafts[: count - 1]
            told += [row, len(sequence.token_ids), *drafts, *[-1] * (most - len(drafts))]
            row += count
        known = to_device(told, chosen.device, torch.int64).view(len(counts), 2 + most)
        return cls(*accepted(known, chosen))
