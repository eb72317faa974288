"""Grouped-query attention by backend torch_npu on the double: pages where they lie."""

import pytest
import torch
from ascend.test_latent_attention import page_ends
from ascend.test_torch_npu import random
from quantkit_kernels import (
    Norms,
    Prompts,
    Rotation,
    gqa_decode,
    gqa_prefill,
    gqa_prepare,
    mla_prefill,
)
from quantkit_kernels.paged import split_latents
from quantkit_kernels.samples import distance, grouped_attention

pytestmark = pytest.mark.usefixtures("called")


@pytest.mark.parametrize(
    ("heads", "width", "block_size"), [((8, 2), 128, 64), ((4, 4), 64, 128), ((8, 1), 80, 16)]
)
def test_gqa_decode(heads, width, block_size, called):
    """NaN past a sequence's end; lengths from the host, and from the device."""
    called.clear()
    lengths = page_ends(block_size)
    case = grouped_attention(lengths, [1] * len(lengths), heads, width, block_size, torch.bfloat16)
    how = {"scale": case.scale, "backend": "torch_npu"}
    ours = gqa_decode(case.q, case.pages, **how)
    assert distance(ours, case.exact) < 1e-2
    for one, exact, length in zip(ours, case.exact, lengths):
        assert not length or distance(one, exact) < 1e-2
    # the device's are not waited for where the host has them
    told = case.pages._replace(lengths=lengths, seq_lens=case.pages.seq_lens.clamp(max=1))
    assert torch.equal(gqa_decode(case.q, told, **how), ours)
    part = torch.cat([case.q, case.q], dim=-1)[..., :width]  # need not lie in one piece
    assert torch.equal(gqa_decode(part, case.pages, **how), ours)
    assert called == ["npu_fused_infer_attention_score_v2"] * 3


def test_gqa_prepare(called):
    """Heads normed and turned, keys and values cached."""
    called.clear()
    qkv, angles = random(5, (4 + 2 * 2) * 64), random(5, 32, dtype=torch.float32, seed=1) * 3
    norms = Norms(random(64, seed=2), random(64, seed=3), 0.7)
    rotation = Rotation(angles.cos(), angles.sin(), False)
    slots, found = torch.tensor([3, 0, 17, 31, 8]), []
    for backend in ("torch_npu", "reference"):
        cache = (torch.zeros(2, 16, 2, 64).bfloat16(), torch.zeros(2, 16, 2, 64).bfloat16())
        found.append((gqa_prepare(qkv, norms, rotation, cache, slots, backend=backend), *cache))
    for ours, twin in zip(*found):
        assert distance(ours, twin.double()) < 4e-3
    assert set(called) == {"npu_rms_norm", "npu_rotary_mul"}


def test_what_the_operator_does_not_take(called):
    """A window, and blocks that are no multiple of 16: plain torch."""
    called.clear()
    for block_size, window in ((64, 20), (7, 0)):
        case = grouped_attention(
            [17, 40], [1, 1], (4, 2), 64, block_size, torch.bfloat16, window=window
        )
        how = {"scale": case.scale, "window": window, "backend": "torch_npu"}
        assert distance(gqa_decode(case.q, case.pages, **how), case.exact) < 1e-2
    assert called == []


@pytest.mark.parametrize("window", [0, 20])
def test_gqa_prefill(window):
    case = grouped_attention([60, 30], [20, 30], (4, 2), 64, 16, torch.bfloat16, window=window)
    out = gqa_prefill(
        case.q, case.pages[:2], case.prompts, scale=case.scale, window=window, backend="torch_npu"
    )
    assert distance(out, case.exact) < 1e-2


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_mla_prefill(apart, interleaved, called):
    """Queries turned by npu_rotary_mul, latents expanded; the cache in one tensor and in two."""
    called.clear()
    rng, heads, nope, rope, value, latent = torch.Generator().manual_seed(1), 2, 32, 16, 24, 48
    prompts = Prompts.of([(5, 7), (0, 20)], torch.tensor([[1, 2], [3, 4]]))
    q = torch.randn(27, heads, nope + rope, generator=rng).bfloat16()
    kv_b = (torch.randn(heads, nope + value, latent, generator=rng) / latent**0.5).bfloat16()
    cache = torch.randn(5, 16, latent + rope, generator=rng).bfloat16()
    angles = torch.rand(27, rope // 2, generator=rng) * 6
    rotation = Rotation(angles.cos(), angles.sin(), interleaved)
    given = split_latents(cache, latent, interleaved) if apart else cache
    ours = mla_prefill(q, kv_b, rotation, given, prompts, scale=0.2, backend="torch_npu")
    exact = mla_prefill(
        q.float(), kv_b.float(), rotation, cache.float(), prompts, scale=0.2, backend="reference"
    )
    assert distance(ours, exact.double()) < 1.5e-2
    assert called == ["npu_rotary_mul"]
