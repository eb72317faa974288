"""The experts of one layer on the Ascend kernels."""

import torch
from torch import Tensor

from quantkit_kernels.ascend import launch
from quantkit_kernels.ascend.chip import EXPERT_BLOCK_ROWS, FEW_TOKENS
from quantkit_kernels.ascend.layout import PackedTiles, allocate, place
from quantkit_kernels.experts import Experts, ExpertsLayout
from quantkit_kernels.functional import silu_and_mul
from quantkit_kernels.torch_npu.calls import dynamic_quant
from quantkit_kernels.weights import Weight, stack


class AscendExperts(Experts):
    """One launch for gate and up of all experts, one for down; of few tokens these two are all."""

    def __init__(self, gate_up: PackedTiles, down: PackedTiles, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(down.num_experts, down.n, down.k, dtype, device, "ascend")
        self.gate_up = gate_up
        self.down = down

    def held(self) -> list[Tensor]:
        return [*self.gate_up.tensors, *self.down.tensors]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        x = x.contiguous()
        if x.shape[0] <= FEW_TOKENS:
            return self._by_pair(x, topk_ids, topk_weights)
        products = self._by_block(x, topk_ids)
        weighted = products.unflatten(0, topk_ids.shape).float() * topk_weights.unsqueeze(-1)
        return weighted.sum(dim=1).to(x.dtype)

    def _by_pair(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Every token-expert pair on its own, a token's summed in float32; gate ends with a column tile, for a span is whole tiles."""
        experts = topk_ids.flatten().to(torch.int32)
        activated = x.new_empty(experts.shape[0], self.down.k)
        launch.run(launch.gate_up(self.gate_up, x, experts, activated))
        out = torch.empty_like(x)
        launch.run(launch.down(self.down, activated, experts, topk_weights.flatten(), out))
        return out

    def _by_block(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """[T * k, H], pairs of one expert side by side.

        Rows that hold no pair are whatever memory held, from end to end: a row of a product depends on its own row alone, and nothing
        takes theirs.
        """
        slots, experts = group_pairs(topk_ids, self.num_experts, EXPERT_BLOCK_ROWS)
        pairs = x.repeat_interleave(topk_ids.shape[1], dim=0)
        gathered = x.new_empty(experts.shape[0] * EXPERT_BLOCK_ROWS, self.hidden).index_copy_(0, slots, pairs)
        gate_up = self._multiply(self.gate_up, gathered, experts)
        return self._multiply(self.down, silu_and_mul(gate_up), experts)[slots]

    def _multiply(self, packed: PackedTiles, x: Tensor, experts: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], packed.n, dtype=self.dtype, device=x.device)
        codes, row_scale = dynamic_quant(x) if packed.kind == "int8" else (x, None)
        launch.run(launch.blocks(packed, codes, row_scale, experts, out, EXPERT_BLOCK_ROWS))
        return out


def group_pairs(topk_ids: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Where each token-expert pair goes so that blocks of `block` rows hold one expert each.

    topk_ids [T, k]. Returns slots int64 [T * k], the row of each pair; and experts int32 [blocks], -1 for an unused block. The number of
    blocks depends on shapes alone, so the device is not waited for and a graph can be captured.
    """
    ids = topk_ids.flatten().long()
    pairs = ids.shape[0]
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))
    block_counts = (counts + block - 1) // block
    block_ends = block_counts.cumsum(0)
    sorted_ids, order = ids.sort(stable=True)
    places = torch.arange(pairs, device=ids.device) - (counts.cumsum(0) - counts)[sorted_ids]
    slots = torch.empty_like(ids).scatter_(0, order, (block_ends - block_counts)[sorted_ids] * block + places)
    bound = pairs // block + min(pairs, num_experts)
    # The expert of a block is the number of experts whose blocks have all ended before it.
    experts = (block_ends <= torch.arange(bound, device=ids.device).unsqueeze(1)).sum(dim=1)
    return slots, torch.where(experts < num_experts, experts, -1).to(torch.int32)


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
