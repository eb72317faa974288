"""A text model inside a multimodal one: its rows, scale groups and weights under the outer
names."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from quantkit_kernels import SILU, Gating
from torch import Tensor

from quantkit.models.rope import Rope
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import ExpertsOp, LinearOp, NgramTable, PrologOp, Weights

Rename = Callable[[str], str]
"""Name of a tensor or module in the text model -> name in the checkpoint."""


def rename_rows(rows: Iterable[Parameter], rename: Rename) -> list[Parameter]:
    return [
        replace(row, name=rename(row.name), fused=None if row.fused is None else rename(row.fused))
        for row in rows
    ]


def rename_groups(groups: Iterable[ScaleGroup], rename: Rename) -> list[ScaleGroup]:
    return [
        replace(
            group,
            name=rename(group.name),
            producer=rename(group.producer),
            consumers=tuple(map(rename, group.consumers)),
            observe=rename(group.observe),
        )
        for group in groups
    ]


class RenamedWeights:
    """Weights that the text model accesses by its own names."""

    def __init__(self, weights: Weights, rename: Rename) -> None:
        self.weights, self.rename = weights, rename
        self.all_reduce, self.add_rms_norm = weights.all_reduce, weights.add_rms_norm

    def tensor(self, name: str) -> Tensor:
        return self.weights.tensor(self.rename(name))

    def has(self, name: str) -> bool:
        return self.weights.has(self.rename(name))

    def linear(self, module: str) -> LinearOp:
        return self.weights.linear(self.rename(module))

    def fused_linear(self, modules: tuple[str, ...]) -> LinearOp:
        return self.weights.fused_linear(tuple(map(self.rename, modules)))

    def mla_prolog(
        self,
        modules: tuple[str, str, str],
        kv_b: Tensor,
        gains: tuple[Tensor, Tensor],
        eps: float,
        rope: Rope,
    ) -> PrologOp | None:
        q_a, q_b, kv_a = map(self.rename, modules)
        return self.weights.mla_prolog((q_a, q_b, kv_a), kv_b, gains, eps, rope)

    def input_rotation(self, module: str) -> int:
        return self.weights.input_rotation(self.rename(module))

    def dequantized(self, module: str) -> Tensor:
        return self.weights.dequantized(self.rename(module))

    def experts(self, prefix: str, num_experts: int, gating: Gating = SILU) -> ExpertsOp:
        return self.weights.experts(self.rename(prefix), num_experts, gating)

    def ngram_table(self, module: str) -> NgramTable:
        return self.weights.ngram_table(self.rename(module))

    def experts_with_shared(self, prefix: str, num_experts: int, shared: str) -> ExpertsOp | None:
        return self.weights.experts_with_shared(
            self.rename(prefix), num_experts, self.rename(shared)
        )
