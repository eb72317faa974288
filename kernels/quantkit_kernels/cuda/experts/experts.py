"""Routed experts: which kernels compute them, by the number of token-expert pairs and the grid.

Few tokens in 4 bits: fused.py. Many tokens: sorted.py. Others: three launches, gate_up with SiLU,
down with the routing weights, and the sum over each token's experts; int8 adds two launches that
quantize the activations. No launch depends on the routing's values, so a step can be captured in a
graph.
"""

import torch
from torch import Tensor

from quantkit_kernels.cuda.abi import GemmParams
from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.experts.fused import fused_experts, max_pairs
from quantkit_kernels.cuda.experts.sorted import SORTED_PAIRS, sorted_experts
from quantkit_kernels.cuda.experts.sum_pairs import add_up, sum_pairs
from quantkit_kernels.cuda.launch import SILU_MUL, WEIGH
from quantkit_kernels.cuda.layout import PackedStrips, group_of, interleaved, pack, pointers
from quantkit_kernels.cuda.linears.few_tokens import (
    quantize_rows,
    tokens_in_registers,
    tokens_in_shared,
)
from quantkit_kernels.cuda.plans import (
    SORTED_PER_EXPERT,
    ExpertsPlans,
    TokensInRegistersPlan,
    TokensInSharedPlan,
    experts_plans,
    experts_token_tiles,
    sorted_plan,
)
from quantkit_kernels.experts import Experts, ExpertsLayout
from quantkit_kernels.gating import Gating
from quantkit_kernels.pairs import UnsummedPairs
from quantkit_kernels.weights import Weight, kind, shape, to_device

MAX_PAIRS = 4096
"""Pairs that a block searches for those of its expert. More are computed in several parts."""


