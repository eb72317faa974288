"""Routed experts: those of several tokens in 4 bits by few_experts.py, else in three launches: gate_up with SiLU, down with the routing
weights, the sum over each token's experts.

Int8 adds two that quantize the activations; many tokens are sorted by expert first (sorted_experts.py). No launch depends on the routing's
values, so a step can be captured in a graph.
"""

import torch
from torch import Tensor

from quantkit_kernels.cuda.build import Params, library
from quantkit_kernels.cuda.few_experts import few_tokens_experts, max_pairs
from quantkit_kernels.cuda.launch import SILU_MUL, WEIGH, quantize_rows, stream_gemm, sum_pairs, wide_gemm
from quantkit_kernels.cuda.layout import Packed, group_of, interleaved, pack
from quantkit_kernels.cuda.plans import SORTED_PER_EXPERT, ExpertsPlans, Plan, WidePlan, experts_plans, experts_token_tiles
from quantkit_kernels.cuda.sorted_experts import SORTED_PAIRS, sorted_experts
from quantkit_kernels.experts import Experts, ExpertsLayout
from quantkit_kernels.weights import Weight, kind, shape, to_device

MAX_PAIRS = 4096  # that a block looks through; more come in parts


class StreamExperts(Experts):
    def __init__(
        self, gate_up: Packed, down: Packed, sizes: tuple[int, int, int], kind: str, group: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(*sizes, dtype, device, "cuda")
        self.kind = kind
        self.group = group
        self.gate_up = gate_up
        self.down = down

    def held(self) -> list[Tensor]:
        return [tensor for tensor in (*self.gate_up, *self.down) if tensor is not None]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        many = topk_ids.numel() >= SORTED_PER_EXPERT[self.kind] * self.num_experts
        room = max_pairs(self.num_experts) if self.kind != "int8" else MAX_PAIRS
        tokens = (SORTED_PAIRS if many else room) // topk_ids.shape[1]
        parts = zip(x.contiguous().split(tokens), topk_ids.contiguous().split(tokens), topk_weights.contiguous().split(tokens))
        run = self._sorted if many else self._few
        results = [run(*part) for part in parts]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _sorted(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return sorted_experts(self.gate_up, self.down, self.kind, self.group, self.num_experts, x, topk_ids, topk_weights)

    def _few(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
        plans = experts_plans(self.kind, self.hidden, self.intermediate, self.num_experts, pairs, top_k)
        if plans is not None:
            return self._streamed(x, topk_ids, topk_weights, plans)
        weights = (self.gate_up, self.down, self.kind, self.group, self.num_experts)
        return few_tokens_experts(*weights, x, topk_ids, topk_weights, experts_token_tiles(pairs / self.num_experts))

    def _streamed(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, plans: ExpertsPlans) -> Tensor:
        pairs = topk_ids.numel()
        between = torch.empty(pairs, self.intermediate, dtype=self.dtype, device=x.device)
        self._launch(self.gate_up, SILU_MUL, x, between, topk_ids, topk_weights, plans[0])
        weighed = torch.empty(pairs, self.hidden, dtype=torch.float32, device=x.device)
        self._launch(self.down, WEIGH, between, weighed, topk_ids, topk_weights, plans[1])
        y = torch.empty_like(x)
        sum_pairs(weighed, y)
        return y

    def _launch(self, packed: Packed, epilogue: int, x: Tensor, out: Tensor, ids: Tensor, weights: Tensor, plan: Plan | WidePlan) -> None:
        pointers = {name: tensor.data_ptr() for name, tensor in packed._asdict().items() if tensor is not None}
        by_expert = ids.numel() > self.num_experts
        params = Params(
            **pointers,
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
        )
        if self.kind == "int8":
            codes, scale = quantize_rows(x)
            params.x, params.x_scale = codes.data_ptr(), scale.data_ptr()
        if isinstance(plan, WidePlan):
            params.m = 1
            wide_gemm(params, self.kind, self.dtype, self.group, plan, self.device)
            return
        grid_y = self.num_experts if by_expert else ids.numel()
        stream_gemm(params, self.kind, self.dtype, self.group, plan, grid_y, self.device)


class StreamLayout(ExpertsLayout):
    """Packs each expert as it comes into its place in the layer's tensors."""

    def __init__(self, num_experts: int, gate: Weight, dtype: torch.dtype, device: torch.device) -> None:
        intermediate, hidden = shape(gate)
        self._sizes = (num_experts, hidden, intermediate)
        self._kind, self._group = kind(gate), group_of(gate)
        self._dtype, self._device = dtype, device
        self._layers: list[Packed] = []

    def place(self, index: int, gate: Weight, up: Weight, down: Weight) -> None:
        gate, up, down = (to_device(weight, self._device) for weight in (gate, up, down))
        packed = [pack(interleaved(gate, up)), pack(down)]
        if not self._layers:
            self._layers = [self._room(one) for one in packed]
        for layer, one in zip(self._layers, packed):
            for room, part in zip(layer, one):
                if room is not None and part is not None:
                    room[index] = part

    def _room(self, one: Packed) -> Packed:
        return Packed._make(None if part is None else part.new_empty(self._sizes[0], *part.shape) for part in one)

    def finish(self) -> StreamExperts:
        library()
        return StreamExperts(self._layers[0], self._layers[1], self._sizes, self._kind, self._group, self._dtype, self._device)
