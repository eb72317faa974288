"""Sums over the inputs of linears, token by token: Hessians, largest magnitudes, sampled rows, and
the drift of the quantized path from the original one.

A linear W reads x on the quantized path where it reads o on the original one, and its target output
is W o. The weight closest to it over the calibration tokens is W + W M, M = mean((o - x) x^T) H^-1,
H the damped Hessian of x (as in GPTAQ, arXiv 2504.02692). If the output is added to the residual
stream, which lacks r there after the sublayers before, the target is W o + r, and the weight
changes by mean(r x^T) H^-1 as well. With few tokens for many channels such changes overfit, so
held-out rows decide which fraction of each is applied.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibrate.hidden_states import BATCH_TOKENS
from quantkit.calibrate.ranks import Ranks
from quantkit.quant.tensor_cores import (
    add_gram_,
    add_sample_product_,
    mirror_,
    sample_linear,
    sample_products,
)

PANEL = 1024
"""Rows of a Hessian summed together. A Hessian is symmetric, so columns to the right of a panel's
last row, or of the diagonal, are not computed. Ranks divide the panels, and each sums its own over
all tokens, so the sums equal those of one process."""


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of one input of K channels.

    mean_hessian: mean of x x^T per token, float32 [K, K], so that losses of inputs with different
    token counts are comparable. absmax: largest magnitudes, float32 [K]. sample: held-out rows for
    evaluation, float32 [S, K]. rows: some calibration rows, on which scales for quantized
    activations are evaluated, float32 [R, K]. All but absmax of rows times `row_weights` if the
    input is that of a linear that writes to the residual stream.
    """

    mean_hessian: Tensor
    absmax: Tensor
    sample: Tensor
    rows: Tensor


def token_weights(stream: Tensor) -> Tensor:
    """Weight of an error added to rows of the residual stream [T, H], float32 [T, 1], mean square
    1: the norm that reads a row divides by its size. A few tokens, often the first ones, have a
    stream hundreds of times as large as the others."""
    squares = [part.square().mean(-1, keepdim=True) for part in stream.split(BATCH_TOKENS)]
    counts = torch.cat(squares).clamp(min=1e-30).rsqrt()
    return counts / counts.square().mean().sqrt()


LARGEST_SHARE = 100
"""Most that a token counts in a Hessian, relative to the median: where a massive activation enters
or leaves the residual stream, its token's input is hundreds of times as large as the others, and
their errors would not count at all."""


def row_weights(x: Tensor, after: Tensor) -> Tensor:
    """Weights [T, 1] of inputs x float32 [T, K] of a linear that writes to the residual stream,
    which is `after` [T, H] the sublayer: `token_weights`, limited by LARGEST_SHARE."""
    w = token_weights(after)
    energy = (x * w).square().sum(-1, keepdim=True)
    middle = energy.median()
    limit = torch.where(middle > 0, LARGEST_SHARE * middle, torch.inf)
    return w * (limit / energy.clamp(min=1e-30)).clamp(max=1).sqrt()


def panels(channels: int) -> Iterator[slice]:
    """Row slices of a square of so many rows."""
    return (slice(start, start + PANEL) for start in range(0, channels, PANEL))


def own_panels(channels: int, ranks: Ranks) -> Iterator[slice]:
    """The panels that this rank sums."""
    return (rows for number, rows in enumerate(panels(channels)) if ranks.owns(number))


def send_panels(square: Tensor, ranks: Ranks) -> None:
    """Exchange panels: every rank gets those that the others summed."""
    for number, rows in enumerate(panels(len(square))):
        ranks.broadcast(square[rows], ranks.owner(number))


