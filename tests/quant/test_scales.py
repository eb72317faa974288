"""Scales: the identity is among the candidates, folding them into stored gains loses nothing, and
the activation error that is predicted is the one that rounding makes."""

import torch

from quantkit.quant.awq import candidate_scales, effective_scale, power_of_two, relative_weight
from quantkit.quant.smooth import activation_loss, smoothing_candidates


def test_candidates_begin_with_the_identity_and_are_centred():
    activation = torch.rand(256, generator=torch.Generator().manual_seed(0)).exp() ** 3
    candidates = candidate_scales(activation, torch.rand(256), 6)
    assert candidates.shape == (12, 256)
    assert torch.equal(candidates[0], torch.ones(256))
    torch.testing.assert_close((candidates.amax(-1) * candidates.amin(-1)).sqrt(), torch.ones(12))
    assert torch.corrcoef(torch.stack([candidates[5], activation]))[0, 1] > 0.999, (
        "the last plain candidate is the activations' own size"
    )


def test_weight_points_add_candidates_between_plain_and_whole_weights():
    activation, weight = torch.rand(64) + 0.1, torch.rand(64) * 0.9 + 0.1
    few, more = (
        candidate_scales(activation, weight, 5),
        candidate_scales(activation, weight, 5, weight_points=3),
    )
    assert more.shape == (25, 64)
    assert torch.equal(more[:10], few)
    wanted = activation**0.75 / (
        weight**0.5 + 1e-4
    )  # the fourth of five powers, the second of three exponents
    torch.testing.assert_close(more[18] / wanted, (more[18] / wanted)[:1].expand(64))


def test_effective_scale_folds_exactly():
    """gain * w == new gain * (w * s), bit for bit in the products' float64 value, although the new
    gain is BF16."""
    generator = torch.Generator().manual_seed(0)
    gain = (torch.randn(512, generator=generator) * 3).bfloat16()
    gain[7] = 0
    scale = torch.rand(512, generator=generator) * 10 + 0.01
    folded, effective = effective_scale(gain, scale)
    assert folded.dtype == torch.bfloat16
    torch.testing.assert_close(
        folded.double() * effective.double(), gain.double(), rtol=1e-7, atol=0
    )
    assert effective[7] == 1
    assert ((effective / scale - 1).abs() < 0.01).logical_or(gain == 0).all()


def test_powers_of_two_fold_without_any_rounding():
    generator = torch.Generator().manual_seed(0)
    gain, router = (
        torch.randn(256, generator=generator).bfloat16(),
        torch.randn(8, 256, generator=generator).bfloat16(),
    )
    scale = power_of_two(torch.rand(256, generator=generator) * 20 + 0.05)
    folded, effective = effective_scale(gain, scale)
    assert torch.equal(effective, scale)
    assert torch.equal(folded.float() * scale, gain.float())
    assert torch.equal((router.float() * scale).bfloat16().float(), router.float() * scale)


def test_relative_weight_counts_every_row_once():
    a, b = torch.randn(10, 64), torch.randn(30, 64)
    torch.testing.assert_close(
        relative_weight([a, b], 32), relative_weight([torch.cat([a, b])], 32)
    )


def test_scales_of_others_do_not_depend_on_padding():
    """Units that are always zero, and columns that nothing reads, have 1."""
    size, weight = torch.rand(64) + 0.1, torch.rand(64) * 0.9 + 0.1
    padded, rows = torch.cat([size, torch.zeros(8)]), torch.cat([weight, torch.zeros(8)])
    for candidates in (candidate_scales, smoothing_candidates):
        found = candidates(padded, rows, 4)
        torch.testing.assert_close(found[:, :64], candidates(size, weight, 4))
        assert torch.equal(found[:, 64:], torch.ones(len(found), 8))


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
