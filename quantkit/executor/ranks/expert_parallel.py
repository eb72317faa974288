"""Expert parallelism: every rank has rows of its own and some of each layer's routed experts, and
all rows meet at all experts.

A layer's experts are shared out in whole ones, in their order. Every rank brings its rows with the
experts that they chose (an all-gather), computes of all rows what its own experts add, and gets its
rows' sums (a reduce-scatter, in float32 in the order of ranks). All passes have as many rows on
each rank; padding rows choose no expert.
"""

from collections import Counter
from collections.abc import Iterable

import quantkit_kernels as kernels
import torch
from torch import Tensor

from quantkit.common.errors import UsageError
from quantkit.executor.ranks.parallel import SINGLE, Parallel
from quantkit.models.table import Parameter
from quantkit.models.weights import ExpertsOp

_MOST_ROWS = 1 << 16
"""Of one rank's pass."""


class ExpertRanks:
    """The ranks that share routed experts, and which rows of the padded batch are real. With one
    rank, nothing is shared."""

    def __init__(self, parallel: Parallel, device: torch.device | str) -> None:
        self.parallel, self.size = parallel, parallel.size
        # At one place always: captured steps read it.
        self._padding_rows = torch.zeros(
            _MOST_ROWS if self.size > 1 else 0, 1, dtype=torch.bool, device=device
        )

    def expect(self, size: int, *rows: tuple[int, int]) -> None:
        """Of the next passes, of at most `size` rows, those in these ranges (first, one past the
        last) are real; until this is called all are."""
        nobodys = torch.ones(size, 1, dtype=torch.bool)
        for first, end in rows:
            nobodys[first:end] = False
        self._padding_rows[:size].copy_(nobodys, non_blocking=self._padding_rows.is_cuda)

    def own(self, num_experts: int) -> range:
        """This rank's experts of a layer; their number divides."""
        share = num_experts // self.size
        return range(self.parallel.rank * share, (self.parallel.rank + 1) * share)

    def bring(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, padding: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All ranks' rows: x [T, H], topk_ids [T, k], topk_weights [T, k] float32 -> [size * T,
        ...] of each. ids are int32 then, and
        `padding` in padding rows."""
        ids = topk_ids.int().masked_fill(self._padding_rows[: len(x)], padding)
        parts = (
            x,
            ids.view(x.dtype),
            topk_weights.contiguous().view(x.dtype),
        )  # one message; bits are not touched
        rows, chosen, weights = self.parallel.gather_rows(torch.cat(parts, dim=-1)).split(
            [part.shape[1] for part in parts], dim=-1
        )
        return (
            rows.contiguous(),
            chosen.contiguous().view(torch.int32),
            weights.contiguous().view(torch.float32),
        )


class ExpertShare:
    """One rank's experts of a layer as the whole layer. experts: those with the numbers `own` of
    num_experts."""

    def __init__(
        self, experts: ExpertsOp, own: range, num_experts: int, ranks: ExpertRanks
    ) -> None:
        assert isinstance(experts, kernels.Experts), type(experts)
        experts.routed_share = len(own) / num_experts
        self.experts, self._ranks, self._nobody = experts, ranks, num_experts
        self._own = torch.full(
            (num_experts + 1,), kernels.NO_EXPERT, dtype=torch.int32, device=experts.device
        )
        self._own[own.start : own.stop] = torch.arange(
            len(own), dtype=torch.int32, device=experts.device
        )

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """As `models.weights.ExpertsOp`."""
        rows, chosen, weights = self._ranks.bring(x, topk_ids, topk_weights, self._nobody)
        local = self._own.index_select(0, chosen.flatten()).view(chosen.shape)
        if not self.experts.takes_none:  # then they ask for any expert, with weight 0
            local, weights = (
                local.clamp_min(0),
                weights.masked_fill(local == kernels.NO_EXPERT, 0.0),
            )
        return self._ranks.parallel.scatter_sum(self.experts(rows, local, weights))


def check_experts(rows: Iterable[Parameter], size: int) -> None:
    """Raises UsageError where `size` ranks have no routed experts to share, or cannot share them
    evenly. rows: the model's table."""
    if size == 1:
        return
    counts = Counter(
        row.layer for row in rows if row.expert is not None and row.projection == "down"
    )
    if not counts:
        raise UsageError(
            f"the model has no routed experts, which --dp {size} shares out over ranks", "use --tp"
        )
    for layer, experts in counts.items():
        if experts % size:
            raise UsageError(
                f"layer {layer} has {experts} routed experts, which {size} ranks cannot share "
                "evenly",
                "use another --dp",
            )


NO_RANKS = ExpertRanks(SINGLE, "cpu")
"""Experts that are not shared out."""
