"""Data-parallel scheduling: every request belongs to one rank, which computes it and keeps its
cache.

All ranks take a step together, because their rows meet at every layer's routed experts
(ranks/expert_parallel.py). Each rank runs the schedulers of all ranks over all requests, and gets
the tokens sampled on each. So it knows without a message what the others compute: what its pass is
padded to, and whether it must join a pass without a row of its own.
"""

from collections.abc import Callable
from typing import NamedTuple

from quantkit.executor.scheduler.scheduler import ScheduledStep, Scheduler, StepBudget
from quantkit.executor.scheduler.sequence import Sequence


class DataParallelScheduler:
    """One scheduler per rank, with the interface of a single one. make: makes a rank's."""

    def __init__(self, size: int, make: Callable[[], Scheduler]) -> None:
        self.ranks = [make() for _ in range(size)]
        self.max_batch = sum(one.max_batch for one in self.ranks)

    @property
    def budget(self) -> StepBudget:
        """Of one rank; setting it sets it for all."""
        return self.ranks[0].budget

    @budget.setter
    def budget(self, budget: StepBudget) -> None:
        for one in self.ranks:
            one.budget = budget

    @property
    def has_work(self) -> bool:
        return any(one.has_work for one in self.ranks)

    @property
    def running(self) -> list[Sequence]:
        return [sequence for one in self.ranks for sequence in one.running]

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for one in self.ranks for sequence in one.waiting]

    @property
    def num_preempted(self) -> int:
        return sum(one.num_preempted for one in self.ranks)

    @property
    def cache_usage(self) -> float:
        """Of the fullest rank."""
        return max(one.cache_usage for one in self.ranks)

    def add(self, sequence: Sequence) -> None:
        """To the rank with the fewest requests; of several, to the one whose prefix cache has the
        longest match."""
        loads = [len(one.waiting) + len(one.running) for one in self.ranks]
        least = [rank for rank, load in enumerate(loads) if load == min(loads)]
        sequence.dp_rank = max(least, key=lambda rank: self.ranks[rank].prefix_match(sequence))
        self.ranks[sequence.dp_rank].add(sequence)

    def decodes_again(self, counts: list[tuple[Sequence, int]]) -> bool:
        """As `Scheduler.decodes_again`; data-parallel ranks agree on every pass first."""
        return False

    def remove(self, sequence: Sequence) -> None:
        """As `Scheduler.remove`."""
        self.ranks[sequence.dp_rank].remove(sequence)

    def schedule(self, *, decode_only: bool = False) -> ScheduledStep:
        """The step of all ranks, one rank's sequences after the other's; `ScheduledStep.of_rank` is
        one rank's."""
        steps = [one.schedule(decode_only=decode_only) for one in self.ranks]
        return ScheduledStep(
            [part for step in steps for part in step.prefill],
            [one for step in steps for one in step.decode],
            [one for step in steps for one in step.copies],
        )


class DpPadding(NamedTuple):
    """What every rank's pass is padded to, so that collectives have one size: decode `rows` with
    block tables of `width`, and prompt `tokens`."""

    rows: int
    width: int
    tokens: int

    @classmethod
    def of(cls, steps: list[ScheduledStep]) -> "DpPadding":
        """steps: what each rank computes in the pass."""
        rows = max(sum(1 + len(sequence.drafts) for sequence in step.decode) for step in steps)
        width = max((len(sequence.blocks) for step in steps for sequence in step.decode), default=0)
        return cls(rows, width, max(sum(count for _, count in step.prefill) for step in steps))
