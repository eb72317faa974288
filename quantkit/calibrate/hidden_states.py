"""Hidden states of many sequences, lying one after the other, and walked in batches that fit in
memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from quantkit.calibrate.batches import BATCH_TOKENS


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
