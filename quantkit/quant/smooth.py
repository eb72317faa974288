"""SmoothQuant (arXiv 2211.10438): move the range of activations into the weights before both are
quantized to int8.

An activation row x has one scale, max |x| / 127, so a channel ten times larger than the rest costs
the others a factor of ten in resolution. Dividing it by s and multiplying its weights by s keeps
the product. Candidates are s = a^alpha / w^(1 - alpha), with a and w the largest magnitudes of
activation and weight of each channel; the one with the least output error, from activations and
weights together, is selected.
"""

import torch
from torch import Tensor

INT8_MAX = 127.0


def smoothing_candidates(activation_max: Tensor, weight_max: Tensor, points: int) -> Tensor:
    """Scales [points + 1, ..., K], the first all ones, alpha in 0..1, geometric mean 1. Inputs that
    are always zero or not read, as padding is, have 1.

    activation_max, weight_max [..., K]."""
    alphas = torch.linspace(0, 1, points, device=activation_max.device).view(
        -1, *[1] * activation_max.dim()
    )
    scale = activation_max.clamp(min=1e-5) ** alphas / weight_max.clamp(min=1e-5) ** (1 - alphas)
    live = (activation_max > 0) & (weight_max > 0)
    logs = scale.log().where(live, 0.0).sum(-1, keepdim=True)
    scale = (scale / (logs / live.sum(-1, keepdim=True).clamp(min=1)).exp()).where(live, 1.0)
    return torch.cat([torch.ones_like(scale[:1]), scale])


def activation_loss(x: Tensor, column_energy: Tensor) -> Tensor:
    """Expected squared output error per token, float32 [...], of quantizing rows x [..., T, K] to
    int8 with a scale per row.

    column_energy [..., K]: squared norm of each weight column. Rounding errors are taken as
    independent, scale^2 / 12 each.
    """
    step = torch.linalg.vector_norm(x, torch.inf, dim=-1) / INT8_MAX  # |x| would be a copy
    return step.square().mean(-1) / 12 * column_energy.sum(-1)
