"""The predicted activation error is the one that rounding makes, and smoothing a spiky input lowers
it."""

import torch

from quantkit.quant.smooth import activation_loss, smoothing_candidates


def spiky():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 256, generator=generator)
    x[:, :4] *= 30
    return x, torch.randn(64, 256, generator=generator)


def rounded(x):
    step = x.abs().amax(-1, keepdim=True) / 127
    return (x / step).round() * step


def test_prediction_matches_rounding():
    x, w = spiky()
    real = ((rounded(x) - x) @ w.t()).square().sum(-1).mean()
    torch.testing.assert_close(activation_loss(x, w.square().sum(0)), real, rtol=0.1, atol=0)


def test_smoothing_helps_a_spiky_input():
    x, w = spiky()
    candidates = smoothing_candidates(x.abs().amax(0), w.abs().amax(0), 5)
    assert torch.equal(candidates[0], torch.ones(256))
    losses = [activation_loss(x / s, (w * s).square().sum(0)) for s in candidates]
    assert min(losses[1:]) < 0.2 * losses[0]
