"""Who computes what in the next step: continuous batching over a limited cache.

Sequences that decode go first, one token each; beside them a step prefills a limited number of
tokens, so a long prompt is computed in chunks, and whoever has begun to answer gets tokens in every
step. Behind a long context a token costs more, so that there are fewer of them
in a chunk: answers wait as long for every chunk. Of every chunk it leaves half to prompts that fit
in one step. A sequence enters when its whole prompt has blocks, and grows a block at a time. When
the cache is full the youngest sequence gives its blocks up and waits at the head of the queue;
later it computes its tokens again. Nothing is lost, and since its random numbers depend on
positions alone it goes on as it would have.
"""

import math
import time
from collections import deque
from dataclasses import dataclass
from itertools import chain

from quantkit.executor.cache.cache import BlockAllocator, CachePlan
from quantkit.executor.scheduler.prefix_cache import PrefixCachingAllocator
from quantkit.executor.scheduler.sequence import Sequence

_UNIT = 128
"""Chunks whose tokens differ in cost have whole units of so many: kernels compute tokens in
blocks."""
_FEWEST_OF = 4
"""A chunk has no fewer tokens than the first one divided by this, however long the context: what a
pass costs beside its tokens would be most of it."""


@dataclass(frozen=True)
class ScheduledStep:
    """`prefill`: sequences with how many of their tokens to compute; `decode`: sequences with one
    token each."""

    prefill: list[tuple[Sequence, int]]
    decode: list[Sequence]

    @property
    def sequences(self) -> list[Sequence]:
        """All that are computed, as `alone` has them."""
        return [*self.decode, *(sequence for sequence, _ in self.prefill)]

    @property
    def guided(self) -> bool:
        """Whether a grammar holds any of them."""
        return any([one.guide for one in self.decode]) or any(one.guide for one, _ in self.prefill)

    @property
    def rows_to_sample(self) -> list[tuple[Sequence, int]]:
        """Sequences whose successors are chosen, with how many: one behind every guess too. Asked
        before the step is computed."""
        answers = [(sequence, 1 + len(sequence.drafts)) for sequence in self.decode]
        return answers + [
            (sequence, 1) for sequence, count in self.prefill if count == sequence.num_new
        ]

    def of(self, rank: int) -> "ScheduledStep":
        """What one data-parallel rank computes of it."""
        return ScheduledStep(
            [part for part in self.prefill if part[0].dp_rank == rank],
            [one for one in self.decode if one.dp_rank == rank],
        )

    def passes(self, mixed: bool) -> list["ScheduledStep"]:
        """What is computed at a time: all of it, or the decoding sequences and then the prompts;
        none where there is nothing."""
        parts = (
            [self]
            if mixed or not self.prefill
            else [ScheduledStep([], self.decode), ScheduledStep(self.prefill, [])]
        )
        return [one for one in parts if one.prefill or one.decode]

    def per_sequence(self) -> list[tuple[Sequence, "ScheduledStep"]]:
        """Every sequence with a step of its own."""
        decode = [(one, ScheduledStep([], [one])) for one in self.decode]
        return decode + [(part[0], ScheduledStep([part], [])) for part in self.prefill]


@dataclass(frozen=True)
class StepBudget:
    """Tokens of prompts that a step computes: `alone` where nobody decodes, `with_decodes` where
    somebody does. mixed: whether both are computed in one pass.

    doubles_at: behind so many cached tokens a new one costs twice what it costs at the beginning of
    a prompt, so that a step computes fewer than `with_decodes`, which are those of a first chunk;
    0 where all cost the same.
    """

    prefill_only: int
    with_decodes: int
    mixed: bool = False
    doubles_at: int = 0

    def cost(self, start: int, count: int) -> float:
        """Of `count` tokens from position `start` on, in tokens that see nothing: each sees those
        before it, on the mean half of these."""
        return count * (1 + (start + count / 2) / self.doubles_at) if self.doubles_at else count

    def fitting(self, start: int, count: int, room: float) -> int:
        """How many of `count` tokens from `start` on cost no more than `room`: all, or whole units
        of `_UNIT` where costs differ."""
        if not self.doubles_at:
            return min(count, int(room))
        if self.cost(start, count) <= room:
            return count
        first = self.doubles_at + start
        most = int(math.sqrt(first * first + 2 * self.doubles_at * room) - first + 1e-3)
        return min(count, most - most % _UNIT)


