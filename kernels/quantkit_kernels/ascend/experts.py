"""The experts of one layer on the Ascend kernels."""

import torch
from torch import Tensor

from quantkit_kernels.ascend import launch
from quantkit_kernels.ascend.chip import EXPERT_BLOCK_ROWS, FEW_TOKENS
from quantkit_kernels.ascend.layout import PackedTiles, allocate, place
from quantkit_kernels.experts import Experts, ExpertsLayout
from quantkit_kernels.torch_npu.calls import dynamic_quant, finalize_routing, init_routing
from quantkit_kernels.torch_npu.functional import silu_and_mul
from quantkit_kernels.weights import Weight, stack


class AscendExperts(Experts):
    """One launch for gate and up of all experts, one for down. Of few tokens these two are all; of
    more they are where torch_npu's grouped products are."""

    def __init__(
        self, gate_up: PackedTiles, down: PackedTiles, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(down.num_experts, down.n, down.k, dtype, device, "ascend")
        self.gate_up = gate_up
        self.down = down

    def held(self) -> list[Tensor]:
        return [*self.gate_up.tensors, *self.down.tensors]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        by = self._by_pair if x.shape[0] <= FEW_TOKENS else self._by_block
        return by(x.contiguous(), topk_ids.to(torch.int32), topk_weights)

    def _by_pair(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Every token-expert pair on its own, a token's summed in float32; gate ends with a column
        tile, for a span is whole tiles."""
        experts = topk_ids.flatten()
        activated = x.new_empty(experts.shape[0], self.down.k)
        launch.run(launch.gate_up(self.gate_up, x, experts, activated))
        out = torch.empty_like(x)
        launch.run(launch.down(self.down, activated, experts, topk_weights.flatten(), out))
        return out

    def _by_block(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Pairs sorted by expert, in blocks; a token's are summed as torch_npu's operator does it,
        by weights of 16 bits."""
        quantized = self.down.kind == "int8"
        rows, places, counts, scale = init_routing(x, topk_ids, self.num_experts, quantized)
        blocks = assigned(counts, rows.shape[0])
        activated = silu_and_mul(self._multiply(self.gate_up, rows, scale, blocks))
        codes, scale = dynamic_quant(activated) if quantized else (activated, scale)
        return finalize_routing(
            self._multiply(self.down, codes, scale, blocks), places, topk_weights.to(self.dtype)
        )

    def _multiply(
        self, packed: PackedTiles, rows: Tensor, scale: Tensor, blocks: launch.Blocks
    ) -> Tensor:
        out = torch.empty(rows.shape[0], packed.n, dtype=self.dtype, device=rows.device)
        launch.run(
            launch.blocks(packed, rows, scale if packed.kind == "int8" else None, blocks, out)
        )
        return out


def assigned(counts: Tensor, rows: int) -> launch.Blocks:
    """Blocks of so many rows sorted by expert, of which each expert has counts int64 [E]. The
    number of blocks depends on shapes alone, so the device is not waited for and a graph can be
    captured."""
    bound = rows // EXPERT_BLOCK_ROWS + min(rows, counts.shape[0])
    experts, first, last = (
        torch.empty(bound, dtype=torch.int32, device=counts.device) for _ in range(3)
    )
    blocks = launch.Blocks(EXPERT_BLOCK_ROWS, experts, first, last)
    launch.run(launch.assign(counts, blocks))
    return blocks


class AscendLayout(ExpertsLayout):
    def __init__(self, num_experts: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_experts = num_experts
        self._dtype = dtype
        self._device = device
        self._gate_up: PackedTiles | None = None
        self._down: PackedTiles | None = None

    def place(self, index: int, gate: Weight, up: Weight, down: Weight) -> None:
        gate_up = stack(gate, up)
        if self._gate_up is None or self._down is None:
            self._gate_up = allocate(gate_up, self._num_experts, self._device)
            self._down = allocate(down, self._num_experts, self._device)
        place(self._gate_up, index, gate_up)
        place(self._down, index, down)

    def finish(self) -> AscendExperts:
        assert self._gate_up is not None, "no expert was placed"
        assert self._down is not None, "no expert was placed"
        return AscendExperts(self._gate_up, self._down, self._dtype, self._device)
