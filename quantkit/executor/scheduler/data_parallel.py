"""Data-parallel ranks: every request has a home, the rank that computes it and keeps its cache.

All ranks take a step together, because their rows meet at every layer's routed experts
(expert_parallel.py). Each rank runs the schedulers of all homes over all requests, and gets the
tokens that were chosen on each. So it knows without a message what the others compute: how many
rows its pass is padded to, and whether it has a pass to join without a row of its own.
"""

from collections.abc import Callable
from typing import NamedTuple

from quantkit.executor.scheduler.scheduler import ScheduledStep, Scheduler, StepBudget
from quantkit.executor.scheduler.sequence import Sequence


class DataParallelScheduler:
    """A scheduler for each rank, used as one. make: makes a rank's."""

    def __init__(self, size: int, make: Callable[[], Scheduler]) -> None:
        self.each = [make() for _ in range(size)]
        self.max_batch = sum(one.max_batch for one in self.each)

    @property
    def budget(self) -> StepBudget:
        """Of one rank."""
        return self.each[0].budget

    @budget.setter
    def budget(self, budget: StepBudget) -> None:
        for one in self.each:
            one.budget = budget

    @property
    def has_work(self) -> bool:
        return any(one.has_work for one in self.each)

    @property
    def running(self) -> list[Sequence]:
        return [sequence for one in self.each for sequence in one.running]

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for one in self.each for sequence in one.waiting]

    @property
    def num_preempted(self) -> int:
        return sum(one.num_preempted for one in self.each)

    @property
    def cache_usage(self) -> float:
        """Of the fullest rank."""
        return max(one.cache_usage for one in self.each)

    def add(self, sequence: Sequence) -> None:
        """To the rank with the fewest requests; of several, to the one that has most of its
        beginning in the prefix cache."""
        fewest = min(map(_requests, self.each))
        least = [rank for rank, one in enumerate(self.each) if _requests(one) == fewest]
        sequence.dp_rank = max(least, key=lambda rank: self.each[rank].num_shared(sequence))
        self.each[sequence.dp_rank].add(sequence)

    def decodes_again(self, answers: list[tuple[Sequence, int]]) -> bool:
        """As `Scheduler.decodes_again`; ranks say before every pass what theirs is."""
        return False

    def remove(self, sequence: Sequence) -> None:
        """As `Scheduler.remove`."""
        self.each[sequence.dp_rank].remove(sequence)

    def schedule(self, *, decode_only: bool = False) -> ScheduledStep:
        """The step of all ranks, one rank's sequences after the other's; `ScheduledStep.of` is one
        rank's."""
        steps = [one.schedule(decode_only=decode_only) for one in self.each]
        return ScheduledStep(
            [part for step in steps for part in step.prefill],
            [one for step in steps for one in step.decode],
        )


class DpPadding(NamedTuple):
    """What every rank's pass is padded to, so that their collectives have one size: `rows` of
    answers with tables of `width` blocks, and
    `tokens` of prompts."""

    rows: int
    width: int
    tokens: int

    @classmethod
    def of(cls, steps: list[ScheduledStep]) -> "DpPadding":
        """steps: what each rank computes in the pass."""
        rows = max(sum(1 + len(sequence.drafts) for sequence in step.decode) for step in steps)
        width = max((len(sequence.blocks) for step in steps for sequence in step.decode), default=0)
        return cls(rows, width, max(sum(count for _, count in step.prefill) for step in steps))


def _requests(scheduler: Scheduler) -> int:
    return len(scheduler.waiting) + len(scheduler.running)
