"""Unquantized experts by torch's grouped product: two products a layer whatever the routing, and
none of the launches waits for the host, so a decode step can be captured."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.experts import BiasedExpertsLayout, Experts, StackedLayout
from quantkit_kernels.gating import SILU, ExpertBiases, Gating
from quantkit_kernels.reference.experts import joined
from quantkit_kernels.reference.functional import silu_and_mul
from quantkit_kernels.weights import Weight, kind, shape


class ExpandedExperts(Experts):
    """gate_up [E, 2I, H] and down [E, H, I] in the compute dtype. biases: float32 [E, 2I] and [E,
    H], or none."""

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        gating: Gating = SILU,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        num_experts, hidden, intermediate = down.shape
        super().__init__(num_experts, hidden, intermediate, down.dtype, down.device, "expanded")
        self.gate_up, self.down = gate_up, down
        self.gating, self.biases = gating, biases

    def held(self) -> list[Tensor]:
        return [self.gate_up, self.down, *(self.biases or ())]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        top_k = topk_ids.shape[1]
        ids, order = topk_ids.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(
            ids, torch.arange(self.num_experts, device=ids.device, dtype=ids.dtype), right=True
        ).int()
        inner = F.grouped_mm(x[order // top_k], self.gate_up.transpose(1, 2), offs=ends)
        first, last = (
            (0.0, 0.0) if self.biases is None else (bias[ids.long()] for bias in self.biases)
        )
        if self.biases is None and self.gating == SILU:
            between = silu_and_mul(inner)
        else:
            between = self.gating(*(inner.float() + first).chunk(2, dim=-1)).to(x.dtype)
        products = F.grouped_mm(between, self.down.transpose(1, 2), offs=ends)
        pairs = torch.empty(products.shape, dtype=torch.float32, device=x.device)
        pairs[order] = products.float() + last
        return (pairs.view(*topk_ids.shape, -1) * topk_weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def why_not_grouped(
    weight: Weight, down: Weight, dtype: torch.dtype, device: torch.device
) -> str | None:
    """None where torch has one launch for all experts: bfloat16 on Hopper and later, rows of whole
    16 bytes. Int8 keeps its own meaning."""
    if kind(weight) == "int8":
        return "int8 rounds its activations"
    if (
        device.type != "cuda"
        or dtype != torch.bfloat16
        or torch.cuda.get_device_capability(device) < (9, 0)
    ):
        return "bfloat16 on CUDA devices of capability 9.0 or later only"
    return (
        "rows are not whole 16 bytes"
        if any(size % 8 for size in (*shape(weight), *shape(down)))
        else None
    )


class ExpandedLayout(StackedLayout, BiasedExpertsLayout):
    def __init__(
        self,
        num_experts: int,
        gate: Weight,
        dtype: torch.dtype,
        device: torch.device,
        gating: Gating = SILU,
    ) -> None:
        super().__init__(num_experts, gate, dtype, device)
        self._gating, self._biases = gating, dict[int, tuple[Tensor, Tensor]]()

    def place(
        self, index: int, gate: Weight, up: Weight, down: Weight, biases: ExpertBiases | None = None
    ) -> None:
        if biases is not None:
            self._biases[index] = joined(biases, self._down.device)
        super().place(index, gate, up, down)

    def finish(self) -> ExpandedExperts:
        sides = (
            zip(*(self._biases[index] for index in range(len(self._down)))) if self._biases else ()
        )
        first_last = tuple(torch.stack(side) for side in sides)
        return ExpandedExperts(
            self._gate_up,
            self._down,
            self._gating,
            (first_last[0], first_last[1]) if first_last else None,
        )
