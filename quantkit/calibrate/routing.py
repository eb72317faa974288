"""Routing of tokens to one layer's experts: recorded while the layer runs without them, and looked up
expert by expert."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
