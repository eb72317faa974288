"""The experts of one layer: route, one grouped product for gate and up, SwiGLU, one for down,
weighted sum. Five launches, six for int8."""

import torch
from torch import Tensor

from quantkit_kernels.experts import Experts, ExpertsLayout
from quantkit_kernels.torch_npu.calls import (
    dynamic_quant,
    finalize_routing,
    grouped_matmul,
    init_routing,
)
from quantkit_kernels.torch_npu.functional import silu_and_mul
from quantkit_kernels.torch_npu.layout import int4_tensors, is_carried, narrow_tensors
from quantkit_kernels.weights import (
    Dense,
    Int4,
    Int8,
    NarrowInt8,
    Weight,
    kind,
    shape,
    stack,
    to_device,
)

Stacked = tuple[Tensor, ...]
"""int4: carriers [E, K, N/8], scale, offset [E, K/g, N]. int8: codes [E, K, N], scale [E, N]. int8
of four bits: carriers [E, K, N/8], scale int64 [E, 1, N], bias [E, N]. dense: weights [E, K, N]."""
NAMES = {"int4": ("antiquant_scale", "antiquant_offset"), "int8": ("scale", "bias"), "dense": ()}
"""What the grouped product calls the tensors after the weight."""


class GroupedExperts(Experts):
    """grid: the weights'; with int8 rows are quantized too."""

    def __init__(
        self,
        grid: str,
        gate_up: Stacked,
        down: Stacked,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(gate_up[0].shape[0], hidden, intermediate, dtype, device, "torch_npu")
        self.grid, self.gate_up, self.down = grid, gate_up, down

    def held(self) -> list[Tensor]:
        return [*self.gate_up, *self.down]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        quantized = self.grid == "int8"
        rows, places, counts, scale = init_routing(
            x, topk_ids.to(torch.int32), self.num_experts, quantized
        )
        activated = silu_and_mul(self._multiply(self.gate_up, rows, counts, scale))
        codes, scale = dynamic_quant(activated) if quantized else (activated, scale)
        return finalize_routing(
            self._multiply(self.down, codes, counts, scale), places, topk_weights.to(self.dtype)
        )

    def _multiply(
        self, stacked: Stacked, rows: Tensor, counts: Tensor, row_scale: Tensor
    ) -> Tensor:
        weight, *others = stacked
        named = dict(zip(NAMES[self.grid], others))
        if self.grid == "int8":
            named["per_token_scale"] = row_scale
        return grouped_matmul(rows, weight, counts, self.dtype, **named)


class GroupedLayout(ExpertsLayout):
    def __init__(self, num_experts: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_experts = num_experts
        self._dtype = dtype
        self._device = device
        self._gate_up: Stacked = ()
        self._down: Stacked = ()

    def place(self, index: int, gate: Weight, up: Weight, down: Weight) -> None:
        gate_up_tensors = self._tensors(stack(gate, up))
        down_tensors = self._tensors(down)
        if not self._gate_up:
            self._intermediate, self._hidden = shape(gate)
            self._grid = kind(gate)
            self._gate_up = self._room(gate_up_tensors)
            self._down = self._room(down_tensors)
        for room, tensor in zip((*self._gate_up, *self._down), (*gate_up_tensors, *down_tensors)):
            room[index].copy_(tensor)

    def finish(self) -> GroupedExperts:
        assert self._gate_up, "no expert was placed"
        return GroupedExperts(
            self._grid,
            self._gate_up,
            self._down,
            self._hidden,
            self._intermediate,
            self._dtype,
            self._device,
        )

    def _room(self, tensors: Stacked) -> Stacked:
        return tuple(
            torch.empty(self._num_experts, *tensor.shape, dtype=tensor.dtype, device=self._device)
            for tensor in tensors
        )

    def _tensors(self, weight: Weight) -> Stacked:
        placed = to_device(weight, self._device)
        if isinstance(placed, Int4):
            carriers, scale, offset = int4_tensors(placed, self._dtype)
            per_channel = scale.shape[0] == 1
            return (carriers, scale[0], offset[0]) if per_channel else (carriers, scale, offset)
        if isinstance(placed, Dense):
            return (placed.weight.T.to(self._dtype),)
        if isinstance(placed, NarrowInt8) and is_carried(placed):
            return narrow_tensors(placed)
        assert isinstance(placed, Int8), kind(placed)
        # The grouped product takes bf16 scales for bf16 outputs and fp32 ones for fp16.
        scale_dtype = torch.bfloat16 if self._dtype == torch.bfloat16 else torch.float32
        return placed.codes.T, placed.scale.flatten().to(scale_dtype)
