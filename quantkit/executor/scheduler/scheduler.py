"""Continuous batching over a limited cache: what the next step computes.

Decoding sequences go first, one token each; next to them a step prefills a limited number of
tokens. So long prompts are computed in chunks, and decoding sequences get a token in every step.
After a long context a token costs more, so chunks shrink and decoding sequences wait as long for
every chunk. A chunk of a long prompt leaves half of the step to prompts that fit in one step.

A sequence is admitted when its whole prompt has blocks, and grows a block at a time. When the cache
is full, the youngest sequence is preempted: it frees its blocks, waits at the head of the queue and
is recomputed later. Its random numbers depend on positions alone, so its output is the same.
"""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from quantkit.executor.cache.cache import BlockAllocator, CachePlan
from quantkit.executor.scheduler.prefix_cache import PrefixCachingAllocator
from quantkit.executor.scheduler.sequence import Sequence

_CHUNK_UNIT = 128
"""Chunks of tokens that differ in cost are multiples of this, as kernels compute tokens in
blocks."""
_MIN_CHUNK_SHARE = 4
"""A chunk has at least the first chunk's tokens divided by this, however long the context: below
that the fixed cost of a pass dominates."""


class StateCopy(NamedTuple):
    """Between a place of a sequence's states and a checkpoint of `tokens` tokens. restores: from the
    checkpoint. dp_rank: that has both."""

    dp_rank: int
    slot: int
    place: int
    tokens: int
    restores: bool


@dataclass(frozen=True)
class ScheduledStep:
    """prefill: sequences and how many of their tokens to compute; decode: sequences with one token
    and their drafts each; copies: in this order, before them."""

    prefill: list[tuple[Sequence, int]]
    decode: list[Sequence]
    copies: list[StateCopy] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decode, *(sequence for sequence, _ in self.prefill)]

    @property
    def has_grammar(self) -> bool:
        return any([one.guide for one in self.decode]) or any(one.guide for one, _ in self.prefill)

    @property
    def rows_to_sample(self) -> list[tuple[Sequence, int]]:
        """Sequences that get tokens, and after how many rows one is sampled: the newest token and
        its drafts, or the end of a prompt. Valid before the step is computed."""
        decode = [(sequence, 1 + len(sequence.drafts)) for sequence in self.decode]
        return decode + [
            (sequence, 1) for sequence, count in self.prefill if count == sequence.num_new
        ]

    def of_rank(self, rank: int) -> "ScheduledStep":
        """What one data-parallel rank computes of it."""
        return ScheduledStep(
            [part for part in self.prefill if part[0].dp_rank == rank],
            [one for one in self.decode if one.dp_rank == rank],
        )

    def passes(self, mixed: bool) -> list["ScheduledStep"]:
        """Split into forward passes: one for all, or decoding sequences and then prompts."""
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
    """Prompt tokens of a step: `prefill_only` while no sequence decodes, else `with_decodes`.
    mixed: whether prompts and decoding sequences share one pass.

    doubles_at: after this many cached tokens a new one costs twice what it costs at the beginning
    of a prompt, so a step computes fewer than `with_decodes`, which are those of a first chunk; 0
    where all cost the same.
    """

    prefill_only: int
    with_decodes: int
    mixed: bool = False
    doubles_at: int = 0

    def cost(self, start: int, count: int) -> float:
        """Attention cost of the chunk in units of one token without context."""
        return count * (1 + (start + count / 2) / self.doubles_at) if self.doubles_at else count

    def fitting(self, start: int, count: int, room: float) -> int:
        """How many of `count` tokens from `start` on cost at most `room`: all, or a multiple of
        `_CHUNK_UNIT` where costs differ."""
        if not self.doubles_at:
            return min(count, int(room))
        if self.cost(start, count) <= room:
            return count
        first = self.doubles_at + start
        most = int(math.sqrt(first * first + 2 * self.doubles_at * room) - first + 1e-3)
        return min(count, most - most % _CHUNK_UNIT)


