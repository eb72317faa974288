"""Prompt lookup: where the last three tokens occurred before, draft the tokens that followed them.

Such drafts cost nothing to make and are accepted where the output quotes or repeats
(github.com/apoorvumang/prompt-lookup-decoding).
"""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from weakref import WeakKeyDictionary

from quantkit.executor.scheduler.sequence import PROMPT_LOOKUP, Sequence

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
