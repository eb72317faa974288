"""AWQ (arXiv 2306.00978): per-channel scales moved between a producer and its consumers before
rounding.

Channels with large activations get s > 1: their weights are multiplied by s before rounding and
their inputs divided by s, so they are rounded on a finer grid relative to their size. Candidates
are s = x^r, with x the size of each channel's activations (root mean square, from the diagonal of
the Hessian), and s = x^r / w^(1-r) with w the mean relative size of its weights (AutoAWQ's duo
scaling); r runs over a grid in [0, 1]. The candidate with the least loss is selected in
calibrate/scales.py.

Folding is exact: a producer's 16-bit gain can only hold gain / s rounded, so the effective scale is
computed from the rounded gain.
"""

import torch
from torch import Tensor


def candidate_scales(
    activation: Tensor, weight: Tensor, points: int, weight_points: int = 0
) -> Tensor:
    """Candidate scales [(2 + weight_points) * points, ..., K], normalised so that sqrt(max * min) =
    1; the first is all ones. Inputs that are always zero or not read, as padding is, have 1.

    activation [..., K]: size of each input channel. weight [..., K]: mean over the consumers' rows
    of |w| / max |w| of its group.
    """
    ratios = torch.linspace(0, 1, points, device=activation.device).view(
        -1, *[1] * activation.dim()
    )
    x = activation.clamp(min=1e-8)
    by_input = x**ratios
    duo = by_input / (weight ** (1 - ratios) + 1e-4)
    live = (activation > 0) & (weight > 0)
    exponents = torch.linspace(0, 1, weight_points + 2)[1:-1].tolist()
    return torch.cat(
        [
            _normalised(one, live)
            for one in (
                by_input,
                duo,
                *(by_input / (weight**exponent + 1e-4) for exponent in exponents),
            )
        ]
    )


def _normalised(scale: Tensor, live: Tensor) -> Tensor:
    scale = scale.clamp(min=1e-4)
    largest = scale.where(live, 0.0).amax(-1, keepdim=True)
    smallest = scale.where(live, torch.inf).amin(-1, keepdim=True)
    scale = scale / (largest * smallest).sqrt()
    return scale.where(live & torch.isfinite(scale), 1.0)


def relative_weight(weights: list[Tensor], group_size: int | None) -> Tensor:
    """Mean over all rows of |w| / max |w| of its group: weights float32 [..., N_i, K] -> [...,
    K]."""
    total = torch.zeros_like(weights[0][..., 0, :])
    rows = 0
    for w in weights:
        groups = w.abs().unflatten(-1, (-1, group_size or w.shape[-1]))
        total += (groups / (groups.amax(-1, keepdim=True) + 1e-6)).flatten(-2).sum(-2)
        rows += w.shape[-2]
    return total / rows


def power_of_two(scale: Tensor) -> Tensor:
    """The nearest powers of two (in ratio). Multiplying and dividing 16-bit values by them is
    exact."""
    return scale.log2().round().exp2()


def effective_scale(gain: Tensor, scale: Tensor, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """The effect of folding `scale` into a gain stored in 16 bits.

    gain [K] in its stored dtype, scale float32 [K] -> the new gain in that dtype, and float32 gain
    / new gain, by which consumers must be multiplied to keep the product. If the gain is zero, the
    channel carries nothing: scale 1. offset: added by the norm to a stored gain; the quotient is of
    the sums.
    """
    whole = gain.float() + offset
    scale = torch.where(whole == 0, torch.ones_like(scale), scale)
    folded = (whole / scale - offset).to(gain.dtype)
    divisor = folded.float() + offset
    effective = torch.where(divisor == 0, torch.ones_like(scale), whole / divisor)
    return torch.where(divisor == 0, gain, folded), effective
