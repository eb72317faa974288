"""Rank 0 leads and the other ranks follow: its orders to them, and how they carry them out.

Rank 0 takes requests. Before every step it broadcasts, as JSON, what was added and cancelled
since the last; then all ranks schedule and compute the same step, and take over the tokens that
rank 0 chose; or each chose, where each has requests of its own. So nothing but rank 0 knows of
servers or terminals.
"""

from dataclasses import asdict, replace
from typing import Any, Protocol

from quantkit.common.errors import QuantkitError
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.data_parallel import DataParallelScheduler
from quantkit.executor.scheduler.scheduler import Scheduler
from quantkit.executor.scheduler.sequence import FinishReason, Sequence
from quantkit.executor.speculation.speculation import Speculation


class Leader:
    """Rank 0's orders to the other ranks. With one rank nothing is sent."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._orders: list[dict[str, Any]] = []
        """What the others must hear before the next step."""

    @property
    def alone(self) -> bool:
        return self._parallel.size == 1

    def add(self, sequence: Sequence) -> None:
        """The others add the request too. Raises QuantkitError on a rank that follows."""
        if self._parallel.rank:
            reason = f"rank {self._parallel.rank} follows rank 0, and takes no requests of its own"
            raise QuantkitError(reason, "load with quantkit.executor.worker.lead_or_follow")
        if not self.alone:
            params = replace(sequence.params, seed=sequence.seed)
            self._orders.append(
                {"add": id(sequence), "prompt": sequence.token_ids, "params": asdict(params)}
            )

    def cancel(self, sequence: Sequence) -> None:
        """The others cancel the request too."""
        if not self.alone:
            self._orders.append({"cancel": id(sequence)})

    def guess(self, drafts: int, looked_up: int) -> None:
        """The others make so many guesses from now on, too: computed, and looked up."""
        if not self.alone:
            self._orders.append({"guess": [drafts, looked_up]})

    def step(self) -> None:
        """The others compute a step, after what was ordered since the last."""
        if not self.alone:
            self._parallel.broadcast(self._orders)
            self._orders = []

    def dismiss(self) -> None:
        """The others' `follow` returns."""
        if not self.alone:
            self._parallel.broadcast(None)


class Follower(Protocol):
    """What `follow` asks of an engine."""

    parallel: Parallel
    scheduler: Scheduler | DataParallelScheduler
    speculation: Speculation

    def sequence(
        self, prompt: list[int], params: SamplingParams, index: int = 0, *, streams: bool = True
    ) -> Sequence: ...

    def withdraw(self, sequence: Sequence, reason: FinishReason) -> None: ...

    def compute_step(self) -> list[Sequence]: ...


def follow(engine: Follower) -> None:
    """What ranks above 0 do: the steps that rank 0 does, until it dismisses them."""
    known: dict[int, Sequence] = {}
    while (orders := engine.parallel.listen()) is not None:
        for order in orders:
            if "add" in order:
                params = SamplingParams.from_json(order["params"])
                known[order["add"]] = engine.sequence(order["prompt"], params, streams=False)
                engine.scheduler.add(known[order["add"]])
            elif "guess" in order:
                engine.speculation.set_lengths(*order["guess"])
            elif order["cancel"] in known:
                engine.withdraw(known[order["cancel"]], "cancelled")
        engine.compute_step()
        known = {key: sequence for key, sequence in known.items() if sequence.finish_reason is None}
