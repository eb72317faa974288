"""Sums over calibration tokens at the input of a linear."""

import torch
from torch import Tensor

PANEL = 1024
"""Rows of a Hessian that are summed together: it is symmetric, and what lies right of a panel's last row is not computed."""


class InputStatistics:
    """Hessian and sizes of one input of K channels, and a few of its rows.

    hessian: sum of x x^T float32 [K, K], its panels up to the diagonal; tokens: how many; absmax float32 [K]; sample: rows kept for
    judging, [S, K].
    A Hessian of R1's widest input is 1.4 GB, so there is one: once the mean is asked for, the sum is no more.
    """

    def __init__(self, channels: int, device: torch.device, sample_rows: int) -> None:
        self.hessian = torch.zeros(channels, channels, dtype=torch.float32, device=device)
        self.absmax = torch.zeros(channels, dtype=torch.float32, device=device)
        self.tokens = 0
        self.sample_rows = sample_rows
        self._sample: list[Tensor] = []
        self._averaged = False

    def add(self, x: Tensor) -> None:
        """x float32 [T, K] of calibration tokens."""
        assert not self._averaged, "the mean was taken"
        for start in range(0, x.shape[1], PANEL):
            rows = slice(start, start + PANEL)
            self.hessian[rows, : rows.stop].addmm_(x[:, rows].t(), x[:, : rows.stop])
        self.absmax = torch.maximum(self.absmax, x.abs().amax(0))
        self.tokens += x.shape[0]

    def keep(self, x: Tensor) -> None:
        """x float32 [T, K] of held-out tokens: evenly spaced rows are kept until there are enough."""
        room = self.sample_rows - sum(len(part) for part in self._sample)
        if room > 0:
            self._sample.append(x[:: max(1, x.shape[0] // self.sample_rows)][:room].clone())

    @property
    def sample(self) -> Tensor:
        return torch.cat(self._sample)

    @property
    def mean_hessian(self) -> Tensor:
        """Per token, so that losses of inputs with different counts compare."""
        if not self._averaged:
            self.hessian /= max(self.tokens, 1)
            for start in range(0, len(self.hessian), PANEL):
                stop = start + PANEL
                self.hessian[start:stop, stop:] = self.hessian[stop:, start:stop].t()
            self._averaged = True
        return self.hessian

    def release(self) -> None:
        """The Hessian is not asked for again."""
        self.hessian = self.hessian.new_empty(0)


class Observations:
    """The statistics of every input that was observed, by module. `held_out` switches what an observation is for."""

    def __init__(self, sample_rows: int) -> None:
        self.sample_rows = sample_rows
        self.by_module: dict[str, InputStatistics] = {}
        self.held_out = False

    def __call__(self, module: str, x: Tensor) -> None:
        """An `Observer`."""
        x = x.reshape(-1, x.shape[-1])
        if module not in self.by_module:
            self.by_module[module] = InputStatistics(x.shape[-1], x.device, self.sample_rows)
        statistics = self.by_module[module]
        if self.held_out:
            statistics.keep(x)
        else:
            statistics.add(x)
