"""The successor of every row of a pass, chosen on the device: logits as requests ask, then a draw.

What the draw needs of a request (sampling.py) is on the device already where the same sequences were there in the step before; then only
the places of their tokens travel.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.executor.adjust import Adjuster
from quantkit.executor.draws import Draws
from quantkit.executor.masks import Masks
from quantkit.executor.runner import ForwardPass
from quantkit.executor.sampling import Batch
from quantkit.executor.scheduler import ScheduledStep
from quantkit.executor.sequence import Sequence


class ChosenTokens(NamedTuple):
    """token_ids int64 [R] on the device; what they were drawn with, None where all are the likeliest: sampling parameters, and places in
    the sequences int64 [R]."""

    token_ids: Tensor
    batch: Batch | None = None
    places: Tensor | None = None


class Chooser:
    """eos_ids: tells the tokens that may end an answer."""

    def __init__(self, vocab: int, device: torch.device, eos_ids: Callable[[], frozenset[int]]) -> None:
        self._vocab, self._device, self._eos_ids = vocab, device, eos_ids
        self._adjuster, self._masks = Adjuster(vocab, device), Masks()
        self._known: tuple[list[tuple[Sequence, int]], Batch | None] = ([], None)

    def prepare(self, step: ScheduledStep) -> None:
        """Begin what can be done before the step's logits are there."""
        self._masks.begin(step.successors)

    def choose(self, done: ForwardPass, draw: Draws) -> ChosenTokens:
        """Of a pass that was prepared."""
        assert done.logits is not None, done.counts
        assert done.greedy is not None, done.counts
        adjusted = self._adjuster.adjust(done.logits, done.counts, self._eos_ids(), *self._masks.finished(self._device, self._vocab))
        batch = self._batch(done.counts)
        if batch is None:
            return ChosenTokens(done.greedy if adjusted is done.logits else adjusted.argmax(dim=-1))
        places = [len(sequence.token_ids) + i for sequence, count in done.counts for i in range(count)]
        on_device = torch.tensor(places, device=self._device)
        return ChosenTokens(draw(adjusted, batch, on_device), batch, on_device)

    def _batch(self, counts: list[tuple[Sequence, int]]) -> Batch | None:
        known, batch = self._known
        if counts != known:
            each = [sequence for sequence, count in counts for _ in range(count)]
            batch = Batch.of([one.params for one in each], [one.seed for one in each], self._device)
            self._known = (list(counts), batch)
        return batch