class CudaExperts(Experts):
    takes_none = True

    def __init__(
        self,
        gate_up: PackedStrips,
        down: PackedStrips,
        sizes: tuple[int, int, int],
        kind: str,
        group: int,
        dtype: torch.dtype,
        device: torch.device,
        limit: float = 0.0,
    ) -> None:
        super().__init__(*sizes, dtype, device, "cuda")
        self.limit = limit
        self.kind = kind
        self.group = group
        self.gate_up = gate_up
        self.down = down

    def held(self) -> list[Tensor]:
        return [tensor for tensor in (*self.gate_up, *self.down) if tensor is not None]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        many = self._are_many(topk_ids.numel())
        room = max_pairs(self.num_experts) if self.kind != "int8" else MAX_PAIRS
        tokens = (SORTED_PAIRS if many else room) // topk_ids.shape[1]
        parts = zip(
            x.contiguous().split(tokens),
            topk_ids.contiguous().split(tokens),
            topk_weights.contiguous().split(tokens),
        )
        run = self.many_tokens if many else self.few_tokens
        results = [run(*part) for part in parts]
        return results[0] if len(results) == 1 else torch.cat(results)

    def many_tokens(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        plan = sorted_plan(self.kind, topk_ids.numel() * self.routed_share / self.num_experts)
        return sorted_experts(
            *self._weights(), x, topk_ids, topk_weights, plan, self.routed_share < 1, self.limit
        )

    def few_tokens(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return self._summed(self._few_pairs(x, topk_ids, topk_weights), topk_ids)

    def unsummed(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor | UnsummedPairs:
        pairs = topk_ids.numel()
        if (
            self.routed_share < 1
            or self.kind == "int8"
            or not 0 < pairs <= max_pairs(self.num_experts)
            or self._are_many(pairs)
        ):
            return self(x, topk_ids, topk_weights)
        return self._few_pairs(x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous())

    def _few_pairs(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> UnsummedPairs:
        plans = self._few_plans(topk_ids)
        if plans is not None:
            return self._two_products(x, topk_ids, topk_weights, plans)
        tiles = experts_token_tiles(topk_ids.numel() * self.routed_share / self.num_experts)
        return fused_experts(*self._weights(), x, topk_ids, topk_weights, tiles, self.limit)

    def _summed(self, pairs: UnsummedPairs, topk_ids: Tensor) -> Tensor:
        if self.routed_share == 1:
            return pairs.summed()
        y = torch.empty(pairs.tokens, self.hidden, dtype=pairs.dtype, device=pairs.weighed.device)
        sum_pairs(pairs.weighed, y, topk_ids, pairs.counters)
        return y

    def _are_many(self, pairs: int) -> bool:
        return pairs * self.routed_share >= SORTED_PER_EXPERT[self.kind] * self.num_experts

    def _weights(self) -> tuple[PackedStrips, PackedStrips, str, int, int]:
        return self.gate_up, self.down, self.kind, self.group, self.num_experts

    def _few_plans(self, topk_ids: Tensor) -> ExpertsPlans | None:
        """For gate_up and down in a launch each; None for both in one."""
        plans = experts_plans(
            self.kind,
            self.hidden,
            self.intermediate,
            self.num_experts,
            topk_ids.numel(),
            topk_ids.shape[1],
        )
        # The kernel of one token reads the weights that its ids name.
        names_all = (
            plans is None or self.routed_share == 1 or not isinstance(plans[0], TokensInSharedPlan)
        )
        return plans if names_all else None

    def two_products(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, plans: ExpertsPlans
    ) -> Tensor:
        """gate_up and down in a launch each, by given plans."""
        return self._summed(self._two_products(x, topk_ids, topk_weights, plans), topk_ids)

    def _two_products(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, plans: ExpertsPlans
    ) -> UnsummedPairs:
        pairs = topk_ids.numel()
        between = torch.empty(pairs, self.intermediate, dtype=self.dtype, device=x.device)
        self._launch(self.gate_up, SILU_MUL, x, between, topk_ids, topk_weights, plans[0])
        weighed = torch.empty(pairs, self.hidden, dtype=torch.float32, device=x.device)
        self._launch(self.down, WEIGH, between, weighed, topk_ids, topk_weights, plans[1])
        return UnsummedPairs(weighed, len(x), x.dtype, None, add_up)

    def _launch(
        self,
        packed: PackedStrips,
        epilogue: int,
        x: Tensor,
        out: Tensor,
        ids: Tensor,
        weights: Tensor,
        plan: TokensInRegistersPlan | TokensInSharedPlan,
    ) -> None:
        by_expert = ids.numel() > self.num_experts
        params = GemmParams(
            **pointers(packed),
            x=x.data_ptr(),
            out=out.data_ptr(),
            ids=ids.data_ptr(),
            ids_stride=ids.element_size() // 4,
            pair_weights=weights.data_ptr(),
            pairs=ids.numel(),
            top_k=ids.shape[1],
            by_expert=by_expert,
            n=packed.row_scale.numel() // self.num_experts,
            k=x.shape[1],
            out_n=out.shape[1],
            epilogue=epilogue,
            limit=self.limit,
        )
        if self.kind == "int8":
            codes, scale = quantize_rows(x)
            params.x, params.x_scale = codes.data_ptr(), scale.data_ptr()
        if isinstance(plan, TokensInSharedPlan):
            params.m = 1
            tokens_in_shared(params, self.kind, self.dtype, self.group, plan, self.device)
            return
        grid_y = self.num_experts if by_expert else ids.numel()
        tokens_in_registers(params, self.kind, self.dtype, self.group, plan, grid_y, self.device)


class CudaExpertsLayout(ExpertsLayout):
    """Packs each expert, as it comes, into its place in the layer's tensors. gating: SiLU, of
    clamped gates or not."""

    def __init__(
        self,
        num_experts: int,
        gate: Weight,
        dtype: torch.dtype,
        device: torch.device,
        gating: Gating,
    ) -> None:
        assert gating.is_silu, gating
        self._limit = gating.limit or 0.0
        intermediate, hidden = shape(gate)
        self._sizes = (num_experts, hidden, intermediate)
        self._kind, self._group = kind(gate), group_of(gate)
        self._dtype, self._device = dtype, device
        self._layers: list[PackedStrips] = []

    def place(self, index: int, gate: Weight, up: Weight, down: Weight) -> None:
        gate, up, down = (to_device(weight, self._device) for weight in (gate, up, down))
        packed = [pack(interleaved(gate, up)), pack(down)]
        if not self._layers:
            self._layers = [self._room(one) for one in packed]
        for layer, one in zip(self._layers, packed):
            for room, part in zip(layer, one):
                if room is not None and part is not None:
                    room[index] = part

    def _room(self, one: PackedStrips) -> PackedStrips:
        return PackedStrips._make(
            None if part is None else part.new_empty(self._sizes[0], *part.shape) for part in one
        )

    def finish(self) -> CudaExperts:
        library()
        return CudaExperts(
            self._layers[0],
            self._layers[1],
            self._sizes,
            self._kind,
            self._group,
            self._dtype,
            self._device,
            self._limit,
        )
