"""What the routed experts of a layer are asked: which tokens chose which expert, and with what
weight."""

from dataclasses import dataclass

import torch
from torch import Tensor


def no_experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """An experts operator that adds nothing."""
    return torch.zeros_like(x)


class Recorder:
    """An experts operator that writes down what it is asked, for up to `capacity` tokens, and
    answers zeros."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.asked = 0
        self._kept: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        if not self._kept:
            self._kept = tuple(
                torch.empty(self.capacity, *t.shape[1:], dtype=t.dtype, device=t.device)
                for t in (x, topk_ids, topk_weights)
            )
        for kept, new in zip(self._kept, (x, topk_ids, topk_weights)):
            kept[self.asked : self.asked + len(x)] = new
        self.asked += len(x)
        return torch.zeros_like(x)

    def routed(self, fitted: int, quantized: int) -> "Routed | None":
        """What was asked, with `fitted` and `quantized` as in `Routed`; None where nothing was."""
        if not self.asked:
            return None
        x, topk_ids, topk_weights = (kept[: self.asked] for kept in self._kept)
        return Routed(x, topk_ids, topk_weights, fitted, quantized)


@dataclass(frozen=True)
class Routed:
    """What one layer's experts were asked, all tokens in one order: fitted on, held out, held out
    on the original path.

    x float32 [T, H]; topk_ids [T, k]; topk_weights float32 [T, k]; fitted and quantized: the first
    tokens that are calibration, and that run through quantized experts; the rest runs through the
    original ones.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    fitted: int
    quantized: int

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Tokens [n] that chose the expert, rising, and their routing weights [n]."""
        tokens, slots = (self.topk_ids == expert).nonzero(as_tuple=True)
        return tokens, self.topk_weights[tokens, slots]

    def quantized_of(self, expert: int) -> tuple[Tensor, Tensor, int]:
        """As `of`, without the original path; and how many of the tokens are calibration, which
        come first."""
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
        common; None without held-out ones."""
        held_out, original = (
            self.topk_ids[self.fitted : self.quantized],
            self.topk_ids[self.quantized :],
        )
        if not len(original):
            return None
        return float((held_out[:, :, None] == original[:, None, :]).any(-1).float().mean())


class AskedAgain:
    """An experts operator that writes what it is asked over the first tokens of `routed`, and
    answers zeros. scale [H]: what it reads is divided by it, unlike `routed`."""

    def __init__(self, routed: Routed, scale: Tensor) -> None:
        self.routed, self.scale, self.asked = routed, scale, 0

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        rows = slice(self.asked, self.asked + len(x))
        self.asked = rows.stop
        self.routed.x[rows] = x * self.scale
        self.routed.topk_ids[rows], self.routed.topk_weights[rows] = topk_ids, topk_weights
        return torch.zeros_like(x)
