"""Experts as a loop over the linears of any backend: tokens are sorted by expert once, experts
without tokens are skipped.

That needs the routing on the host. A decode step captured in a graph cannot wait for it: on a
device, few tokens go through every expert.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit_kernels.experts import NO_EXPERT, BiasedExpertsLayout, Experts
from quantkit_kernels.gating import SILU, ExpertBiases, Gating
from quantkit_kernels.linear import Linear
from quantkit_kernels.recording import whole
from quantkit_kernels.reference.functional import silu_and_mul
from quantkit_kernels.weights import Weight, stack

_UNSORTED_TOKENS = 256
"""On a device, up to so many tokens take no turn by the host; decode batches are no larger."""

PrepareLinear = Callable[[Weight, torch.dtype, torch.device], Linear]
SiluAndMul = Callable[[Tensor], Tensor]
"""[n, 2I] -> [n, I]."""


class LoopExperts(Experts):
    """One gate_up linear [2I, H] and one down linear [H, I] per expert. biases: of each expert [2I]
    and [H], float32, or none. silu: what is between them where they have no biases and no gating of
    their own."""

    takes_none = True

    def __init__(
        self,
        gate_up: list[Linear],
        down: list[Linear],
        dtype: torch.dtype,
        device: torch.device,
        backend: str,
        gating: Gating = SILU,
        biases: list[tuple[Tensor, Tensor]] | None = None,
        silu: SiluAndMul = silu_and_mul,
    ) -> None:
        super().__init__(
            len(down), down[0].out_features, down[0].in_features, dtype, device, backend
        )
        self.gate_up, self.down = gate_up, down
        self.gating, self.biases, self.silu = gating, biases, silu

    def held(self) -> list[Tensor]:
        own = [tensor for linear in (*self.gate_up, *self.down) for tensor in linear.held()]
        return own + [bias for pair in self.biases or () for bias in pair]

    def _one(self, expert: int, rows: Tensor) -> Tensor:
        """[n, H] -> [n, H] of one expert; float32 where it has biases."""
        inner = self.gate_up[expert].rows(rows)
        if self.biases is None:
            between = (
                self.silu(inner) if self.gating == SILU else self.gating(*inner.chunk(2, dim=-1))
            )
            return self.down[expert].rows(between)
        first, last = self.biases[expert]
        return (
            self.down[expert]
            .rows(self.gating(*(inner.float() + first).chunk(2, dim=-1)).to(rows.dtype))
            .float()
            + last
        )

    @whole
    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        on_host = x.device.type == "cpu" or x.shape[0] > _UNSORTED_TOKENS
        return (self.sorted if on_host else self.unsorted)(x, topk_ids, topk_weights)

    def unsorted(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Every expert computes every token, and what a token did not ask for is dropped: no value
        reaches the host."""
        by_expert = torch.zeros(x.shape[0], self.num_experts, dtype=torch.float32, device=x.device)
        by_expert.scatter_add_(
            1, topk_ids.long().clamp_min(0), topk_weights.masked_fill(topk_ids == NO_EXPERT, 0.0)
        )
        summed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(self.num_experts):
            product = self._one(expert, x).float()
            weight = by_expert[:, expert : expert + 1]
            # Dropped, not multiplied by zero: an expert may overflow on tokens that are not its
            # own.
            summed += (product * weight).masked_fill(weight == 0, 0.0)
        return summed.to(x.dtype)

    def check_ids(self, least: int, most: int) -> None:
        if least < NO_EXPERT or most >= self.num_experts:
            raise ValueError(f"topk_ids: {least}..{most}, expected 0..{self.num_experts - 1}")

    def sorted(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The experts that were asked for compute their own tokens."""
        top_k = topk_ids.shape[1]
        ids, order = topk_ids.reshape(-1).sort(stable=True)
        self.check_ids(int(ids[0]), int(ids[-1]))
        none = int((ids == NO_EXPERT).sum())
        ids, order = ids[none:], order[none:]
        counts = torch.bincount(ids, minlength=self.num_experts).tolist()
        token = order // top_k
        gathered = x[token]
        products = torch.empty(ids.shape[0], self.hidden, dtype=torch.float32, device=x.device)
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            products[start : start + count] = self._one(expert, gathered[start : start + count])
            start += count
        products *= topk_weights.reshape(-1)[order].unsqueeze(-1)
        summed = torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add_(
            0, token, products
        )
        return summed.to(x.dtype)


class LoopLayout(BiasedExpertsLayout):
    """Prepares each expert's two linears as it comes."""

    def __init__(
        self,
        num_experts: int,
        prepare_linear: PrepareLinear,
        dtype: torch.dtype,
        device: torch.device,
        backend: str,
        gating: Gating = SILU,
        silu: SiluAndMul = silu_and_mul,
    ) -> None:
        self._prepare, self._gating, self._silu = prepare_linear, gating, silu
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}
        self._dtype = dtype
        self._device = device
        self._backend = backend
        self._gate_up: list[Linear | None] = [None] * num_experts
        self._down: list[Linear | None] = [None] * num_experts

    def place(
        self, index: int, gate: Weight, up: Weight, down: Weight, biases: ExpertBiases | None = None
    ) -> None:
        if biases is not None:
            self._biases[index] = joined(biases, self._device)
        self._gate_up[index] = self._prepare(stack(gate, up), self._dtype, self._device)
        self._down[index] = self._prepare(down, self._dtype, self._device)

    def finish(self) -> LoopExperts:
        gate_up = [linear for linear in self._gate_up if linear is not None]
        down = [linear for linear in self._down if linear is not None]
        assert len(gate_up) == len(down) == len(self._down), (
            len(gate_up),
            len(down),
            len(self._down),
        )
        biases = [self._biases[index] for index in range(len(down))] if self._biases else None
        return LoopExperts(
            gate_up,
            down,
            self._dtype,
            self._device,
            self._backend,
            self._gating,
            biases,
            self._silu,
        )


def joined(biases: ExpertBiases, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of gate and up side by side [2I], and of down [H], float32."""
    return torch.cat([biases.gate, biases.up]).to(device, torch.float32), biases.down.to(
        device, torch.float32
    )
