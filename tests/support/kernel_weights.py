"""Random experts for the kernel tests, and the exact result they should give."""

import torch
from quantkit_kernels import ExpertBiases, Experts, Gating, Weight, prepare_experts
from quantkit_kernels.samples import exact_expert, exact_linear, random_weight
from torch import Tensor


def random_experts(
    grid: str, count: int, hidden: int, intermediate: int, rng: torch.Generator
) -> list[list[Weight]]:
    """gate, up and down of `count` experts."""
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    return [[random_weight(grid, n, k, rng) for _ in range(count)] for n, k in shapes]


def layer(weights: list[list[Weight]], backend: str, dtype: torch.dtype) -> Experts:
    gate, up, down = weights
    return prepare_experts(gate, up, down, backend=backend, dtype=dtype)


def exact_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: list[list[Weight]]
) -> Tensor:
    """Token by token in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, token_weights) in enumerate(zip(topk_ids.tolist(), topk_weights.double())):
        for expert, weight in zip(ids, token_weights):
            gate, up, down = (projection[expert] for projection in weights)
            out[token] += weight * exact_expert(x[token : token + 1], gate, up, down)[0]
    return out


def exact_gated_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: list[list[Weight]],
    gating: Gating,
    biases: list[ExpertBiases | None],
) -> Tensor:
    """Token by token in float64, by the formula that `Gating` states; what enters `down` is rounded
    to x's dtype."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, token_weights) in enumerate(zip(topk_ids.tolist(), topk_weights.double())):
        row = x[token : token + 1]
        for expert, weight in zip(ids, token_weights):
            gate, up, down = (projection[expert] for projection in weights)
            g, u = exact_linear(row, gate), exact_linear(row, up)
            bias = biases[expert]
            if bias is not None:
                g, u = g + bias.gate, u + bias.up
            if gating.limit is not None:
                g, u = g.clamp(max=gating.limit), u.clamp(-gating.limit, gating.limit)
            between = g * torch.sigmoid(gating.alpha * g) * (u + gating.shift)
            product = exact_linear(between.to(x.dtype), down)[0]
            out[token] += weight * (product if bias is None else product + bias.down)
    return out
