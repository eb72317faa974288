"""Drafts by a head that guesses a block of tokens at once (models/dspark.py).

Every pass leaves keys of its tokens in a ring for each sequence; those of rejected drafts are
overwritten before they are read. A draft reads the keys of the window before the newest token.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quantkit.common.devices import to_device
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.runner import ForwardPass, Runner
from quantkit.executor.runner.sampler import SampledTokens
from quantkit.executor.sampling.params import Batch
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.models.dspark import BlockHead, Window


@dataclass
class _Ring:
    """Keys [R, S, D] of tokens first .. end - 1 of a sequence, at their positions modulo R."""

    keys: Tensor
    first: int
    end: int


class BlockDrafter:
    """A `Proposer`. count: draft length, at most; may change between steps. ahead: tokens that a
    step computes behind the newest one, at most."""

    def __init__(
        self, head: BlockHead, runner: Runner, count: int, parallel: Parallel, ahead: int
    ) -> None:
        self.head, self._runner, self.parallel = head, runner, parallel
        self.count = count
        self._rings: WeakKeyDictionary[Sequence, _Ring] = WeakKeyDictionary()
        self._size = head.window + 1 + ahead
        """Tokens of a ring: a window, and those of a step behind it."""

    def launch(self, output: ForwardPass, sampled: SampledTokens | None) -> Tensor | None:
        """As `Proposer.launch`: reads the tokens of the pass, and drafts nothing yet."""
        spans = [(one, start, length) for one, start, length in output.spans if length]
        positions = [start + i for _, start, length in spans for i in range(length)]
        at = to_device(positions, self._runner.device, torch.int64)
        keys = self.head.keys(output.hidden, at)
        row = 0
        for sequence, start, length in spans:
            self._store(sequence, start, keys[row : row + length])
            row += length
        return None

    def finish(self, output: ForwardPass, advanced: list[Sequence], drafts: list[int]) -> None:
        """As `Proposer.finish`."""
        counts = {
            one: count
            for one, _ in output.counts
            if one.finish_reason is None
            and (ring := self._rings.get(one)) is not None
            and ring.first < len(one.token_ids) - 1 <= ring.end
            and (count := min(self.count, one.num_useful_drafts, self.head.block_size)) > 0
        }
        if counts:
            self._draft(counts)

    def _store(self, sequence: Sequence, start: int, keys: Tensor) -> None:
        """keys [n, S, D] of the tokens from `start` on."""
        ring, end = self._rings.get(sequence), start + len(keys)
        if ring is None or not ring.first <= start <= ring.end:
            ring = _Ring(keys.new_zeros(self._size, *keys.shape[1:]), start, start)
            self._rings[sequence] = ring
        first = max(start, end - self._size)
        places = torch.arange(first, end, device=keys.device) % self._size
        ring.keys[places] = keys[first - start :]
        ring.first, ring.end = max(ring.first, end - self._size), end

    def _draft(self, counts: dict[Sequence, int]) -> None:
        sequences = [*counts]
        newest = [len(one.token_ids) - 1 for one in sequences]
        device = self._runner.device
        last = to_device([one.token_ids[-1] for one in sequences], device, torch.int64)
        hidden = self.head.hidden(
            last, to_device(newest, device, torch.int64), self._window(sequences, newest)
        )
        batch = Batch.of([one.params for one in sequences], [one.seed for one in sequences], device)
        found = []
        for number in range(max(counts.values())):
            logits = self.head.logits(hidden[:, number]) + self.head.pair_logits(last)
            if batch is None:
                last = logits.argmax(dim=-1)
            else:  # with the random number that the position will be sampled with
                at = to_device([one + 1 + number for one in newest], device, torch.int64)
                last = self._runner.draw(logits, batch, at).clone()
            found.append(last)
        agreed = iter(self.parallel.agree(torch.stack(found, dim=1).flatten()))
        for sequence, count in counts.items():
            drafted = [next(agreed) for _ in found]
            sequence.drafts += drafted[:count]

    def _window(self, sequences: list[Sequence], newest: list[int]) -> Window:
        keys, there, back = [], [], torch.arange(self.head.window, 0, -1)
        for one, position in zip(sequences, newest):
            ring, at = self._rings[one], position - back
            keys.append(ring.keys[(at % self._size).to(ring.keys.device)])
            there.append(at >= ring.first)
        return Window(torch.stack(keys), torch.stack(there).to(keys[0].device))
