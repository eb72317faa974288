"""Which rows of what makes values the columns of o_proj read, where they are not one by one."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueHeads:
    """How the rows of what makes values lie over the columns of o: `heads` heads of `width` values,
    each read by `readers` query heads in a row; of each head's rows in the producer, `before` come
    first that make something else."""

    heads: int
    readers: int
    width: int
    before: int = 0

    @property
    def columns(self) -> int:
        """Of o."""
        return self.heads * self.readers * self.width

    def alike(self, scale: Tensor) -> Tensor:
        """Scales [..., K] of o's columns -> the nearest (geometric means) that are the same for all
        that read one value, of mean 1."""
        logs = scale.log().unflatten(-1, (self.heads, self.readers, self.width))
        logs = (logs - logs.mean((-3, -2, -1), keepdim=True)).mean(-2, keepdim=True)
        return logs.exp().expand(*logs.shape[:-2], self.readers, self.width).flatten(-3)

    def of_rows(self, scale: Tensor) -> Tensor:
        """By what the producer's rows [N] are divided, for such a scale [K]."""
        values = scale.view(self.heads, self.readers, self.width)[:, 0]
        return torch.cat([values.new_ones(self.heads, self.before), values], dim=1).flatten()
