"""Model weights held as a plain dict of full-precision tensors: the simplest answer to what a
forward asks."""

from collections.abc import Mapping

import torch
from quantkit_kernels import SILU, Gating, add_rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.mlp import PROJ_NAMES, MlpNames
from quantkit.models.rope import Rope
from quantkit.models.weights import ExpertsOp, LinearOp, PrologOp


class PlainWeights:
    def __init__(self, tensors: Mapping[str, Tensor], names: MlpNames = PROJ_NAMES) -> None:
        """names: of the routed experts' linears."""
        self.tensors, self.names = tensors, names

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def dequantized(self, module: str) -> Tensor:
        return self.tensors[f"{module}.weight"]

    def linear(self, module: str) -> LinearOp:
        weight = self.dequantized(module)
        return lambda x: F.linear(x, weight)

    def fused_linear(self, modules: tuple[str, ...]) -> LinearOp:
        weight = torch.cat([self.dequantized(module) for module in modules])
        return lambda x: F.linear(x, weight)

    def mla_prolog(
        self,
        modules: tuple[str, str, str],
        kv_b: Tensor,
        gains: tuple[Tensor, Tensor],
        eps: float,
        rope: Rope,
    ) -> PrologOp | None:
        return None

    def experts(self, prefix: str, num_experts: int, gating: Gating = SILU) -> ExpertsOp:
        def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for expert in range(num_experts):
                modules = self.names.modules(f"{prefix}.{expert}")
                gate, up, down = (
                    (self.dequantized(module), self.tensors.get(f"{module}.bias"))
                    for module in modules
                )
                share = (topk_weights * (topk_ids == expert)).sum(-1, keepdim=True)
                out += share * F.linear(gating(F.linear(x, *gate), F.linear(x, *up)), *down)
            return out

        return run

    def experts_with_shared(self, prefix: str, num_experts: int, shared: str) -> ExpertsOp | None:
        return None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, gain: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, gain, eps)
