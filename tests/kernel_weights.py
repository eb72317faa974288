"""Random experts for the kernel tests, and the exact result they should give."""

import torch
from quantkit_kernels import Experts, Weight, prepare_experts
from quantkit_kernels.samples import exact_expert, random_weight
from torch import Tensor


def random_experts(grid: str, count: int, hidden: int, intermediate: int, rng: torch.Generator) -> list[list[Weight]]:
    """gate, up and down of `count` experts."""
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    return [[random_weight(grid, n, k, rng) for _ in range(count)] for n, k in shapes]


def layer(weights: list[list[Weight]], backend: str, dtype: torch.dtype) -> Experts:
    gate, up, down = weights
    return prepare_experts(gate, up, down, backend=backend, dtype=dtype)


def exact_experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: list[list[Weight]]) -> Tensor:
    """Token by token in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, token_weights) in enumerate(zip(topk_ids.tolist(), topk_weights.double())):
        for expert, weight in zip(ids, token_weights):
            gate, up, down = (projection[expert] for projection in weights)
            out[token] += weight * exact_expert(x[token : token + 1], gate, up, down)[0]
    return out
