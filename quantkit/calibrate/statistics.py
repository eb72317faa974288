"""Statistics of the input of a linear, over calibration tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibrate.ranks import Ranks
from quantkit.quant.tensor_cores import tensor_core_products

PANEL = 1024
"""Rows of a square that are summed together. A Hessian is symmetric, and what lies right of a
panel's last row is not computed. Ranks share the panels out, and each sums its own over all tokens,
so the sums are those of one process."""


@dataclass(frozen=True)
class InputStatistics:
    """Of one input of K channels.

    mean_hessian: mean of x x^T per token, so that losses of inputs with different counts compare,
    float32 [K, K]. absmax: the largest
    magnitudes, float32 [K]. sample: held-out rows for judging, float32 [S, K]. rows: some of the
    calibration tokens', on which scales of rounded activations are judged, float32 [R, K], each
    times what an error of its token counts.
    """

    mean_hessian: Tensor
    absmax: Tensor
    sample: Tensor
    rows: Tensor


def token_counts(stream: Tensor) -> Tensor:
    """What an error counts that is added to rows of the residual stream [T, H], float32 [T, 1],
    mean square 1: the norm that reads a row divides by its size. A few tokens have a stream
    hundreds of times as large as the others, and the largest steps of int8 with it."""
    counts = stream.square().mean(-1, keepdim=True).clamp(min=1e-30).rsqrt()
    return counts / counts.square().mean().sqrt()


def panels(channels: int) -> Iterator[slice]:
    """Of a square of so many rows."""
    return (slice(start, start + PANEL) for start in range(0, channels, PANEL))


def own_panels(channels: int, ranks: Ranks) -> Iterator[slice]:
    """Those that this rank sums."""
    return (rows for number, rows in enumerate(panels(channels)) if ranks.mine(number))


def send_panels(square: Tensor, ranks: Ranks) -> None:
    """Every rank gets, in the place of its own, the panels that others summed."""
    for number, rows in enumerate(panels(len(square))):
        ranks.send(square[rows], ranks.of(number))


class HeldOutRows:
    """Evenly spaced rows of what is shown, until there are `count`."""

    def __init__(self, count: int) -> None:
        self._count, self._kept = count, list[Tensor]()

    def keep(self, x: Tensor) -> None:
        """x float32 [T, K]."""
        room = self._count - sum(len(part) for part in self._kept)
        if room > 0:
            self._kept.append(x[:: max(1, x.shape[0] // self._count)][:room].clone())

    def rows(self, like: Tensor) -> Tensor:
        """[S, K]; like: where there are none, its last dimension and device count."""
        return torch.cat(self._kept) if self._kept else like.new_empty(0, like.shape[-1])


class StatisticsSum:
    """What `InputStatistics` are made from, batch by batch.

    A Hessian of R1's widest input is 1.4 GB, so there is one: `mean` turns the sum into it.
    """

    def __init__(
        self, channels: int, device: torch.device, sample_rows: int, ranks: Ranks, every: int = 0
    ) -> None:
        """every: how many calibration rows there are for one that is kept; 0 where none is."""
        self._hessian = torch.zeros(
            channels, channels, dtype=torch.float32, device=device
        )  # its panels up to the diagonal
        self._absmax = torch.zeros(channels, dtype=torch.float32, device=device)
        self._tokens = 0
        self._sample, self._ranks, self._every = HeldOutRows(sample_rows), ranks, every
        self._rows = [self._hessian.new_empty(0, channels)]

    @tensor_core_products()
    def add(self, x: Tensor) -> None:
        """x float32 [T, K] of calibration tokens."""
        for rows in own_panels(x.shape[1], self._ranks):
            self._hessian[rows, : rows.stop].addmm_(x[:, rows].t(), x[:, : rows.stop])
        self._absmax = torch.maximum(self._absmax, x.abs().amax(0))
        self._tokens += x.shape[0]
        if self._every:
            self._rows.append(x[:: self._every].clone())

    def keep(self, x: Tensor) -> None:
        """x float32 [T, K] of held-out tokens."""
        self._sample.keep(x)

    def mean(self) -> InputStatistics:
        """The statistics; this sum ends here, for they take its memory."""
        hessian = self._hessian.div_(max(self._tokens, 1))
        send_panels(hessian, self._ranks)
        for rows in panels(len(hessian)):
            hessian[rows, rows.stop :] = hessian[rows.stop :, rows].t()
        return InputStatistics(
            hessian, self._absmax, self._sample.rows(hessian), torch.cat(self._rows)
        )


class Observer:
    """Sums up every input that it is shown, by module. `held_out` switches what an observation is
    for. Every rank is shown the same.
    every: as of `StatisticsSum`."""

    def __init__(self, sample_rows: int, ranks: Ranks, every: int = 0) -> None:
        self._sample_rows, self._ranks, self._every = sample_rows, ranks, every
        self._sums: dict[str, StatisticsSum] = {}
        self.held_out = False

    def __contains__(self, module: str) -> bool:
        return module in self._sums

    def __call__(self, module: str, x: Tensor) -> None:
        """x float32 [..., K]: what `module` reads."""
        x = x.reshape(-1, x.shape[-1])
        if module not in self._sums:
            self._sums[module] = StatisticsSum(
                x.shape[-1], x.device, self._sample_rows, self._ranks, self._every
            )
        if self.held_out:
            self._sums[module].keep(x)
        else:
            self._sums[module].add(x)

    def means(self) -> dict[str, InputStatistics]:
        """The statistics of every input; nothing more is to be shown."""
        sums, self._sums = self._sums, {}
        return {module: one.mean() for module, one in sums.items()}
