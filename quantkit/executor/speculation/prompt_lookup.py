"""Guesses from what prompt and answer said before: where the last tokens stood earlier, what
followed them may follow again.

They cost nothing to make (prompt lookup; github.com/apoorvumang/prompt-lookup-decoding) and are
right where an answer quotes or repeats.
"""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from weakref import WeakKeyDictionary

from torch import Tensor

from quantkit.executor.runner.runner import ForwardPass
from quantkit.executor.runner.sampler import SampledTokens
from quantkit.executor.scheduler.sequence import PROMPT_LOOKUP, Sequence

_LENGTH = 3
"""Tokens that must stand earlier."""
_BITS = 21
"""Of a token id: three of them make a number of 63 bits."""


class NgramIndex:
    """Where each run of three tokens of one sequence stood last. The sequence only grows."""

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        """By the three tokens: the place of what followed."""
        self._read = _LENGTH
        """Places up to here are known."""

    def guesses(self, tokens: Tokens[int], most: int) -> list[int]:
        """What may follow `tokens`, at most so many."""
        for place in range(self._read, len(tokens)):
            self._after[_key(tokens, place)] = place
        self._read = max(self._read, len(tokens))
        if most < 1 or len(tokens) < _LENGTH:
            return []
        found = self._after.get(_key(tokens, len(tokens)))
        return [] if found is None else list(tokens[found : found + most])


class PromptLookup:
    """The lookups of an engine's sequences, as a source (speculation.py). count: tokens guessed a
    step, at most. found: is told for which share of the sequences there was something, where it was
    looked for."""

    def __init__(self, count: int, found: Callable[[float], None]) -> None:
        self.count, self._found = count, found
        self._of: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def begin(self, done: ForwardPass, chosen: SampledTokens | None) -> Tensor | None:
        """As `speculation.Source.begin`: nothing is computed."""
        return None

    def finish(self, done: ForwardPass, advanced: list[Sequence], guesses: list[int]) -> None:
        """As `speculation.Source.finish`: guesses in place of drafts that begin alike and are no
        more."""
        if not self.count:
            return
        taken = 0
        for sequence in advanced:
            looked = self._of.setdefault(sequence, NgramIndex()).guesses(
                sequence.token_ids, min(self.count, sequence.num_useful_drafts)
            )
            if (
                looked
                and sequence.drafts[:1] in ([], looked[:1])
                and len(looked) >= len(sequence.drafts)
            ):
                sequence.drafts, sequence.draft_source = looked, PROMPT_LOOKUP
                taken += 1
        self._found(taken / len(advanced))


def _key(tokens: Tokens[int], place: int) -> int:
    """The three tokens before `place`."""
    return tokens[place - 3] << 2 * _BITS | tokens[place - 2] << _BITS | tokens[place - 1]
