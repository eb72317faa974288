"""Speculative decoding as the engine sees it: a drafter, prompt lookup, and counts of accepted
drafts.

A drafter works in two parts. `launch` runs while the device has a pass's results and the host
does not; what it computes reaches the host together with the sampled tokens. `finish` runs when
these are known, and leaves useful drafts in `drafts` of the sequences.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quantkit.executor.runner.runner import ForwardPass
from quantkit.executor.runner.sampler import SampledTokens
from quantkit.executor.scheduler.sequence import DRAFTER, Sequence
from quantkit.executor.speculation.adaptive_draft_length import DraftLengthController
from quantkit.executor.speculation.prompt_lookup import PromptLookup


class Proposer(Protocol):
    """count: draft length, at most; may change between steps."""

    count: int

    def launch(self, output: ForwardPass, sampled: SampledTokens | None) -> Tensor | None:
        """Draft after the tokens sampled in a pass: [R] on the device; None where nothing is
        computed."""

    def finish(self, output: ForwardPass, advanced: list[Sequence], drafts: list[int]) -> None:
        """Set the drafts of the sequences that got tokens, now appended. drafts: what `launch`
        returned, empty for None. Where nothing is drafted, tensors of `output` may already belong
        to another pass."""


@dataclass
class Acceptance:
    """Drafted and accepted tokens since the engine was loaded."""

    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


class Speculation:
    """drafter: the proposer that computes drafts, if any. max_lookup: longest draft of prompt
    lookup. adaptive: adapt the draft length to measured step times."""

    def __init__(
        self, drafter: Proposer | None, max_lookup: int, *, adaptive: bool = False
    ) -> None:
        self.drafter, self.acceptance = drafter, Acceptance()
        self.controller = DraftLengthController(
            drafter.count if drafter is not None else 0, max_lookup, adaptive=adaptive
        )
        self._lookup = PromptLookup(max_lookup, self.controller.record_lookup_hits)
        self.set_lengths(self.controller.drafts, self.controller.lookup)

    def choose(self) -> tuple[int, int] | None:
        """New draft lengths (drafter, prompt lookup) from this step on; None if unchanged."""
        lengths = self.controller.choose()
        if lengths == (self.controller.drafts, self.controller.lookup):
            return None
        self.set_lengths(*lengths)
        return lengths

    def set_lengths(self, drafts: int, lookup: int) -> None:
        self.controller.drafts, self.controller.lookup = drafts, lookup
        self._lookup.count = lookup
        if self.drafter is not None:
            self.drafter.count = drafts

    @property
    def is_active(self) -> bool:
        """Whether anything is drafted now."""
        return self.controller.drafts + self.controller.lookup > 0

    def launch(self, output: ForwardPass, sampled: SampledTokens | None) -> Tensor | None:
        """As `Proposer.launch`; prompt lookup computes nothing on the device."""
        return None if self.drafter is None else self.drafter.launch(output, sampled)

    def finish(self, output: ForwardPass, advanced: list[Sequence], drafts: list[int]) -> None:
        """As `Proposer.finish`; prompt lookup may replace what the drafter drafted."""
        if not advanced:
            return
        if self.drafter is not None:
            self.drafter.finish(output, advanced, drafts)
        self._lookup.draft(advanced)

    def record_step(
        self, sequences: list[Sequence], rows: int, accepted: int, seconds: float
    ) -> None:
        """A decode-only step of `rows` rows, drafts included, of which `accepted` were accepted."""
        longest = max([len(one.token_ids) - one.prompt_len for one in sequences])
        self.controller.record_step(len(sequences), rows, accepted, seconds, longest)

    def record_acceptance(self, sequence: Sequence, count: int, accepted: int) -> None:
        """The first `accepted` of a sequence's `count` drafts were accepted."""
        self.acceptance.drafted += count
        self.acceptance.accepted += accepted
        self.controller.record_acceptance(sequence.draft_source, count, accepted)
        sequence.draft_source = DRAFTER