class Scheduler:
    """max_batch: sequences that may run together. prefill_tokens: tokens of prompts computed in one
    step; `budget` may be set anew.

    lookahead: tokens beyond its own that a sequence needs room for, where some are guessed.
    prefix_cache: whether sequences share the blocks of a common beginning.
    """

    def __init__(
        self,
        plan: CachePlan,
        *,
        max_batch: int,
        prefill_tokens: int,
        lookahead: int = 0,
        prefix_cache: bool = False,
    ) -> None:
        self.prefix = (
            PrefixCachingAllocator(plan.num_blocks, plan.block_size) if prefix_cache else None
        )
        self.allocator = self.prefix or BlockAllocator(plan.num_blocks)
        self.block_size = plan.block_size
        self.max_batch, self.lookahead = max_batch, lookahead
        self.budget = StepBudget(prefill_tokens, prefill_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._places = list(range(max_batch, 0, -1))
        """Of states that nobody has."""
        self.num_preempted = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def cache_usage(self) -> float:
        """The share of its blocks that are in use."""
        return 1 - self.allocator.num_free / self.allocator.num_blocks

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def num_shared(self, sequence: Sequence) -> int:
        """Blocks at the beginning of a sequence that the prefix cache holds."""
        if self.prefix is None:
            return 0
        found = self.prefix.find(sequence)
        self.prefix.give_back(found)
        return len(found)

    def schedule(self, *, decode_only: bool = False) -> ScheduledStep:
        """decode_only: a pass over them is under way, so prompts wait for the next step, unless
        nobody answers any more."""
        if self.prefix is not None:
            for sequence in self.running:
                self.prefix.publish(sequence)
        decode = self._grow(
            [
                sequence
                for sequence in self.running
                if len(sequence.token_ids) - sequence.num_cached == 1
            ]
        )
        if (decode_only and decode) or (not self.waiting and len(decode) == len(self.running)):
            return ScheduledStep([], decode)
        return ScheduledStep(
            self._prefill(
                self.budget
                if decode
                else StepBudget(self.budget.prefill_only, self.budget.prefill_only)
            ),
            decode,
        )

    def decodes_again(self, answers: list[tuple[Sequence, int]]) -> bool:
        """Whether the next step decodes these answers again, a token further, and nothing else of
        what is here: but for those that end."""
        left = sum([one.num_useful_drafts > 0 for one, _ in answers])
        full = len(self.running) >= self.max_batch and left == len(answers)
        return len(answers) == len(self.running) and left > 0 and (full or not self.waiting)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that finished or was cancelled, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._free(sequence)
        else:
            self.waiting.remove(sequence)

    def _prefill(self, budget: StepBudget) -> list[tuple[Sequence, int]]:
        """Prompts to compute next, in the order they came, with how many of their tokens, which
        cost as much as `budget.with_decodes` in all; then those that take more than this step.

        The latter get half of the step, and whatever the others leave.
        """
        parts: list[tuple[Sequence, int]] = []
        long: list[Sequence] = []
        whole = left = budget.cost(0, budget.with_decodes)
        least = budget.with_decodes // _FEWEST_OF

        def take(sequence: Sequence, room: float) -> bool:
            """Tokens of a sequence, where nothing else is computed no less than `least`. Whether
            there were any."""
            nonlocal left
            count = max(
                budget.fitting(sequence.num_cached, sequence.num_new, room),
                0 if parts else min(sequence.num_new, least),
            )
            if count:
                parts.append((sequence, count))
                left -= budget.cost(sequence.num_cached, count)
            return count > 0

        prompts = chain(
            [sequence for sequence in self.running if sequence.num_new > 1], iter(self._admit, None)
        )
        while (room := left - (whole // 2 if long else 0)) >= 1 and (
            sequence := next(prompts, None)
        ):
            if budget.cost(sequence.num_cached, sequence.num_new) > whole:
                long.append(sequence)
            elif not take(sequence, room):
                break
        for sequence in long:
            if left < 1 or not take(sequence, left):
                break
        return parts

    def _grow(self, decoding: list[Sequence]) -> list[Sequence]:
        """A block more for each sequence that needs one, the oldest first; the youngest lose theirs
        where there are none."""
        size, ahead = self.block_size, self.lookahead
        short = [one for one in decoding if len(one.blocks) * size < len(one.token_ids) + ahead]
        if not short:
            return decoding
        for sequence in short:
            if not sequence.blocks:  # preempted a moment ago
                continue
            missing = self._blocks_for(sequence) - len(sequence.blocks)
            while missing > self.allocator.num_free and sequence.blocks:
                self._preempt(self.running[-1])
            if missing > 0 and sequence.blocks:
                sequence.blocks += self.allocator.take(missing)
        return [sequence for sequence in decoding if sequence.blocks]

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        self.waiting.appendleft(sequence)
        self.num_preempted += 1

    def _admit(self) -> Sequence | None:
        """The first in the queue, if there is room for it and a further block for everybody who may
        need one."""
        if not self.waiting or len(self.running) >= self.max_batch:
            return None
        sequence = self.waiting[0]
        # A prompt whose tokens are to be scored is computed whole.
        found = (
            self.prefix.find(sequence)
            if self.prefix is not None and sequence.params.prompt_logprobs is None
            else []
        )
        needed = self._blocks_for(sequence) - len(found)
        growing = sum(len(one.blocks) * self.block_size < one.max_len for one in self.running)
        if needed + growing > self.allocator.num_free:
            if self.running:
                self.allocator.give_back(found)
                return None
            assert needed <= self.allocator.num_free, (needed, self.allocator.num_free)
        self.waiting.popleft()
        sequence.blocks = found + self.allocator.take(needed)
        sequence.num_cached, sequence.num_published_blocks = (
            len(found) * self.block_size,
            len(found),
        )
        sequence.num_drafter_tokens = sequence.num_cached
        if not sequence.started:
            sequence.started, sequence.num_prefix_hits = time.perf_counter(), sequence.num_cached
        sequence.state = self._places.pop()
        self.running.append(sequence)
        return sequence

    def _free(self, sequence: Sequence) -> None:
        if self.prefix is not None:
            self.prefix.publish(sequence)
        self.allocator.give_back(sequence.blocks)
        self._places.append(sequence.state)
        sequence.drop_drafts()
        sequence.blocks, sequence.num_cached, sequence.num_drafter_tokens, sequence.state = (
            [],
            0,
            0,
            0,
        )

    def _blocks_for(self, sequence: Sequence) -> int:
        tokens = min(len(sequence.token_ids) + self.lookahead, sequence.max_len)
        return -(-tokens // self.block_size)