class Scheduler:
    """max_batch: sequences that may run together. chunk_tokens: prompt tokens of a step; `budget`
    may be set later. lookahead: tokens beyond its own that a sequence needs blocks for, with
    drafts. prefix_cache: whether sequences share the blocks of a common prefix.
    """

    def __init__(
        self,
        plan: CachePlan,
        *,
        max_batch: int,
        chunk_tokens: int,
        lookahead: int = 0,
        prefix_cache: bool = False,
    ) -> None:
        self.prefix = (
            PrefixCachingAllocator(plan.num_blocks, plan.block_size, plan.checkpoints)
            if prefix_cache
            else None
        )
        self.allocator = self.prefix or BlockAllocator(plan.num_blocks)
        self.block_size = plan.block_size
        self.max_batch, self.lookahead = max_batch, lookahead
        self.budget = StepBudget(chunk_tokens, chunk_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_states = list(range(max_batch, 0, -1))
        """Unused places in the cache's per-sequence states."""
        self._copies: list[StateCopy] = []
        """Of the step that is being made."""
        self.num_preempted = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def cache_usage(self) -> float:
        """Share of blocks in use."""
        return 1 - self.allocator.num_free / self.allocator.num_blocks

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def prefix_match(self, sequence: Sequence) -> int:
        """Blocks at the beginning of a sequence that the prefix cache holds."""
        if self.prefix is None:
            return 0
        found = self.prefix.find(sequence)
        self.prefix.give_back(found)
        return len(found)

    def schedule(self, *, decode_only: bool = False) -> ScheduledStep:
        """decode_only: a decode pass is in flight, so prompts wait for the next step if any
        sequence still decodes."""
        self._copies = []
        if self.prefix is not None:
            for sequence in self.running:
                self.prefix.publish(sequence)
                self._copy_state(sequence, self.prefix.keep_state(sequence), restores=False)
        decode = self._grow(
            [
                sequence
                for sequence in self.running
                if len(sequence.token_ids) - sequence.num_cached == 1
            ]
        )
        if (decode_only and decode) or (not self.waiting and len(decode) == len(self.running)):
            return ScheduledStep([], decode, self._copies)
        budget = self.budget
        if not decode:
            budget = StepBudget(budget.prefill_only, budget.prefill_only)
        return ScheduledStep(self._prefill(budget), decode, self._copies)

    def decodes_again(self, counts: list[tuple[Sequence, int]]) -> bool:
        """Whether the next step decodes these sequences again, except for those that end, and no
        others."""
        left = sum([one.num_useful_drafts > 0 for one, _ in counts])
        full = len(self.running) >= self.max_batch and left == len(counts)
        return len(counts) == len(self.running) and left > 0 and (full or not self.waiting)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that finished or was cancelled, running or waiting."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._free(sequence)
        else:
            self.waiting.remove(sequence)

    def _prefill(self, budget: StepBudget) -> list[tuple[Sequence, int]]:
        """Chunks of prompts in order of arrival, with a total cost of `budget.with_decodes`; then
        chunks of prompts that do not fit in one step, which get half of the step and what the
        others leave."""
        parts: list[tuple[Sequence, int]] = []
        long: list[Sequence] = []
        total = left = budget.cost(0, budget.with_decodes)
        min_chunk = budget.with_decodes // _MIN_CHUNK_SHARE

        def add(sequence: Sequence, room: float) -> bool:
            """Add a chunk, of at least `min_chunk` tokens if it is the first. Whether it has any
            tokens."""
            nonlocal left
            count = max(
                budget.fitting(sequence.num_cached, sequence.num_new, room),
                0 if parts else min(sequence.num_new, min_chunk),
            )
            if count:
                count = count if self.prefix is None else self.prefix.cut(sequence, count)
                parts.append((sequence, count))
                left -= budget.cost(sequence.num_cached, count)
            return count > 0

        prompts = chain(
            [sequence for sequence in self.running if sequence.num_new > 1], iter(self._admit, None)
        )
        while (room := left - (total // 2 if long else 0)) >= 1 and (
            sequence := next(prompts, None)
        ):
            if budget.cost(sequence.num_cached, sequence.num_new) > total:
                long.append(sequence)
            elif not add(sequence, room):
                break
        for sequence in long:
            if left < 1 or not add(sequence, left):
                break
        return parts

    def _grow(self, decoding: list[Sequence]) -> list[Sequence]:
        """Allocate a block for each sequence that needs one, the oldest first, preempting the
        youngest if there are none. Returns the sequences that can decode."""
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
        """Start the first waiting sequence if there are blocks for it and a further one for every
        sequence that may need it."""
        if not self.waiting or len(self.running) >= self.max_batch:
            return None
        sequence = self.waiting[0]
        # A prompt whose tokens are scored is computed in full.
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
        sequence.num_cached = sequence.num_drafter_tokens = len(found) * self.block_size
        sequence.num_published_blocks = len(found)
        if not sequence.started:
            sequence.started, sequence.num_prefix_hits = time.perf_counter(), sequence.num_cached
        sequence.state = self._free_states.pop()
        if self.prefix is not None:
            self._copy_state(sequence, self.prefix.admit(sequence), restores=True)
        self.running.append(sequence)
        return sequence

    def _copy_state(self, sequence: Sequence, slot: int | None, *, restores: bool) -> None:
        if slot is not None:
            one = (sequence.dp_rank, slot, sequence.state, sequence.num_cached, restores)
            self._copies.append(StateCopy(*one))

    def _free(self, sequence: Sequence) -> None:
        if self.prefix is not None:
            self.prefix.publish(sequence)
        self.allocator.give_back(sequence.blocks)
        self._free_states.append(sequence.state)
        sequence.drop_drafts()
        sequence.blocks = []
        sequence.num_cached = sequence.num_drafter_tokens = sequence.state = 0

    def _blocks_for(self, sequence: Sequence) -> int:
        tokens = min(len(sequence.token_ids) + self.lookahead, sequence.max_len)
        return -(-tokens // self.block_size)
