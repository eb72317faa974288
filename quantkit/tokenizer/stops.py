"""Which tokens can end an answer at a stop string: behind all others its text need not be looked
at."""

import functools
import json
from typing import Any

from tokenizers import Tokenizer

_KEPT = 64
"""Sets of stop strings whose tokens are remembered."""
_BY_TOKEN = {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
"""Decoders under which a token's text is the same behind any other tokens, but for a space before
it, and for bytes of a character that several tokens share."""

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Text of bytes that are no whole character, or are none yet."""


class StopTokens(dict[int, bool]):
    """Of stop strings under a tokenizer, by token: True for each whose text may hold the end of
    one, and for some more. A token is looked at when it is first asked for. skip_special: whether
    special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], skip_special: bool) -> None:
        super().__init__()
        self._tokenizer, self._stop, self._skip_special = tokenizer, stop, skip_special
        self._by_token = _is_by_token(tokenizer) and not any(_UNFINISHED in one for one in stop)

    def __missing__(self, token_id: int) -> bool:
        found = self[token_id] = not self._by_token or self._may_end(token_id)
        return found

    def _may_end(self, token_id: int) -> bool:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=self._skip_special)
        if _UNFINISHED in text:
            return True
        return any(_holds_end(shown, stop) for shown in (text, " " + text) for stop in self._stop)


@functools.lru_cache(maxsize=_KEPT)
def stop_tokens(tokenizer: Tokenizer, stop: tuple[str, ...], skip_special: bool) -> StopTokens:
    """The same object for all requests that ask for the same."""
    return StopTokens(tokenizer, stop, skip_special)


def _holds_end(text: str, stop: str) -> bool:
    """Whether `stop` may end in `text`, whatever comes before it."""
    return stop in text or any(
        stop.endswith(text[:count]) for count in range(1, min(len(text), len(stop)) + 1)
    )


def _is_by_token(tokenizer: Tokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    said: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    parts = said["decoders"] if said.get("type") == "Sequence" else [said]
    return all(part.get("type") in _BY_TOKEN for part in parts)
