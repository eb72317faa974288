"""Random experts for the kernel tests, and the exact result they should give."""

import torch
from quantkit_kernels import prepare_experts
from quantkit_kernels.gating import SILU
from quantkit_kernels.samples import exact_linear, random_weight
from quantkit_kernels.weights import to_device


def random_experts(grid, count, hidden, intermediate, rng):
    """gate, up and down of `count` experts."""
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    return [[random_weight(grid, n, k, rng) for _ in range(count)] for n, k in shapes]


def layer(weights, backend, dtype):
    gate, up, down = weights
    return prepare_experts(gate, up, down, backend=backend, dtype=dtype)


def placed(weights, device):
    return [[to_device(one, device) for one in projection] for projection in weights]


def exact_gating(gate, up, gating):
    """Of gate and up in float64, by the formula that `Gating` states."""
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    weight = torch.sigmoid(gating.alpha * gate)
    if gating.bound is not None:
        gate = gating.bound * torch.tanh(gate / gating.bound)
    if gating.up_bound is not None:
        up = gating.up_bound * torch.tanh(up / gating.up_bound)
    return gate * weight * (up + gating.shift)


def exact_experts(x, topk_ids, topk_weights, weights, gating=SILU, biases=None):
    """Token by token in float64, by the formula that `Gating` states; what enters `down` is rounded
    to x's dtype."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, token_weights) in enumerate(zip(topk_ids.tolist(), topk_weights.double())):
        row = x[token : token + 1]
        for expert, weight in zip(ids, token_weights):
            gate, up, down = (projection[expert] for projection in weights)
            bias = (biases[expert] if biases else None) or (0.0, 0.0, 0.0)
            g, u = exact_linear(row, gate) + bias[0], exact_linear(row, up) + bias[1]
            between = exact_gating(g, u, gating)
            out[token] += weight * (exact_linear(between.to(x.dtype), down)[0] + bias[2])
    return out
