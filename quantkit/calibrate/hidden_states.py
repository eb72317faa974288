"""What a run holds of its tokens between and inside sublayers: hidden states of many sequences, and
the routing to one layer's experts.

Hidden states are stored one after the other and processed in batches that fit in memory. Where all
of them do not fit, they lie in a file (common/scratch.py). Routing is recorded while the layer runs
without its experts, and looked up expert by expert.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from quantkit.common.scratch import give_back, scratch_tensor

LARGEST_KEPT = 2**28
"""Bytes of a block. Larger ones (Hessians, the weights of a dense MLP) are returned to the system
at once: they make up a run's peak."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)


Observer = Callable[[str, Tensor], None]
"""(module, its input [T, K]). Linears that share an input are observed once, under the first one's
name."""


def keep_freed_blocks() -> None:
    """Let glibc keep freed blocks of up to LARGEST_KEPT bytes for the rest of this process; other C
    libraries are left alone.

    By default glibc maps every block above 32 MiB anew and unmaps it when it is freed, so all of
    its pages are faulted in and cleared again: a tenth of the processor time of an expert at R1's
    shapes.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(_TRIM_THRESHOLD, LARGEST_KEPT)


def trim_heap() -> None:
    """Return free pages to the system."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


BATCH_TOKENS = 2048
PIECE_VALUES = 2**24
_COLUMNS = 1024
"""Channels that are compared, and written, together: pages of a file in each row."""


@dataclass(frozen=True)
class Batches:
    """How much a calibrated run processes at once on a CPU. Results differ in their last bits with
    it, so a resumed run keeps its values.

    tokens: run through a sublayer together, in whole sequences. expert_values: weights of routed
    experts solved together, at least one expert (R1's, of 44 million, are solved one by one).
    piece_values: weights of one linear quantized together, in whole rows: rows are independent, and
    a piece's column blocks stay in the processor's cache.
    """

    tokens: int = BATCH_TOKENS
    expert_values: int = 2**25
    piece_values: int = PIECE_VALUES

    def halved(self) -> "Batches":
        """Half of each, down to sizes below which nothing more is saved."""
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
    """Whole sequences run together: their slice of the hidden states, their lengths, and whether
    they are held out."""

    part: slice
    lengths: list[int]
    held_out: bool

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass
class HiddenStates:
    """hidden float32 [T, H]; the first `fitted` tokens are calibration, the rest held out. scratch:
    folder of the file that they lie in; None: in memory."""

    hidden: Tensor
    fitted: int
    lengths: list[int]
    batch_tokens: int = BATCH_TOKENS
    scratch: Path | None = None

    def empty(self, rows: int, width: int) -> Tensor:
        """[rows, width] where these lie."""
        return empty_states(rows, width, self.hidden.device, self.scratch)

    def put(self, part: slice, after: Tensor) -> None:
        """Replace the first channels of some tokens by `after`. In a file only columns that change
        are written: Kimi-K3's complete blocks, most of its streams, do not."""
        before = self.hidden[part, : after.shape[1]]
        if self.scratch is None:
            before.copy_(after)
            return
        for old, new in zip(before.split(_COLUMNS, 1), after.split(_COLUMNS, 1)):
            if not torch.equal(old.view(torch.int32), new.view(torch.int32)):
                old.copy_(new)

    def batches(self) -> Iterator[TokenBatch]:
        """About `batch_tokens` tokens at a time; none mixes calibration and held-out sequences."""
        start, stop, pending = 0, 0, list[int]()
        for length in self.lengths:
            if pending and (stop - start + length > self.batch_tokens or stop == self.fitted):
                yield TokenBatch(slice(start, stop), pending, start >= self.fitted)
                give_back()
                start, pending = stop, []
            pending.append(length)
            stop += length
        if pending:
            yield TokenBatch(slice(start, stop), pending, start >= self.fitted)
            give_back()

    def parts(self) -> tuple[list[TokenBatch], list[TokenBatch]]:
        """Batches of calibration tokens, and of held-out ones."""
        batches = list(self.batches())
        fitted = sum(not batch.held_out for batch in batches)
        return batches[:fitted], batches[fitted:]


@dataclass
class HiddenStatePair:
    """quantized: all sequences, through the layers quantized so far. original: the held-out ones,
    through the source's weights."""

    quantized: HiddenStates
    original: HiddenStates


def empty_states(rows: int, width: int, device: torch.device, scratch: Path | None) -> Tensor:
    """[rows, width] on a device, or, on a CPU, in a file of the folder `scratch`."""
    if scratch is None:
        return torch.empty(rows, width, device=device)
    return scratch_tensor(scratch, rows, width)


def copied_states(states: Tensor, scratch: Path | None, more: int = 0) -> Tensor:
    """states [T, W] once more, as `empty_states`, with `more` channels of zeros."""
    if scratch is None:
        return F.pad(states, (0, more)) if more else states.clone()
    made = scratch_tensor(scratch, len(states), states.shape[1] + more)
    for to, rows in zip(made.split(BATCH_TOKENS), states.split(BATCH_TOKENS)):
        to[:, : states.shape[1]] = rows
        give_back()
    return made


