"""Several processes at one output: `torchrun --nproc-per-node N -m quantkit quantize ...`.

Every rank walks the whole model, so all hold the same hidden states. The routed experts, nearly all
of the work, are divided: each rank reads, solves and writes its batches, and runs their experts for
everybody. What they add to the hidden states goes to all ranks, over the devices' own library, and
is added in the order of the experts. So are panels of Hessians (statistics.py), batches of tokens
that run through a sublayer (shared_runs.py), and linears of one input whose errors are weighed on
both sides (solver.py). A batch, a panel or a linear is the same whoever computes it, so the files
are those of one process.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from quantkit.calibrate.output_store import UnitStore

_PATIENCE = timedelta(days=7)
"""Ranks wait this long for each other: one may have many experts to solve."""


class Ranks:
    """This process's place among `size` ranks."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._group: dist.ProcessGroup | None = None
        """Of the devices' library, where the ranks compute on devices; made when it is first
        used."""

    @classmethod
    def meet(cls) -> "Ranks":
        """From the environment that torchrun sets; the only rank without it."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_PATIENCE)
        return cls(dist.get_rank(), size)

    @property
    def cores(self) -> int:
        """This rank's share of its machine's."""
        return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def of(self, number: int) -> int:
        """The rank that the piece of work with this number is for."""
        return number % self.size

    def mine(self, number: int) -> bool:
        return self.of(number) == self.rank

    def share(self, store: UnitStore) -> None:
        """Returns when every rank has written what it was to, and `store` knows of it."""
        store.settle()
        self.wait()
        store.reread()

    def send(self, values: Tensor, source: int) -> Tensor:
        """Those of rank `source`, on every rank; the others' are written over."""
        if self.size > 1 and values.numel():
            # NCCL sends nothing else, and what lies transposed is not a copy of itself on every
            # rank
            sent = values.contiguous()
            dist.broadcast(
                sent.view(-1).view(torch.uint8), source, group=self._group_of(values.device.type)
            )  # no library knows all dtypes
            if sent is not values:
                values.copy_(sent)
        return values

    def _group_of(self, device_type: str) -> dist.ProcessGroup | None:
        """None is the processor's. Every rank comes here in the same turn, as making a group
        asks."""
        if device_type == "cpu":
            return None
        if self._group is None:
            self._group = dist.new_group(
                backend={"cuda": "nccl", "npu": "hccl"}[device_type], timeout=_PATIENCE
            )
        return self._group

    def tell(self, text: str, source: int) -> str:
        """What rank `source` says, on every rank."""
        if self.size == 1:
            return text
        values = torch.tensor(list(text.encode()), dtype=torch.uint8)
        length = torch.tensor([len(values)])
        dist.broadcast(length, source)
        values = values if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(values, source)
        return bytes(values.tolist()).decode()

    def wait(self) -> None:
        """For all ranks to come here."""
        if self.size > 1:
            dist.barrier()
