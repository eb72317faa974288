"""Unquantized experts by torch's grouped product: two products a layer whatever the routing, and none of the launches waits for the host,
so a decode step can be captured."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.experts import Experts, ExpertsLayout
from quantkit_kernels.reference.functional import silu_and_mul
from quantkit_kernels.weights import Weight, dequantize, kind, shape, stack


class GroupedExperts(Experts):
    """gate_up [E, 2I, H] and down [E, H, I] in the compute dtype."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        num_experts, hidden, intermediate = down.shape
        super().__init__(num_experts, hidden, intermediate, down.dtype, down.device, "expanded")
        self.gate_up = gate_up
        self.down = down

    def held(self) -> list[Tensor]:
        return [self.gate_up, self.down]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        top_k = topk_ids.shape[1]
        ids, order = topk_ids.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(ids, torch.arange(self.num_experts, device=ids.device, dtype=ids.dtype), right=True).int()
        between = silu_and_mul(F.grouped_mm(x[order // top_k], self.gate_up.transpose(1, 2), offs=ends))
        products = F.grouped_mm(between, self.down.transpose(1, 2), offs=ends)
        pairs = torch.empty(products.shape, dtype=torch.float32, device=x.device)
        pairs[order] = products.float()
        return (pairs.view(*topk_ids.shape, -1) * topk_weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def why_not_grouped(weight: Weight, down: Weight, dtype: torch.dtype, device: torch.device) -> str | None:
    """None where torch has one launch for all experts: bfloat16 on Hopper and later, rows of whole 16 bytes. Int8 keeps its own meaning."""
    if kind(weight) == "int8":
        return "int8 rounds its activations"
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) < (9, 0):
        return "bfloat16 on CUDA devices of capability 9.0 or later only"
    return "rows are not whole 16 bytes" if any(size % 8 for size in (*shape(weight), *shape(down))) else None


class GroupedLayout(ExpertsLayout):
    """Expands each expert as it comes into its place in the layer's tensors."""

    def __init__(self, num_experts: int, gate: Weight, dtype: torch.dtype, device: torch.device) -> None:
        intermediate, hidden = shape(gate)
        self._gate_up = torch.empty(num_experts, 2 * intermediate, hidden, dtype=dtype, device=device)
        self._down = torch.empty(num_experts, hidden, intermediate, dtype=dtype, device=device)

    def place(self, index: int, gate: Weight, up: Weight, down: Weight) -> None:
        self._gate_up[index] = dequantize(stack(gate, up))
        self._down[index] = dequantize(down)

    def finish(self) -> GroupedExperts:
        return GroupedExperts(self._gate_up, self._down)
