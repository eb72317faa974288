"""Hidden states of many sequences, lying one after the other, and walked in batches that fit in
memory."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

LARGEST_KEPT = 2**28
"""Bytes of a block. Larger ones (Hessians, the weights of a dense MLP) go back at once: they make a
run's peak."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)


def keep_freed_blocks() -> None:
    """From here on, in this process. Up to LARGEST_KEPT bytes stay at the end of the heap."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(_TRIM_THRESHOLD, LARGEST_KEPT)


def trim_heap() -> None:
    """Free pages, wherever they lie, to the system."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


BATCH_TOKENS = 2048
PIECE_VALUES = 2**24


@dataclass(frozen=True)
class Batches:
    """What fits in a CPU's memory.

    tokens: run through a sublayer together, in whole sequences. expert_values: weights of routed
    experts solved together, at least one expert (R1's, of 44 million, go one by one). piece_values:
    weights of one linear rounded together, in whole rows: rows are independent, and a piece's
    blocks of columns stay in a processor's cache.
    """

    tokens: int = BATCH_TOKENS
    expert_values: int = 2**25
    piece_values: int = PIECE_VALUES

    def halved(self) -> "Batches":
        """Half as much, but not below what saves nothing any more."""
        return Batches(
            max(self.tokens // 2, 128),
            max(self.expert_values // 2, 2**16),
            max(self.piece_values // 2, 2**20),
        )

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, {self.expert_values} expert values, {self.piece_values} "
            "values a piece"
        )


@dataclass(frozen=True)
class TokenBatch:
    """Whole sequences run together: their place in the hidden states, their lengths, and whether
    they are held out."""

    part: slice
    lengths: list[int]
    held_out: bool


@dataclass
class HiddenStates:
    """hidden float32 [T, H]; the first `fitted` tokens are calibration, the rest held out."""

    hidden: Tensor
    fitted: int
    lengths: list[int]
    batch_tokens: int = BATCH_TOKENS

    def batches(self) -> Iterator[TokenBatch]:
        """About `batch_tokens` tokens at a time; none mixes calibration and held-out sequences."""
        start, pending = 0, list[int]()
        for length in self.lengths:
            stop = start + sum(pending)
            if pending and (sum(pending) + length > self.batch_tokens or stop == self.fitted):
                yield TokenBatch(slice(start, stop), pending, start >= self.fitted)
                start, pending = stop, []
            pending.append(length)
        if pending:
            yield TokenBatch(slice(start, start + sum(pending)), pending, start >= self.fitted)


@dataclass
class HiddenStatePair:
    """quantized: all sequences, through what has been rounded so far. original: the held-out ones,
    through the source's weights."""

    quantized: HiddenStates
    original: HiddenStates


def relative_distance(a: Tensor, b: Tensor) -> float:
    """||a - b||^2 / ||b||^2; 0 for equal ones, zeros included; NaN for nothing."""
    if not b.numel():
        return float("nan")
    difference = float((a - b).square().sum())
    return difference / float(b.square().sum()) if difference else 0.0
