"""Weights for a forward that is only watched: what a layer computes with them says what it is made
of, and nothing else.

A linear is a sparse random matrix with four entries for each row or column, whichever are more, so
a layer of any size is run in a moment; every other tensor is random and whole. Scales can be moved
about: the columns of a reader and the rows of a producer are multiplied.
"""

from collections.abc import Mapping
from typing import Any

import torch
from quantkit_kernels import SILU, Gating
from torch import Tensor

from quantkit.models.weights import ExpertsOp, LinearOp

_ENTRIES = 4


class StandIns:
    """shapes: of every tensor, by the name on disk. columns, rows: multiply the columns [K] or rows
    [N] of a linear, by module; tensors:
    other values, by name. answers: of experts, instead of something that depends on what they are
    asked. chosen: experts of a token, once some were asked."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self.columns: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self.answers: dict[str, Tensor] = {}
        self.chosen = 0
        self._entries: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def restore(self) -> None:
        """As before anything was scaled."""
        self.columns, self.rows, self.tensors, self.answers = {}, {}, {}, {}

    def original(self, name: str) -> Tensor:
        shape = self.shapes[name]
        drawn = torch.randn(shape, generator=_generator(name))
        return 1 + 0.3 * drawn if len(shape) < 2 else drawn * shape[-1] ** -0.5

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name] if name in self.tensors else self.original(name)

    def has(self, name: str) -> bool:
        return name in self.shapes

    def linear_of(self, module: str, site: tuple[str, ...]) -> LinearOp:
        n, k = self.shapes[f"{module}.weight"]
        if module not in self._entries:
            count = _ENTRIES * max(n, k)
            generator = _generator(module)
            where = [torch.randperm(count, generator=generator) % size for size in (n, k)]
            self._entries[module] = (
                *where,
                torch.randn(count, generator=generator) * (n / count) ** 0.5,
            )  # type: ignore[assignment]
        out, read, value = self._entries[module]

        def apply(x: Tensor) -> Tensor:
            x = x * self.columns[module] if module in self.columns else x
            y = x.new_zeros(*x.shape[:-1], n).index_add_(-1, out, x[..., read] * value)
            return y * self.rows[module] if module in self.rows else y

        return apply

    def experts(self, prefix: str, num_experts: int, gating: Gating = SILU) -> ExpertsOp:
        """Something of x, the experts and their weights that no scale passes through but one of all
        its columns."""

        def apply(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            x = x * self.columns[prefix] if prefix in self.columns else x
            self.chosen = topk_ids.shape[-1]
            if prefix in self.answers:
                return self.answers[prefix]
            chosen = (topk_weights.float() * torch.cos(topk_ids.float())).sum(-1, keepdim=True)
            return torch.tanh(x.flip(-1) + 0.3 * x) * chosen

        return apply

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a layer of transformers asks for no {name}")


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
