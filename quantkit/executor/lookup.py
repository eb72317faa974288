"""Guesses from what prompt and answer said before: where the last tokens stood earlier, what followed them may follow again.

They cost nothing to make (prompt lookup; github.com/apoorvumang/prompt-lookup-decoding) and are right where an answer quotes or repeats.
"""

from collections.abc import Sequence as Tokens

_LENGTH = 3
"""Tokens that must stand earlier."""
_BITS = 21
"""Of a token id: three of them make a number of 63 bits."""


class Lookup:
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


def _key(tokens: Tokens[int], place: int) -> int:
    """The three tokens before `place`."""
    return tokens[place - 3] << 2 * _BITS | tokens[place - 2] << _BITS | tokens[place - 1]
