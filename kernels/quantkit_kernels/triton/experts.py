"""Routed experts: pairs sorted by expert, gate and up with what is between them and down, down with
the routing weights, and the sum over each token's experts. Biases and gates that are clamped or
shifted are part of the two products.

No launch depends on the routing's values, so a step can be captured in a graph.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quantkit_kernels.experts import BiasedExpertsLayout, Experts
from quantkit_kernels.gating import SILU, ExpertBiases, Gating
from quantkit_kernels.triton import rows
from quantkit_kernels.triton.cards import (
    ExpertsPlan,
    architecture,
    experts_plan,
    experts_split,
    multiprocessors,
)
from quantkit_kernels.triton.decoded_experts import (
    decoded_bytes,
    is_faster_decoded,
    multiply_decoded,
)
from quantkit_kernels.triton.launch import SILU_MUL, WEIGH, ChosenExperts, Packed, multiply
from quantkit_kernels.triton.layout import STRIP, PackedSteps, group_of, pack
from quantkit_kernels.triton.sorted_pairs import sort_pairs
from quantkit_kernels.weights import Weight, kind, shape, to_device

KEPT_BYTES = 1 << 30
"""Of pairs that are computed at once, between the launches. Each part reads all experts and leaves
tiles half empty: 8192 tokens of gpt-oss-20b and of Qwen3-30B-A3B, 0.6 GB, are one."""
_DECODED_KEPT_BYTES = 4 << 30
"""The same where each part decodes all experts: 32,768 tokens of gpt-oss-20b, 2.3 GB, are one."""
_ROUNDED_TILE = 128
"""From tiles of so many tokens on a pair's result is rounded before it is added to those of its
token, as is written and read then in half of the time."""


class TritonExperts(Experts):
    def __init__(
        self,
        gate_up: Packed,
        down: Packed,
        num_experts: int,
        dtype: torch.dtype,
        device: torch.device,
        gating: Gating = SILU,
    ) -> None:
        super().__init__(num_experts, down.n, down.k, dtype, device, "triton")
        self.gate_up, self.down, self.gating = gate_up, down, gating

    def held(self) -> list[Tensor]:
        return [*self.gate_up.held(), *self.down.held()]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        each = topk_ids.numel() / self.num_experts
        if self._is_faster_decoded(each):
            return in_parts(self.decoded, x, topk_ids, topk_weights, self, _DECODED_KEPT_BYTES)
        plan = experts_plan(
            architecture(self.device), self.gate_up.kind, self.intermediate, self.hidden, each
        )
        compute = partial(self.by_plan, plan=plan)
        return in_parts(compute, x, topk_ids, topk_weights, self, KEPT_BYTES)

    def _is_faster_decoded(self, pairs_per_expert: float) -> bool:
        sizes = (self.intermediate, self.hidden)
        name = architecture(self.device)
        return is_faster_decoded(name, self.gate_up.kind, self.dtype, sizes, pairs_per_expert)

    @property
    def decoded_bytes(self) -> int:
        if not self._is_faster_decoded(sys.maxsize):
            return 0
        return decoded_bytes(self.num_experts, self.intermediate, self.hidden)

    def decoded(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Of weight-only grids, over weights in the compute dtype, some at a time."""
        return multiply_decoded(self.gate_up, self.down, self.gating, x, topk_ids, topk_weights)

    def by_plan(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, plan: ExpertsPlan, split: int = 0
    ) -> Tensor:
        """split: programs that share K of gate and up; 0 for as many as the rule says."""
        pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
        slots = (
            ChosenExperts(topk_ids.flatten())
            if len(x) == 1
            else sort_pairs(topk_ids, self.num_experts, plan.down.tokens)
        )
        between = torch.empty(pairs, self.intermediate, dtype=self.dtype, device=x.device)
        codes, scale = self._quantized(x)
        tiles = len(slots[0])
        split = split or experts_split(
            plan.gate_up, multiprocessors(self.device), self.intermediate, self.hidden, tiles
        )
        first = replace(plan.gate_up, split=split)
        multiply(
            self.gate_up,
            codes,
            scale,
            between,
            first,
            epilogue=SILU_MUL,
            slots=slots,
            top_k=top_k,
            gating=self.gating,
        )
        rounded = plan.down.tokens >= _ROUNDED_TILE
        weighed = torch.empty(
            pairs, self.hidden, dtype=self.dtype if rounded else torch.float32, device=x.device
        )
        codes, scale = self._quantized(between)
        multiply(
            self.down,
            codes,
            scale,
            weighed,
            plan.down,
            epilogue=WEIGH,
            slots=slots,
            pair_weights=topk_weights,
        )
        y = torch.empty_like(x)
        rows.sum_pairs(weighed, y)
        return y

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return rows.quantize_rows(x) if self.gate_up.kind == "int8" else (x, None)


