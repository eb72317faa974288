"""Guesses of tokens to come, of whatever source: what the engine knows of them.

A source guesses in two parts. It begins while the device has a pass's results and the host does
not: what it computes then comes to the host with the chosen tokens. It finishes when these are
known: guesses that can be of use are in `drafts` of the sequences then. Sources finish one after
the other, and a later one may replace what an earlier one guessed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.runner import ForwardPass, Runner
from quantkit.executor.runner.sampler import SampledTokens
from quantkit.executor.scheduler.sequence import DRAFTER, Sequence
from quantkit.executor.speculation.adaptive_draft_length import DraftLengthController
from quantkit.executor.speculation.prompt_lookup import PromptLookup


class Proposer(Protocol):
    """count: guesses behind a token, at most; may be changed between steps."""

    count: int

    def begin(self, done: ForwardPass, chosen: SampledTokens | None) -> Tensor | None:
        """What may follow the tokens chosen behind the counted rows of a pass, [R] on the device;
        None where nothing is computed."""

    def finish(self, done: ForwardPass, advanced: list[Sequence], guesses: list[int]) -> None:
        """Drafts for sequences that got tokens, now appended. guesses: what `begin` returned; empty
        where that was nothing. Where nothing is guessed, tensors of `done` may be another pass's by
        now."""


@dataclass
class Acceptance:
    """How many tokens were guessed, and how many of them were kept, since the engine was loaded."""

    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


class Speculation:
    """drafter: the source that computes guesses, if any. num_looked_up: tokens guessed from what
    was said, at most. measured: whether fewer of either are guessed where that is faster, by what
    steps take of `clock`, in seconds."""

    def __init__(
        self,
        drafter: Proposer | None,
        num_looked_up: int,
        *,
        measured: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter, self.acceptance, self.clock = drafter, Acceptance(), clock
        self.controller = DraftLengthController(
            drafter.count if drafter is not None else 0, num_looked_up, measured=measured
        )
        self._lookups = PromptLookup(num_looked_up, self.controller.record_lookup_hits)
        self._sources: list[Proposer] = (
            [self._lookups] if drafter is None else [drafter, self._lookups]
        )
        self.set_lengths(self.controller.drafts, self.controller.looked_up)

    def choose(self) -> tuple[int, int] | None:
        """How many are computed and looked up from now on; None where that stays as it is."""
        wanted = self.controller.choose()
        if wanted == (self.controller.drafts, self.controller.looked_up):
            return None
        self.set_lengths(*wanted)
        return wanted

    def set_lengths(self, drafts: int, looked_up: int) -> None:
        """Guess so many a step from now on: computed, and looked up."""
        self.controller.drafts, self.controller.looked_up = drafts, looked_up
        self._lookups.count = looked_up
        if self.drafter is not None:
            self.drafter.count = drafts

    @property
    def is_active(self) -> bool:
        """Whether anything is guessed now."""
        return self.controller.drafts + self.controller.looked_up > 0

    def begin(self, done: ForwardPass, chosen: SampledTokens | None) -> Tensor | None:
        """As `Source.begin`, of all."""
        found = [
            guesses
            for source in self._sources
            if (guesses := source.begin(done, chosen)) is not None
        ]
        assert len(found) < 2, "one source computes"
        return found[0] if found else None

    def launch_async_decode(
        self,
        runner: Runner,
        parallel: Parallel,
        done: ForwardPass,
        chosen: SampledTokens,
        guessed: Tensor | None,
    ) -> None:
        """Launch the pass behind one whose answers all go on. guessed: the chosen tokens and what
        `begin` returned. Not where others may come in its place."""
        if guessed is not None and self.controller.looked_up == 0:
            told, number = parallel.first(guessed), len(done.rows)
            runner.launch_async_verification(done.counts, told[:number], told[number:])
        elif not (guessed is not None or self.is_active or done.has_drafts):
            # The likeliest are the same on every rank: gathered logits are the same bits.
            runner.launch_async_decode(
                chosen.token_ids if chosen.batch is None else parallel.first(chosen.token_ids)
            )

    def finish(self, done: ForwardPass, advanced: list[Sequence], guesses: list[int]) -> None:
        """As `Source.finish`, of all."""
        if advanced:
            for source in self._sources:
                source.finish(done, advanced, guesses)

    def record_step(self, answers: list[Sequence], rows: int, kept: int, began: float) -> None:
        """A step since `began` that computed answers alone, with so many rows, their guesses
        included, of which `kept` were right."""
        seconds, longest = (
            self.clock() - began,
            max([len(one.token_ids) - one.prompt_len for one in answers]),
        )
        self.controller.record_step(len(answers), rows, kept, seconds, longest)

    def record_acceptance(self, sequence: Sequence, count: int, kept: int) -> None:
        """Of `count` guesses for a sequence the first `kept` were right."""
        if count:
            self.acceptance.drafted += count
            self.acceptance.accepted += kept
            self.controller.record_acceptance(sequence.draft_source, count, kept)
        sequence.draft_source = DRAFTER
