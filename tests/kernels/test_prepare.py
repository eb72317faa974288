"""What enters attention, and what is cached of a token: norms, rotation and codes, of every backend
against formulas in float64."""

import pytest
import torch
from kernel_backends import HALVES, backends_of, device_of
from kernel_formulas import normed, rotated
from quantkit_kernels import (
    KeySteps,
    Norms,
    Rotation,
    gqa_prepare,
    mla_prepare,
    mla_queries,
    prepare_dense,
    rope,
)
from quantkit_kernels.codes import (
    CODES,
    LARGEST,
    decode,
    decoded,
    empty_keys,
    empty_latents,
    encode,
)
from quantkit_kernels.paged import parts_of
from quantkit_kernels.samples import TOLERANCE, code_latents, distance

KINDS = pytest.mark.parametrize("codes", CODES.values(), ids=CODES)
CACHES = pytest.mark.parametrize("codes", [None, *CODES.values()], ids=["plain", *CODES])
INTERLEAVED = pytest.mark.parametrize("interleaved", [True, False])
NORMED = pytest.mark.parametrize("with_norm", [True, False])
EPS = 1e-6
NEAR = {torch.int8: 1.2e-2, torch.float8_e4m3fn: 4e-2}
"""How far a value may lie from its code's."""


def turns(tokens, rotary, device, interleaved=True):
    angles = torch.rand(tokens, rotary // 2, device=device) * 6
    return angles, Rotation(angles.cos(), angles.sin(), interleaved)


def room_for(dtype):
    """What holds a latent's rotary keys."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


@INTERLEAVED
@pytest.mark.parametrize(("backend", "dtype"), backends_of("rope"))
def test_rope(backend, dtype, interleaved):
    device = device_of(backend)
    for heads, width in ((3, 16), (9, 24), (5, 64)):
        x = torch.randn(4, heads, width, device=device).to(dtype)
        angles, positions = (
            torch.rand(50, width // 2, device=device) * 6,
            torch.tensor([49, 0, 7, 7], device=device),
        )
        y = rope(x, positions, angles.cos(), angles.sin(), interleaved=interleaved, backend=backend)
        assert distance(y, rotated(x, angles[positions], interleaved)) < TOLERANCE[dtype]


SMALL, R1, ALONE, UNROTATED = (24, 40, 16), (1536, 512, 64), (0, 40, 16), (24, 40, 0)
LATENTS = {
    "reference": [(SMALL, 3), (ALONE, 2), (UNROTATED, 2)],
    "triton": [(SMALL, 3), (ALONE, 2), (UNROTATED, 2)],
    "cuda": [
        (SMALL, 300),
        (ALONE, 2),
        (UNROTATED, 2),
        *((R1, tokens) for tokens in (1, 3, 40, 300)),
    ],
}
"""By backend: q_lora_rank, 0 without, kv_lora_rank and rotary channels, and tokens."""


@CACHES
@INTERLEAVED
@pytest.mark.parametrize(("backend", "dtype"), backends_of("mla_prepare", tuple(LATENTS)))
def test_mla_prepare(backend, dtype, interleaved, codes, poisoned_memory):
    """Norms, rotates and caches; no other slot is written."""
    device = device_of(backend)
    for sizes, tokens in LATENTS[backend]:
        _, kv_lora, rotary = sizes
        qkv_a = torch.randn(tokens, sum(sizes), device=device).to(dtype) * 2
        qkv_a[tokens // 2 + 1 :][:1] = 0
        gains = [torch.rand(size, device=device).to(dtype) for size in sizes[:2]]
        angles, rotation = turns(tokens, rotary, device, interleaved)
        slots = torch.randperm(640, device=device)[:tokens]
        if codes is None:
            cache = torch.full((10, 64, kv_lora + rotary), float("nan"), device=device).to(dtype)
            marks = cache[..., 0]
        else:
            cache = empty_latents((10, 64), kv_lora, rotary, codes, room_for(dtype), device)
            marks = cache.scales.fill_(float("nan"))
        q_a = mla_prepare(qkv_a, Norms(*gains, EPS), rotation, cache, slots, backend=backend)
        q, latent, key = qkv_a.split(sizes, dim=-1)
        assert q_a.dtype == dtype
        exact_q = normed(q, gains[0])
        assert q_a.shape == q.shape
        assert not q_a.numel() or distance(q_a, exact_q) < TOLERANCE[dtype]
        found = (cache if codes is None else decoded(cache)).flatten(0, 1)[slots]
        exact = normed(latent, gains[1])
        turned = rotated(key.unsqueeze(1), angles, interleaved).squeeze(1)
        near = TOLERANCE[dtype] + NEAR.get(codes, 0.0)
        assert distance(found[:, :kv_lora], exact) < near
        assert not rotary or distance(found[:, kv_lora:], turned) < max(
            TOLERANCE[dtype], 4e-3 * (codes is not None)
        )
        if codes is not None:
            largest = exact.abs().amax(dim=-1) / LARGEST[codes]
            assert distance(cache.scales.flatten()[slots], largest) < TOLERANCE[dtype]
        assert marks.isnan().sum() == 640 - tokens


HEADS = {
    "reference": [(3, (4, 2), 24, 16)],
    "cpu": [(3, (4, 2), 24, 16)],
    "triton": [(3, (4, 2), 24, 16)],
    "cuda": [(1, (32, 8), 128, 128), (300, (8, 1), 80, 40), (3, (4, 4), 256, 256)],
}
"""By backend: tokens, heads of queries and of keys, their width, channels that turn."""


@CACHES
@INTERLEAVED
@NORMED
@pytest.mark.parametrize(("backend", "dtype"), backends_of("gqa_prepare"))
def test_gqa_prepare(backend, dtype, with_norm, interleaved, codes, poisoned_memory):
    device = device_of(backend)
    for tokens, heads, width, rotary in HEADS[backend]:
        qkv = torch.randn(tokens, (heads[0] + 2 * heads[1]) * width, device=device).to(dtype) * 3
        gains = torch.rand(2, width, device=device).to(dtype)
        angles, rotation = turns(tokens, rotary, device, interleaved)
        slots = torch.randperm(640, device=device)[:tokens]
        shape = (10, 64, heads[1], width)
        if codes is None:
            cache = torch.full((2, *shape), float("nan"), device=device).to(dtype).unbind()
            marks = cache[0][..., 0]
        else:
            cache = empty_keys(shape, codes, device)
            marks = cache.key_scales.fill_(float("nan"))
        norms = Norms(gains[0], gains[1], EPS) if with_norm else None
        q = gqa_prepare(qkv, norms, rotation, cache, slots, backend=backend)
        sides = qkv.unflatten(1, (-1, width)).split([heads[0], heads[1], heads[1]], dim=1)
        exact_q, exact_k = (
            rotated(normed(side, gain) if with_norm else side, angles, interleaved)
            for side, gain in zip(sides, gains)
        )
        assert distance(q, exact_q) < TOLERANCE[dtype]
        for place, exact in enumerate((exact_k, sides[2].double())):
            stored = cache[place].flatten(0, 1)[slots]
            if codes is not None:
                scales = cache.scales[place].flatten(0, 1)[slots]
                largest = exact.abs().amax(dim=-1) / LARGEST[codes]
                assert distance(scales, largest) < TOLERANCE[dtype]
                stored = decode(stored, scales)
            near = TOLERANCE[dtype] + NEAR.get(codes, 0.0)
            assert distance(stored, exact) < near
        assert marks.isnan().sum() == (640 - tokens) * heads[1]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_mla_prepare_stores_codes_by_a_known_step(dtype):
    """The same for every token, whatever it holds; what lies beyond 127 steps is cut off, rotary
    keys are not. And mla_queries are the product of what mla_prepare returns, in either cache."""
    kv_lora, step, cpu = 40, torch.tensor(0.02), torch.device("cpu")
    qkv_a = torch.randn(3, sum(SMALL)).to(dtype)
    norms = Norms(torch.rand(24), torch.rand(kv_lora) * 2, EPS)
    (_, rotation), slots = turns(3, 16, cpu), torch.tensor([30, 0, 9])
    plain = torch.zeros(4, 8, 56, dtype=dtype)
    coded = empty_latents((4, 8), kv_lora, 16, torch.int8, room_for(dtype), cpu)
    q_a = mla_prepare(qkv_a, norms, rotation, plain, slots)
    assert torch.equal(mla_prepare(qkv_a, norms, rotation, coded, slots, code_step=step), q_a)
    exact = plain.flatten(0, 1)[slots].float()
    codes = (exact[:, :kv_lora] / step).round()
    assert codes.abs().max() > 127
    assert torch.equal(coded.codes.flatten(0, 1)[slots].float(), codes.clamp(-127, 127))
    assert bool((coded.scales.flatten()[slots] == step).all())
    keys = decoded(coded).flatten(0, 1)[slots, kv_lora:]
    assert distance(keys, exact[:, kv_lora:].double()) < 4e-3
    q_b = prepare_dense(torch.randn(32, 24), dtype=dtype)
    for cache, how in ((plain, None), (coded, step)):
        expected = [part.flatten(0, 1)[slots] for part in parts_of(cache)]
        for part in parts_of(cache):
            part.zero_()
        found = mla_queries(qkv_a, norms, rotation, cache, slots, q_b, code_step=how)
        assert torch.equal(found, q_b(q_a))
        stored = [part.flatten(0, 1)[slots] for part in parts_of(cache)]
        assert all(map(torch.equal, stored, expected))


def test_gqa_prepare_stores_codes_by_known_steps():
    """Of each channel; scales are 1, and queries as they would be."""
    cpu, slots, qkv = torch.device("cpu"), torch.tensor([30, 0, 9]), torch.randn(3, 8 * 24)
    _, rotation = turns(3, 16, cpu)
    steps = KeySteps(*(torch.rand(2, 2, 24) * 0.02 + 0.01))
    plain = torch.zeros(2, 4, 8, 2, 24).unbind()
    coded = empty_keys((4, 8, 2, 24), torch.int8, cpu)
    q = gqa_prepare(qkv, None, rotation, plain, slots)
    assert torch.equal(gqa_prepare(qkv, None, rotation, coded, slots, code_steps=steps), q)
    for side, step, found, scales in zip(plain, steps, coded[:2], coded.scales):
        exact = (side.flatten(0, 1)[slots] / step).round().clamp(-127, 127)
        assert torch.equal(found.flatten(0, 1)[slots].float(), exact)
        assert bool((scales.flatten(0, 1)[slots] == 1).all())


@KINDS
def test_codes_are_the_nearest_numbers_of_their_type(codes):
    x = torch.randn(50, 64) * torch.randn(50, 1).exp()
    found, scales = encode(x, codes)
    assert torch.equal(scales, x.abs().amax(dim=1) / LARGEST[codes])
    every = torch.arange(256, dtype=torch.uint8).view(codes).float()
    every = every[every.isfinite() & (every.abs() <= LARGEST[codes])]
    nearest = (x[..., None] - every * scales[:, None, None]).abs().amin(dim=-1)
    assert ((decode(found, scales) - x).abs() <= nearest + 1e-6 * x.abs()).all()


@KINDS
def test_tokens_of_any_size(codes):
    for value in (0.0, 1e-30, 1e30, -3e4):
        found, scales = encode(torch.full((2, 8), value), codes)
        assert (scales > 0).all()
        assert (decode(found, scales) - value).abs().max() <= max(1e-6 * abs(value), 1e-10)


@KINDS
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_rotary_key_far_larger_than_its_latent_stays_a_number(codes, dtype):
    cache = torch.cat([torch.full((1, 1, 16), 1e-3), torch.full((1, 1, 4), 3e3)], dim=-1).to(dtype)
    found = decoded(code_latents(cache, 16, codes))[..., 16:]
    assert distance(found, cache[..., 16:].double()) < 1e-2