def in_parts(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Experts,
    kept_bytes: int,
) -> Tensor:
    """What `compute` makes of x[T, H], topk_ids[T, k] and topk_weights[T, k], in as few parts as
    keep to kept_bytes, of as many tokens each: a last part of one token has kernels of its own."""
    pairs = kept_bytes // (4 * experts.hidden + 2 * experts.intermediate)
    most = max(1, pairs // topk_ids.shape[1])
    tokens = -(-len(x) // -(-len(x) // most))
    parts = zip(
        x.contiguous().split(tokens),
        topk_ids.contiguous().split(tokens),
        topk_weights.contiguous().split(tokens),
    )
    results = [compute(*part) for part in parts]
    return results[0] if len(results) == 1 else torch.cat(results)


class TritonExpertsLayout(BiasedExpertsLayout):
    """Packs each expert, as it comes, into its place in the layer's tensors: gate's rows, padded to
    whole strips, then up's."""

    def __init__(
        self,
        num_experts: int,
        gate: Weight,
        dtype: torch.dtype,
        device: torch.device,
        gating: Gating = SILU,
    ) -> None:
        self._gating, self._biases = gating, list[Tensor]()
        self._count, self._dtype, self._device = num_experts, dtype, device
        self._kind, self._groups = kind(gate), (group_of(gate), group_of(gate))
        self._intermediate, self._hidden = shape(gate)
        self._layers: list[PackedSteps] = []

    def place(
        self, index: int, gate: Weight, up: Weight, down: Weight, biases: ExpertBiases | None = None
    ) -> None:
        first, second, third = (
            pack(to_device(weight, self._device)) for weight in (gate, up, down)
        )
        packed = [_side_by_side(first, second), third]
        self._groups = group_of(gate), group_of(down)
        if not self._layers:
            self._layers = [
                PackedSteps(*(part.new_empty(self._count, *part.shape) for part in one))
                for one in packed
            ]
        for layer, one in zip(self._layers, packed, strict=True):
            for room, part in zip(layer, one, strict=True):
                room[index] = part
        if biases is not None:
            self._place_biases(index, biases)

    def _place_biases(self, index: int, biases: ExpertBiases) -> None:
        """As the rows of the weights lie."""
        if not self._biases:
            self._biases = [torch.zeros_like(layer.row_scale) for layer in self._layers]
        up = self._biases[0].shape[1] // 2
        for room, start, bias in zip(
            (self._biases[0], *self._biases),
            (0, up, 0),
            (biases.gate, biases.up, biases.down),
            strict=True,
        ):
            room[index, start : start + len(bias)] = bias

    def finish(self) -> TritonExperts:
        gate_up, down = self._layers
        biases = self._biases or (None, None)
        first = Packed(
            gate_up, self._kind, self._groups[0], 2 * self._intermediate, self._hidden, biases[0]
        )
        second = Packed(
            down, self._kind, self._groups[1], self._hidden, self._intermediate, biases[1]
        )
        return TritonExperts(first, second, self._count, self._dtype, self._device, self._gating)


def _side_by_side(gate: PackedSteps, up: PackedSteps) -> PackedSteps:
    """The rows of both, gate's first."""
    assert len(gate.row_scale) % STRIP == 0, len(gate.row_scale)
    scales = gate.scales if gate.scales.dim() == 1 else torch.cat([gate.scales, up.scales], dim=-1)
    codes = torch.cat([gate.codes, up.codes], dim=-2)
    return PackedSteps(codes, scales, torch.cat([gate.row_scale, up.row_scale]))
