"""Several processes that write one output: `torchrun --nproc-per-node N -m quantkit quantize ...`.

Every rank walks the whole model, so all hold the same hidden states. Routed experts, nearly all of
the work, are divided: each rank reads, solves and writes its batches, runs their experts, and
broadcasts what they add to the hidden states over the devices' collective library; it is added in
the order of the experts. Divided likewise are panels of Hessians (input_statistics.py), batches of
tokens that run through a sublayer (`BatchParallel`), and linears of one input that are solved with
an output cost (linear_solver.py). Each piece is the same on any rank, so the files are those of one
process.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from quantkit.calibrate.hidden_states import Observer, TokenBatch
from quantkit.common.scratch import give_back
from quantkit.models.weights import ExpertsOp

_PATIENCE = timedelta(days=7)
"""Timeout of collectives: a rank may have many experts to solve."""


class Ranks:
    """This process's rank among `size`."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._group: dist.ProcessGroup | None = None
        """Of the devices' library, where the ranks compute on devices; made when it is first
        used."""

    @classmethod
    def join(cls) -> "Ranks":
        """From torchrun's environment variables; the only rank without them."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_PATIENCE)
        return cls(dist.get_rank(), size)

    @property
    def cores(self) -> int:
        """This rank's share of its machine's cores."""
        return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def owner(self, number: int) -> int:
        """The rank of the work item with this number."""
        return number % self.size

    def owns(self, number: int) -> bool:
        return self.owner(number) == self.rank

    def broadcast(self, values: Tensor, source: int) -> Tensor:
        """Values of rank `source`, on every rank; the others' are overwritten."""
        if self.size > 1 and values.numel():
            # NCCL needs contiguous tensors, and a transposed one is copied, so not updated, on
            # other ranks.
            sent = values.contiguous()
            dist.broadcast(
                sent.view(-1).view(torch.uint8), source, group=self._group_of(values.device.type)
            )  # no library knows all dtypes
            if sent is not values:
                values.copy_(sent)
        return values

    def _group_of(self, device_type: str) -> dist.ProcessGroup | None:
        """None is the CPU's group. Every rank calls this in the same order, as creating a group
        requires."""
        if device_type == "cpu":
            return None
        if self._group is None:
            self._group = dist.new_group(
                backend={"cuda": "nccl", "npu": "hccl"}[device_type], timeout=_PATIENCE
            )
        return self._group

    def broadcast_text(self, text: str, source: int) -> str:
        """The text of rank `source`, on every rank."""
        if self.size == 1:
            return text
        values = torch.tensor(list(text.encode()), dtype=torch.uint8)
        length = torch.tensor([len(values)])
        dist.broadcast(length, source)
        values = values if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(values, source)
        return bytes(values.tolist()).decode()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


Call = tuple[int, str, tuple[Tensor, ...]]
"""(number of the listener, module, its tensors)."""


class BatchParallel:
    """Runs batches of tokens through one sublayer, divided among ranks; every rank gets the inputs
    of all linears in the order of one process.

    Each rank runs one batch of `size`, records the inputs of linears and routed experts, and
    broadcasts them: a forward pass is computation, its inputs are only communication. A batch is
    the same on any rank, so sums over batches are, too.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._listeners: list[Callable[..., object]] = []
        self._calls: list[Call] | None = None
        """Of the batch that this rank runs for all; None where it is heard at once."""

    def shared_hook(self, listen: Observer) -> Observer:
        """An observer for linears, such that `listen` is called on every rank."""
        number = len(self._listeners)
        self._listeners.append(listen)

        def see(module: str, x: Tensor) -> None:
            if self._calls is None:
                listen(module, x)
            else:
                self._calls.append((number, module, (x,)))

        return see

    def shared_experts(self, experts: ExpertsOp) -> ExpertsOp:
        """An experts operator for a sublayer, such that `experts`, which returns zeros, is called
        on every rank."""
        number = len(self._listeners)
        self._listeners.append(lambda _, *arguments: experts(*arguments))

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
        """Run every batch. before: called on every rank before the results of a batch."""
        listed, size = list(batches), self._ranks.size
        if size == 1:
            for batch in listed:
                before(batch)
                run(batch)
                give_back()
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
                give_back()

    def _own(self, batch: TokenBatch, run: Callable[[TokenBatch], object]) -> list[Call]:
        self._calls = calls = list[Call]()
        try:
            run(batch)
        finally:
            self._calls = None
        return calls

    def _sent(self, own: list[Call], source: int) -> Iterator[Call]:
        """The calls that rank `source` recorded, on every rank. own: those of this one. A tensor
        that occurs twice is sent once."""
        held = {_memory(x): x for _, _, shown in own for x in shown}
        places = {memory: place for place, memory in enumerate(held)}
        calls = [
            [number, module, [places[_memory(x)] for x in shown]] for number, module, shown in own
        ]
        kinds = [[list(x.shape), str(x.dtype).removeprefix("torch.")] for x in held.values()]
        calls_sent, kinds = json.loads(
            self._ranks.broadcast_text(json.dumps([calls, kinds]), source)
        )
        mine = [x.contiguous() for x in held.values()] if self._ranks.rank == source else None
        room = mine or [
            torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for shape, dtype in kinds
        ]
        sent = [self._ranks.broadcast(x, source) for x in room]
        for number, module, shown in calls_sent:
            yield number, module, tuple(sent[place] for place in shown)


def _memory(x: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are alive together and share memory."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype
