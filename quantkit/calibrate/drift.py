"""By how much the quantized path has left the original one, as weights can make up for it.

A linear W reads x on the quantized path where it reads o on the original one, and what it should
answer is W o. Of all weights the one that comes nearest over the calibration tokens is W + W M, M =
mean((o - x) x^T) H^-1, H the damped Hessian of x (as in GPTAQ, arXiv 2504.02692). Few tokens for
many channels find an M that holds for them alone, so held-out rows say how much of it is taken.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.statistics import HeldOutRows, own_panels, send_panels
from quantkit.quant.tensor_cores import tensor_core_products


@dataclass(frozen=True)
class Drift:
    """Of one input. inputs float32 [K, K]: the mean of (o - x) x^T over calibration tokens; sample
    [S, K]: o of the held-out rows whose x are in `InputStatistics.sample`."""

    inputs: Tensor
    sample: Tensor

    def scaled(self, scale: Tensor) -> "Drift":
        """For inputs divided by scale [K]."""
        return Drift(self.inputs / scale / scale[:, None], self.sample / scale)


class DriftSum:
    """What `Drift`s are made from, batch by batch: the quantized path is heard first, then the
    original one; a linear that is asked several times for a batch, with the sequences one by one,
    in the same order on both."""

    def __init__(self, sample_rows: int, ranks: Ranks) -> None:
        self._sample_rows, self._ranks = sample_rows, ranks
        self._heard: dict[str, deque[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._kept: dict[str, HeldOutRows] = {}

    def __contains__(self, module: str) -> bool:
        return module in self._sums

    def hear(self, module: str, x: Tensor) -> None:
        """x float32 [..., K]: what `module` reads on the quantized path, of calibration tokens."""
        self._heard.setdefault(module, deque()).append(x.reshape(-1, x.shape[-1]))

    @tensor_core_products()
    def compare(self, module: str, o: Tensor) -> None:
        """o: what it reads for the same tokens on the original one."""
        x = self._heard[module].popleft()
        if module not in self._sums:
            self._sums[module], self._tokens[module] = x.new_zeros(x.shape[1], x.shape[1]), 0
        lost = o.reshape(x.shape) - x
        for rows in own_panels(x.shape[1], self._ranks):
            self._sums[module][rows].addmm_(lost[:, rows].t(), x)
        self._tokens[module] += len(x)

    def keep(self, module: str, o: Tensor) -> None:
        """o: what it reads on the original path, of held-out tokens."""
        self._kept.setdefault(module, HeldOutRows(self._sample_rows)).keep(
            o.reshape(-1, o.shape[-1])
        )

    def means(self) -> dict[str, Drift]:
        """Nothing more is to be heard."""
        sums, self._sums = self._sums, {}
        for own in sums.values():
            send_panels(own, self._ranks)
        kept = {
            module: self._kept.get(module, HeldOutRows(0)).rows(own) for module, own in sums.items()
        }
        return {
            module: Drift(own.div_(self._tokens[module]), kept[module])
            for module, own in sums.items()
        }


def taken(lost: Tensor, change: Tensor) -> Tensor:
    """How much of a change [..., S, N] of outputs is best on held-out rows, where `lost` is what
    the outputs lack: [] or the leading dimensions, from nothing to all of it. Nothing where there
    are no rows: nobody can tell what holds for calibration tokens alone."""
    if not lost.numel():
        return torch.zeros((), device=lost.device)
    return ((lost * change).sum((-1, -2)) / change.square().sum((-1, -2)).clamp(min=1e-30)).clamp(
        0, 1
    )


def expert_drift(
    original: Tensor, hidden: Tensor, w: Tensor, layer: tuple[Tensor, Tensor], blend: int
) -> Tensor:
    """As `Drift.inputs`, [I, I], of what an expert's down projection reads. original, hidden [n,
    I]: on the original and on the quantized path, of the expert's tokens, whose routing weights are
    w [n]; layer: both [R, I] of rows of the layer, which count as in its Hessian."""
    total = ((original - hidden) * w.square()[:, None]).t() @ hidden
    o, x = layer
    share = blend / len(x) * (w.square().mean() if len(w) else torch.ones((), device=w.device))
    return total.addmm_((o - x).t() * share, x).div_(max(len(hidden) + blend, 1))
