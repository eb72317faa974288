"""The successor of every row of a pass, chosen on the device: logits as requests ask, then a draw.

What the draw needs of a request (sampling.py) is on the device already where the same sequences
were there in the step before; then only the places of their tokens travel.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.common.devices import to_device
from quantkit.executor.runner.grammar_masks import Masks
from quantkit.executor.runner.logit_processors import Adjuster
from quantkit.executor.runner.runner import ForwardPass
from quantkit.executor.runner.sampling_graph import Draws
from quantkit.executor.sampling.params import Batch
from quantkit.executor.scheduler.scheduler import ScheduledStep
from quantkit.executor.scheduler.sequence import Sequence


class ChosenTokens(NamedTuple):
    """token_ids int64 [R] on the device; what they were drawn with, None where all are the
    likeliest: sampling parameters, and places in the sequences int64 [R]."""

    token_ids: Tensor
    batch: Batch | None = None
    places: Tensor | None = None


class _Rows(NamedTuple):
    """Rows that are drawn for. batch: as for `ChosenTokens`. asks: whether any of them wants logits
    changed, grammars aside."""

    counts: list[tuple[Sequence, int]]
    batch: Batch | None
    asks: bool


class Chooser:
    """eos_ids: tells the tokens that may end an answer."""

    def __init__(
        self, vocab: int, device: torch.device, eos_ids: Callable[[], frozenset[int]]
    ) -> None:
        self._vocab, self._device, self._eos_ids = vocab, device, eos_ids
        self._adjuster, self._masks = Adjuster(vocab, device), Masks()
        self._known = _Rows([], None, False)

    def prepare(self, step: ScheduledStep) -> None:
        """Begin what can be done before the step's logits are there."""
        self._masks.begin(step.successors if step.guided else ())

    def choose(self, done: ForwardPass, draw: Draws) -> ChosenTokens:
        """Of a pass that was prepared."""
        assert done.logits is not None, done.counts
        assert done.greedy is not None, done.counts
        first_masks, allowed = self._masks.finished(self._device, self._vocab)
        counts, batch, asks = (
            self._known if done.counts == self._known.counts else self._look_at(done.counts)
        )
        adjusted = done.logits
        if asks or allowed is not None:
            adjusted = self._adjuster.adjust(
                adjusted, counts, self._eos_ids(), first_masks, allowed
            )
        if batch is None:
            return ChosenTokens(done.greedy if adjusted is done.logits else adjusted.argmax(dim=-1))
        places = [len(sequence.token_ids) + i for sequence, count in counts for i in range(count)]
        on_device = to_device(places, self._device)
        return ChosenTokens(draw(adjusted, batch, on_device), batch, on_device)

    def _look_at(self, counts: list[tuple[Sequence, int]]) -> "_Rows":
        each = [sequence for sequence, count in counts for _ in range(count)]
        batch = Batch.of([one.params for one in each], [one.seed for one in each], self._device)
        asks = any(one.adjusts or one.params.min_new_tokens for one in each)
        self._known = _Rows(list(counts), batch, asks)
        return self._known
