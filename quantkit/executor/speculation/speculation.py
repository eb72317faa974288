"""Speculative decoding as the engine sees it: a drafter, prompt lookup, and counts of accepted
drafts.

A drafter works in two parts. `launch` runs while the device has a pass's results and the host
does not; what it computes reaches the host together with the sampled tokens. `finish` runs when
these are known, and leaves useful drafts in `drafts` of the sequences.

Prompt lookup: where the last three tokens occurred before, draft the tokens that followed them.
Such drafts cost nothing to make and are accepted where the output quotes or repeats
(github.com/apoorvumang/prompt-lookup-decoding).
"""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from quantkit.executor.runner.runner import ForwardPass
from quantkit.executor.runner.sampler import SampledTokens
from quantkit.executor.scheduler.sequence import DRAFTER, PROMPT_LOOKUP, Sequence
from quantkit.executor.speculation.adaptive_draft_length import DraftLengthController

_NGRAM = 3
_BITS = 21
"""Of a token id: three of them make a key of 63 bits."""


class NgramIndex:
    """Last occurrence of each trigram of one sequence, which only grows."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        """Position after the last occurrence, by trigram."""
        self._indexed = _NGRAM

    def draft(self, tokens: Tokens[int], length: int) -> list[int]:
        """At most `length` tokens that may follow `tokens`."""
        for place in range(self._indexed, len(tokens)):
            self._next[_key(tokens, place)] = place
        self._indexed = max(self._indexed, len(tokens))
        if length < 1 or len(tokens) < _NGRAM:
            return []
        found = self._next.get(_key(tokens, len(tokens)))
        return [] if found is None else list(tokens[found : found + length])


class PromptLookup:
    """count: longest draft. record_hits: called after every step that looked up, with
    the share of sequences that got a draft."""

    def __init__(self, count: int, record_hits: Callable[[float], None]) -> None:
        self.count, self._record_hits = count, record_hits
        self._index: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def draft(self, sequences: list[Sequence]) -> None:
        """Draft for sequences that got tokens; replaces a drafter's drafts that start alike and are
        not longer."""
        if not self.count:
            return
        hits = 0
        for sequence in sequences:
            found = self._index.setdefault(sequence, NgramIndex()).draft(
                sequence.token_ids, min(self.count, sequence.num_useful_drafts)
            )
            if (
                found
                and sequence.drafts[:1] in ([], found[:1])
                and len(found) >= len(sequence.drafts)
            ):
                sequence.drafts, sequence.draft_source = found, PROMPT_LOOKUP
                hits += 1
        self._record_hits(hits / len(sequences))


def _key(tokens: Tokens[int], place: int) -> int:
    """Of the three tokens before `place`."""
    return tokens[place - 3] << 2 * _BITS | tokens[place - 2] << _BITS | tokens[place - 1]


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