def stored_states(path: Path, name: str, scratch: Path | None) -> Tensor:
    """A tensor [T, W] of a safetensors file, on the CPU, as `empty_states`."""
    with safe_open(path, framework="pt") as file:
        if scratch is None:
            return file.get_tensor(name)
        rows, width = file.get_slice(name).get_shape()
    made = scratch_tensor(scratch, rows, width)
    for start in range(0, rows, BATCH_TOKENS):
        part = slice(start, start + BATCH_TOKENS)
        with safe_open(path, framework="pt") as file:  # closed, it gives its pages back
            made[part] = file.get_slice(name)[part]
        give_back()
    return made


def mean_row_distance(a: Tensor, b: Tensor) -> float:
    """Mean over rows [T, H] of |a - b|^2 / |b|^2; NaN without rows. A mean of its own for every
    token, as one may have a stream hundreds of times as large as the others."""
    shares = [
        (one - other).square().sum(-1) / other.square().sum(-1).clamp(min=1e-30)
        for one, other in zip(a.split(BATCH_TOKENS), b.split(BATCH_TOKENS))
    ]
    return float(torch.cat(shares).mean())


def relative_distance(a: Tensor, b: Tensor) -> float:
    """|a - b||^2 / ||b||^2; 0 for equal tensors, also all-zero ones; NaN for empty ones."""
    if not b.numel():
        return float("nan")
    difference = float((a - b).square().sum())
    return difference / float(b.square().sum()) if difference else 0.0


def no_experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Experts operator that returns zeros."""
    return torch.zeros_like(x)


class RoutingRecorder:
    """Experts operator that records its arguments for up to `capacity` tokens and returns zeros."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self._recorded: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        if not self._recorded:
            self._recorded = tuple(
                torch.empty(self.capacity, *t.shape[1:], dtype=t.dtype, device=t.device)
                for t in (x, topk_ids, topk_weights)
            )
        for recorded, new in zip(self._recorded, (x, topk_ids, topk_weights)):
            recorded[self.count : self.count + len(x)] = new
        self.count += len(x)
        return torch.zeros_like(x)

    def routed(self, fitted: int, quantized: int) -> "RoutedTokens | None":
        """What was recorded, with `fitted` and `quantized` as in `RoutedTokens`; None if it was
        never called."""
        if not self.count:
            return None
        x, topk_ids, topk_weights = (t[: self.count] for t in self._recorded)
        return RoutedTokens(x, topk_ids, topk_weights, fitted, quantized)


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens routed to one layer's experts, in the order: calibration, held out, held out on the
    original path.

    x float32 [T, H]; topk_ids [T, k]; topk_weights float32 [T, k]; fitted and quantized: numbers of
    leading tokens that are calibration, and that run through quantized experts; the rest run
    through the original ones.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    fitted: int
    quantized: int

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Tokens [n] routed to the expert, ascending, and their routing weights [n]."""
        tokens, slots = (self.topk_ids == expert).nonzero(as_tuple=True)
        return tokens, self.topk_weights[tokens, slots]

    def quantized_tokens_of(self, expert: int) -> tuple[Tensor, Tensor, int]:
        """As `of`, without the original path; and the number of calibration tokens, which come
        first."""
        tokens, w = self.of(expert)
        fitted, quantized = (int((tokens < end).sum()) for end in (self.fitted, self.quantized))
        return tokens[:quantized], w[:quantized], fitted

    def matrix(self, num_experts: int) -> Tensor:
        """Routing weights [T, E], zero where an expert was not chosen."""
        empty = torch.zeros(len(self.x), num_experts, device=self.x.device)
        return empty.scatter_(1, self.topk_ids, self.topk_weights)

    def counts(self, num_experts: int) -> Tensor:
        """Calibration tokens of every expert, int64 [E]."""
        return torch.bincount(self.topk_ids[: self.fitted].flatten(), minlength=num_experts)

    def agreement(self) -> float | None:
        """Share of (held-out token, slot) choices that the quantized and the original path have in
        common; None without held-out tokens."""
        held_out, original = (
            self.topk_ids[self.fitted : self.quantized],
            self.topk_ids[self.quantized :],
        )
        if not len(original):
            return None
        return float((held_out[:, :, None] == original[:, None, :]).any(-1).float().mean())


class RoutingUpdater:
    """Experts operator that overwrites the first tokens of `routed` with its arguments, and returns
    zeros. scale [H]: its input has been divided by it, unlike that of `routed`."""

    def __init__(self, routed: RoutedTokens, scale: Tensor) -> None:
        self.routed, self.scale, self.count = routed, scale, 0

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        rows = slice(self.count, self.count + len(x))
        self.count = rows.stop
        self.routed.x[rows] = x * self.scale
        self.routed.topk_ids[rows], self.routed.topk_weights[rows] = topk_ids, topk_weights
        return torch.zeros_like(x)
