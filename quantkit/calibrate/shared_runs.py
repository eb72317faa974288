"""Batches of tokens that the ranks share out, of which every rank hears what linears read, in the order of one process.

Each rank runs one batch of as many as there are ranks, keeps what the linears were shown, and sends it to the others: a forward is
arithmetic, what its linears read goes over the devices' links. A batch is the same whoever runs it, so sums over it are, too.
"""

import json
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from quantkit.calibrate.hidden_states import TokenBatch
from quantkit.calibrate.layer_weights import Observer
from quantkit.calibrate.ranks import Ranks

Call = tuple[int, str, Tensor]
"""(number of who listens, module, its input [..., K])."""


class SharedRuns:
    """Runs of one sublayer without routed experts. What `heard_by` gave is shown to linears, and may be shown in several runs."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._listeners: list[Observer] = []
        self._calls: list[Call] | None = None
        """Of the batch that this rank runs for all; None where it is heard at once."""

    def heard_by(self, listen: Observer) -> Observer:
        """What linears are given as their observer, so that `listen` hears them on every rank."""
        number = len(self._listeners)
        self._listeners.append(listen)

        def see(module: str, x: Tensor) -> None:
            if self._calls is None:
                listen(module, x)
            else:
                self._calls.append((number, module, x))

        return see

    def over(self, batches: Iterable[TokenBatch], run: Callable[[TokenBatch], object], before: Callable[[TokenBatch], None]) -> None:
        """Run every batch. before: called on every rank when a batch is about to be heard. Fewer batches than ranks are run by all."""
        listed, size = list(batches), self._ranks.size
        if size == 1 or len(listed) < size:
            for batch in listed:
                before(batch)
                run(batch)
            return
        for start in range(0, len(listed), size):
            together = listed[start : start + size]  # one for every rank
            own = self._own(together[self._ranks.rank], run) if self._ranks.rank < len(together) else []
            for source, batch in enumerate(together):
                before(batch)
                for number, module, x in self._sent(own, source):
                    self._listeners[number](module, x)

    def _own(self, batch: TokenBatch, run: Callable[[TokenBatch], object]) -> list[Call]:
        self._calls = calls = list[Call]()
        try:
            run(batch)
        finally:
            self._calls = None
        return calls

    def _sent(self, own: list[Call], source: int) -> Iterator[Call]:
        """What rank `source` heard, on every rank, one after the other. own: what this one did."""
        told = self._ranks.tell(json.dumps([[number, module, list(x.shape)] for number, module, x in own]), source)
        for place, (number, module, shape) in enumerate(json.loads(told)):
            x = own[place][2].contiguous() if self._ranks.rank == source else torch.empty(shape, device=self._device)
            yield number, module, self._ranks.send(x, source)
