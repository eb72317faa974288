"""Batches of tokens that the ranks share out, of which every rank hears what linears read, in the
order of one process.

Each rank runs one batch of as many as there are ranks, keeps what the linears were shown, and what
routed experts were asked, and sends it
to the others: a forward is arithmetic, what its linears read goes over the devices' links. A batch
is the same whoever runs it, so sums over it are, too.
"""

import json
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from quantkit.calibrate.hidden_states import TokenBatch
from quantkit.calibrate.layer_weights import Observer
from quantkit.calibrate.ranks import Ranks
from quantkit.models.weights import ExpertsOp

Call = tuple[int, str, tuple[Tensor, ...]]
"""(number of who listens, module, what it is shown)."""


class SharedRuns:
    """Runs of one sublayer. What `heard_by` and `asked_of` gave is shown to linears and put in the
    place of routed experts, and may be in several runs."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._listeners: list[Callable[..., object]] = []
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
                self._calls.append((number, module, (x,)))

        return see

    def asked_of(self, experts: ExpertsOp) -> ExpertsOp:
        """What a sublayer is given as its routed experts, so that `experts`, which answers zeros,
        is asked on every rank."""
        number = len(self._listeners)
        self._listeners.append(lambda _, *asked: experts(*asked))

        def ask(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            if self._calls is None:
                return experts(x, topk_ids, topk_weights)
            self._calls.append((number, "", (x, topk_ids, topk_weights)))
            return torch.zeros_like(x)

        return ask

    def over(
        self,
        batches: Iterable[TokenBatch],
        run: Callable[[TokenBatch], object],
        before: Callable[[TokenBatch], None],
    ) -> None:
        """Run every batch. before: called on every rank when a batch is about to be heard."""
        listed, size = list(batches), self._ranks.size
        if size == 1:
            for batch in listed:
                before(batch)
                run(batch)
            return
        for start in range(0, len(listed), size):
            together = listed[start : start + size]  # one for every rank
            own = (
                self._own(together[self._ranks.rank], run)
                if self._ranks.rank < len(together)
                else []
            )
            for source, batch in enumerate(together):
                before(batch)
                for number, module, shown in self._sent(own, source):
                    self._listeners[number](module, *shown)

    def _own(self, batch: TokenBatch, run: Callable[[TokenBatch], object]) -> list[Call]:
        self._calls = calls = list[Call]()
        try:
            run(batch)
        finally:
            self._calls = None
        return calls

    def _sent(self, own: list[Call], source: int) -> Iterator[Call]:
        """What rank `source` heard, on every rank, one after the other. own: what this one did.
        What is shown twice is sent once."""
        held = {_memory(x): x for _, _, shown in own for x in shown}
        places = {memory: place for place, memory in enumerate(held)}
        calls = [
            [number, module, [places[_memory(x)] for x in shown]] for number, module, shown in own
        ]
        kinds = [[list(x.shape), str(x.dtype).removeprefix("torch.")] for x in held.values()]
        told, kinds = json.loads(self._ranks.tell(json.dumps([calls, kinds]), source))
        mine = [x.contiguous() for x in held.values()] if self._ranks.rank == source else None
        room = mine or [
            torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for shape, dtype in kinds
        ]
        sent = [self._ranks.send(x, source) for x in room]
        for number, module, shown in told:
            yield number, module, tuple(sent[place] for place in shown)


def _memory(x: Tensor) -> tuple[object, ...]:
    """Alike for tensors that are held at once and are the same."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype
