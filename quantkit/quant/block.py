"""A block of GPTQ's columns: what those who round one are given, on a GPU and on a CPU."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quantkit.grids.rounding import Rounder
from quantkit.quant.column_steps import ColumnSteps


@dataclass(frozen=True)
class BlockParts:
    """Rows of a block's C columns in tensors [..., K, N] of all columns: each float32 [..., C, N],
    a column being one run of memory.

    values: written, the columns as they were rounded. before: read, what they are held against; may
    be where `values` is. apart: written, before - values. seen: written if given, the rounding
    errors times pivot [..., C, 1], which is given with it.
    """

    values: Tensor
    before: Tensor
    apart: Tensor
    seen: Tensor | None = None
    pivot: Tensor | None = None

    def __post_init__(self) -> None:
        assert (self.seen is None) == (self.pivot is None), "seen is errors times pivot"


class RoundBlock(Protocol):
    """Rounds the C columns of target float32 [..., C, N], which is used up, one after the other
    into `parts`: those not yet rounded make up for the errors of those before. reaction float32
    [..., C, C]: by how much column i changes for an error of 1 in column j."""

    def __call__(
        self,
        target: Tensor,
        reaction: Tensor,
        rounder: Rounder,
        steps: ColumnSteps,
        parts: BlockParts,
    ) -> None: ...