class RowSample:
    """Evenly spaced rows of what is added, until there are `count`."""

    def __init__(self, count: int) -> None:
        self._count, self._kept = count, list[Tensor]()

    def add(self, x: Tensor) -> None:
        """x float32 [T, K]."""
        room = self._count - sum(len(part) for part in self._kept)
        if room > 0:
            self._kept.append(x[:: max(1, x.shape[0] // self._count)][:room].clone())

    def rows(self, like: Tensor) -> Tensor:
        """[S, K]; like: gives the last dimension and device when there are none."""
        return torch.cat(self._kept) if self._kept else like.new_empty(0, like.shape[-1])


class StatisticsAccumulator:
    """Accumulates `InputStatistics` batch by batch. A Hessian of R1's widest input is 1.4 GB, so
    there is only one: `mean` converts the sum in place."""

    def __init__(
        self, channels: int, device: torch.device, sample_rows: int, ranks: Ranks, every: int = 0
    ) -> None:
        """every: one calibration row in so many is kept; 0 for none."""
        self._hessian = torch.zeros(
            channels, channels, dtype=torch.float32, device=device
        )  # its panels up to the diagonal
        self._absmax = torch.zeros(channels, dtype=torch.float32, device=device)
        self._tokens = 0
        self._sample, self._ranks, self._every = RowSample(sample_rows), ranks, every
        self._rows = [self._hessian.new_empty(0, channels)]

    def add(self, x: Tensor, w: Tensor | None = None) -> None:
        """x float32 [T, K] of calibration tokens; w [T, 1]: weights of the tokens."""
        self._absmax = torch.maximum(self._absmax, x.abs().amax(0))
        x = x if w is None else x * w
        add_gram_(self._hessian, x, own_panels(x.shape[1], self._ranks))
        self._tokens += x.shape[0]
        if self._every:
            self._rows.append(x[:: self._every].clone())

    def add_held_out(self, x: Tensor) -> None:
        """x float32 [T, K] of held-out tokens."""
        self._sample.add(x)

    def mean(self) -> InputStatistics:
        """The statistics. They take this sum's memory: it cannot be used afterwards."""
        hessian = self._hessian.div_(max(self._tokens, 1))
        send_panels(hessian, self._ranks)
        return InputStatistics(
            mirror_(hessian), self._absmax, self._sample.rows(hessian), torch.cat(self._rows)
        )


class Observer:
    """Accumulates statistics of every input passed to it, by module. `held_out` selects what the
    next inputs are used for. Every rank gets the same inputs. every: as in
    `StatisticsAccumulator`."""

    def __init__(self, sample_rows: int, ranks: Ranks, every: int = 0) -> None:
        self._sample_rows, self._ranks, self._every = sample_rows, ranks, every
        self._sums: dict[str, StatisticsAccumulator] = {}
        self.held_out = False

    def __contains__(self, module: str) -> bool:
        return module in self._sums

    def __call__(self, module: str, x: Tensor, w: Tensor | None = None) -> None:
        """x float32 [..., K]: input of `module`; w [T, 1]: weights of its rows."""
        x = x.reshape(-1, x.shape[-1])
        if module not in self._sums:
            self._sums[module] = StatisticsAccumulator(
                x.shape[-1], x.device, self._sample_rows, self._ranks, self._every
            )
        if self.held_out:
            self._sums[module].add_held_out(x if w is None else x * w)
        else:
            self._sums[module].add(x, w)

    def finish(self) -> dict[str, InputStatistics]:
        """The statistics of every input; the observer is empty afterwards."""
        sums, self._sums = self._sums, {}
        return {module: one.mean() for module, one in sums.items()}


@dataclass(frozen=True)
class Drift:
    """Drift of one input. inputs float32 [K, K]: mean of (o - x) x^T over calibration tokens, of a
    wide input [N, K]: mean of W (o - x) x^T; sample [S, K]: o of the held-out rows whose x are in
    `InputStatistics.sample`. stream [H, K], stream_sample [S, H]: mean of r x^T, and r of these
    rows, r being what the residual stream lacks that the outputs are added to; None if they are not
    added to one."""

    inputs: Tensor
    sample: Tensor
    stream: Tensor | None = None
    stream_sample: Tensor | None = None
    wide: bool = False

    def scaled(self, scale: Tensor) -> "Drift":
        """The drift of an input that is not wide, divided by scale [K]."""
        assert not self.wide, "a wide input is observed after its scale is folded"
        stream = None if self.stream is None else self.stream / scale
        inputs, sample = self.inputs / scale / scale[:, None], self.sample / scale
        return Drift(inputs, sample, stream, self.stream_sample)


WIDE = 2**30
"""Bytes of a square of an input from which on it is wide: with the curvature, two of Kimi-K3's
dense layer would be 9.1 GB. What its drift does to the outputs of its only reader is no larger than
that reader's weight."""


def is_wide_input(w: Tensor, readers: Sequence[str]) -> bool:
    """Whether the input of a linear w [N, K], one of its `readers`, is wide."""
    rows, columns = w.shape
    return len(readers) == 1 and rows < columns and 4 * columns**2 >= WIDE


NO_READERS: Mapping[str, Tensor] = {}


class DriftAccumulator:
    """Accumulates `Drift`s batch by batch: the quantized path first, then the original one. A
    linear called several times for a batch (sequence by sequence) is called in the same order on
    both. wide: the readers [N, K] of wide inputs, by module."""

    def __init__(
        self, sample_rows: int, ranks: Ranks, wide: Mapping[str, Tensor] = NO_READERS
    ) -> None:
        self._sample_rows, self._ranks, self._wide = sample_rows, ranks, wide
        self._heard: dict[str, deque[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._streams: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._kept: dict[str, RowSample] = {}
        self._kept_streams: dict[str, RowSample] = {}

    def __contains__(self, module: str) -> bool:
        return module in self._sums

    def add_quantized(self, module: str, x: Tensor) -> None:
        """x float32 [..., K]: input of `module` on the quantized path, calibration tokens."""
        self._heard.setdefault(module, deque()).append(x.reshape(-1, x.shape[-1]))

    @sample_products()
    def add_original(self, module: str, o: Tensor, lost: Tensor | None = None) -> None:
        """o: its input for the same tokens on the original path. lost [T, H]: what the residual
        stream lacks there, if the module's output is added to it."""
        x = self._heard[module].popleft()
        drift = o.reshape(x.shape) - x
        if module in self._wide:
            drift = sample_linear(drift, self._wide[module])
        self._add(self._sums, module, drift, x)
        if lost is not None:
            self._add(self._streams, module, lost, x)
        self._tokens[module] = self._tokens.get(module, 0) + len(x)

    def _add(self, sums: dict[str, Tensor], module: str, lost: Tensor, x: Tensor) -> None:
        if module not in sums:
            sums[module] = x.new_zeros(lost.shape[1], x.shape[1])
        for rows in own_panels(lost.shape[1], self._ranks):
            add_sample_product_(sums[module][rows], lost[:, rows], x)

    def add_held_out(self, module: str, o: Tensor, lost: Tensor | None = None) -> None:
        """o: its input on the original path, held-out tokens; lost: as in `add_original`."""
        for kept, rows in ((self._kept, o), (self._kept_streams, lost)):
            if rows is not None:
                sample = kept.setdefault(module, RowSample(self._sample_rows))
                sample.add(rows.reshape(-1, rows.shape[-1]))

    def finish(self) -> dict[str, Drift]:
        """The drifts; the accumulator is empty afterwards."""
        sums, self._sums = self._sums, {}
        streams, self._streams = self._streams, {}
        for own in (*sums.values(), *streams.values()):
            send_panels(own, self._ranks)
        found = {}
        for module, own in sums.items():
            tokens, stream = self._tokens[module], streams.get(module)
            sample = self._kept.get(module, RowSample(0)).rows(own)
            lost = None
            if stream is not None:
                stream.div_(tokens)
                lost = self._kept_streams.get(module, RowSample(0)).rows(stream.t())
            found[module] = Drift(own.div_(tokens), sample, stream, lost, module in self._wide)
        return found


def best_fraction(lost: Tensor, change: Tensor) -> Tensor:
    """Fraction in [0, 1] of a change [..., S, N] of outputs that fits best on held-out rows, where
    `lost` is what the outputs lack: [] or the leading dimensions. 0 without rows, as overfitting
    could not be detected."""
    if not lost.numel():
        return torch.zeros((), device=lost.device)
    return ((lost * change).sum((-1, -2)) / change.square().sum((-1, -2)).clamp(min=1e-30)).clamp(
        0, 1
    )


def expert_drift(
    original: Tensor, hidden: Tensor, w: Tensor, layer: tuple[Tensor, Tensor], blend: int
) -> Tensor:
    """As `Drift.inputs`, [I, I], for the input of an expert's down projection. original, hidden [n,
    I]: on the original and the quantized path, for the expert's tokens, with routing weights w [n];
    layer: both for R rows of the layer, [R, I], weighted as in its Hessian."""
    total = sample_linear(((original - hidden) * w.square()[:, None]).t(), hidden.t())
    o, x = layer
    share = blend / len(x) * (w.square().mean() if len(w) else torch.ones((), device=w.device))
    return total.addmm_((o - x).t() * share, x).div_(max(len(hidden) + blend, 1))
