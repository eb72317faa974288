"""Rounding that is learned (SignRound, arXiv 2309.05516): where a weight lies between two values of the grid moves against the sign of the
gradient of a loss, a fixed way at a time, while the values that are computed with stay on the grid.

It begins with steps, zero points and codes that another method found. Steps and zero points stay as they are. A weight begins where it is,
or, where the codes are to be begun with, as near to that as its code allows. All ways together are some part of the distance between two
values.

Shapes: w [N, K], one linear.
"""

import torch
from torch import Tensor

from quantkit.quant.rounding import RoundingStep, rounder_of, with_values
from quantkit.quant.weights import RoundedWeight, dequantize

_INSIDE = 0.49
"""How far from its code's value a weight may begin, in the same distances: half would be another code's."""


class LearnedRounding:
    """One linear on its way. w float32 [N, K]: what is to be rounded; weight: as it was rounded before; from_codes: see above."""

    def __init__(self, w: Tensor, weight: RoundedWeight, *, from_codes: bool) -> None:
        self.weight = weight
        self.rounder, step = rounder_of(weight)
        self.step = RoundingStep(step.step.unsqueeze(-1), None if step.zero is None else step.zero.unsqueeze(-1))  # [N, G, 1]
        values = self._grouped(dequantize(weight))
        self.distance = self.rounder.spacing(values, self.step)
        self.place = self._grouped(w).clone()
        if from_codes:
            room = _INSIDE * self.distance
            self.place = values + self.place.sub_(values).clamp_(-room, room)

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


def ways(iterations: int, reach: float) -> Tensor:
    """How far each of the iterations moves: falling in a straight line to nothing, `reach` together."""
    falling = torch.arange(iterations, 0, -1, dtype=torch.float64)
    return reach * falling / falling.sum()
