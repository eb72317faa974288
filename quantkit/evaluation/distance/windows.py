"""What a pass is shown, and which of its tokens are scored."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from quantkit.common.errors import QuantkitError


@dataclass(frozen=True)
class Window:
    """ids: int64 [T]. Tokens from `first` on (1 <= first < T) are predicted from those before them;
    the ones before it are context."""

    ids: Tensor
    first: int = 1

    @property
    def scored(self) -> int:
        return len(self.ids) - self.first


def slide(document: Tensor, length: int, stride: int) -> Iterator[Window]:
    """Windows of `length` tokens, `stride` apart; each scores what no earlier one did, so every
    token but the first is scored once.

    That is the recipe of transformers' page on perplexity: a token is predicted from at least
    length - stride tokens before it. With a stride of `length` the first token of each window has
    nothing before it and is not scored.
    """
    if not 0 < stride <= length:
        raise QuantkitError(
            f"a stride of {stride} does not fit windows of {length}",
            "give a stride from 1 to --seq-len",
        )
    done = 0
    for start in range(0, len(document), stride):
        end = min(start + length, len(document))
        first = max(1, done - start)
        if end - start > first:
            yield Window(document[start:end], first)
        done = end
        if end == len(document):
            return
