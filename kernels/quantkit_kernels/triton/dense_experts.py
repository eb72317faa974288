"""Routed experts with 16-bit weights: pairs sorted by expert, silu(gate) * up, down with the
routing weights, and the sum over each token's experts. Four launches, none of which depends on the
routing's values, so a step can be captured.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.experts import Experts, StackedLayout
from quantkit_kernels.pairs import Slots
from quantkit_kernels.triton import rows
from quantkit_kernels.triton.cards import architecture, overlapped, shared_bytes
from quantkit_kernels.triton.experts import KEPT_BYTES, in_parts
from quantkit_kernels.triton.sorted_pairs import sort_pairs


class DensePlan(NamedTuple):
    """most: pairs an expert up to which this one is taken. pairs: of a tile. rows, features: of a
    tile of gate and up, and of a step along
    K. down: rows of one of its tiles. stages: steps of weights under way at once, where the card's
    shared memory holds them. rounded: whether a pair's result is rounded before it is added to
    those of its token, as is written and read then in half of the time."""

    most: float
    pairs: int
    rows: int
    down: int
    features: int
    warps: int
    stages: int
    rounded: bool = False


PLANS = (
    DensePlan(8, 16, 64, 64, 128, 4, 5),
    DensePlan(24, 32, 64, 128, 128, 4, 4),
    DensePlan(64, 64, 128, 256, 64, 8, 4),
    DensePlan(math.inf, 128, 128, 256, 64, 8, 4, rounded=True),
)
"""The fastest on an H200 of up to 59, with 128 experts of 2048 x 768, 256 of 7168 x 512, 8 of 4096
x 14336 and 32 of 2880 x 1440; the last two of 14 with 1024 to 8192 tokens of the first of these."""


_WIDE = ("sm_90",)
"""Cards whose matrix instructions read both operands from shared memory: with registers for them,
256 rows of down do not fit elsewhere."""


class DenseExperts(Experts):
    """gate_up [E, 2I, H] and down [E, H, I] in the compute dtype."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        num_experts, hidden, intermediate = down.shape
        super().__init__(num_experts, hidden, intermediate, down.dtype, down.device, "triton")
        self.gate_up, self.down = gate_up, down

    def held(self) -> list[Tensor]:
        return [self.gate_up, self.down]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        each = topk_ids.numel() / self.num_experts
        plan = next(plan for plan in PLANS if each <= plan.most)
        compute = partial(self.by_plan, plan=plan)
        return in_parts(compute, x, topk_ids, topk_weights, self, KEPT_BYTES)

    def by_plan(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, plan: DensePlan) -> Tensor:
        pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
        slots = sort_pairs(topk_ids, self.num_experts, plan.pairs)
        between = torch.empty(pairs, self.intermediate, dtype=self.dtype, device=x.device)
        self._multiply(x, self.gate_up, between, slots, plan, top_k=top_k)
        weighed = torch.empty(
            pairs, self.hidden, dtype=self.dtype if plan.rounded else torch.float32, device=x.device
        )
        self._multiply(between, self.down, weighed, slots, plan, pair_weights=topk_weights)
        y = torch.empty_like(x)
        rows.sum_pairs(weighed, y)
        return y

    def _multiply(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        slots: Slots,
        plan: DensePlan,
        top_k: int = 1,
        pair_weights: Tensor | None = None,
    ) -> None:
        from quantkit_kernels.triton.dense_experts_kernel import multiply_pairs as kernel

        gated = pair_weights is None
        name = architecture(x.device)
        down = plan.down if name in _WIDE else min(plan.down, 128)
        n, k, tile = out.shape[1], weight.shape[2], plan.rows if gated else down
        step = 2 * plan.features * (2 * plan.rows + plan.pairs if gated else down + plan.pairs)
        kernel[(-(-n // tile), len(slots.tile_expert))](
            x, weight, out, slots.order, slots.tile_expert, slots.tile_count,
            out if pair_weights is None else pair_weights, n, k, top_k,
            GATED=gated, BN=tile, BM=plan.pairs, BK=plan.features, EVEN_K=k % plan.features == 0,
            STAGES=min(plan.stages, shared_bytes(name) // step),
            num_warps=plan.warps, **overlapped(x.device),
        )  # fmt: skip


class DenseExpertsLayout(StackedLayout):
    def finish(self) -> DenseExperts:
        return DenseExperts(self._gate_up, self._down)
