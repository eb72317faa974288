"""Rounding that is learned (SignRound, arXiv 2309.05516): where a weight lies between two values of the grid moves against the sign of the
gradient of a loss, a fixed way at a time, while the values that are computed with stay on the grid.

It begins with codes that another method found: a weight begins where it is, or as near to that as its code allows. Steps and zero points
stay as they are. All ways together are `REACH` of the distance between two values, so a code changes by one at most.

Shapes: w [N, K], one linear.
"""

import torch
from torch import Tensor

from quantkit.quant.rounding import RoundingStep, rounder_of, with_values
from quantkit.quant.weights import RoundedWeight, dequantize

REACH = 0.5
"""How far a weight can move in all, in distances between two values of the grid where it begins."""
_INSIDE = 0.49
"""How far from its code's value a weight may begin, in the same distances: half would be another code's."""


class LearnedRounding:
    """One linear on its way. w float32 [N, K]: what is to be rounded; weight: as it was rounded before."""

    def __init__(self, w: Tensor, weight: RoundedWeight) -> None:
        self.weight = weight
        self.rounder, step = rounder_of(weight)
        self.step = RoundingStep(step.step.unsqueeze(-1), None if step.zero is None else step.zero.unsqueeze(-1))  # [N, G, 1]
        values = self._grouped(dequantize(weight))
        self.distance = self.rounder.spacing(values, self.step)
        room = _INSIDE * self.distance
        self.place = values + (self._grouped(w) - values).clamp(-room, room)

    def values(self) -> Tensor:
        """What the weight would decode to now, [N, K]."""
        return self.rounder.snap(self.place, self.step).flatten(1)

    def move(self, gradient: Tensor, way: float) -> None:
        """Against the sign of the loss's gradient by the values, [N, K]. way: in distances between two values."""
        self.place.addcmul_(self._grouped(gradient.sign()), self.distance, value=-way)

    def rounded(self) -> RoundedWeight:
        """The weight with the codes of now."""
        return with_values(self.weight, self.values())

    def _grouped(self, t: Tensor) -> Tensor:
        """[N, K] -> [N, G, g]."""
        return t.unflatten(-1, (self.step.step.shape[-2], -1))


def ways(iterations: int) -> Tensor:
    """How far each of the iterations moves: falling in a straight line to nothing, `REACH` together."""
    falling = torch.arange(iterations, 0, -1, dtype=torch.float64)
    return REACH * falling / falling.sum()
