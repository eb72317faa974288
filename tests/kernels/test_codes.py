"""The cache in 8 bits: what codes hold, and attention over them, of every backend that runs here,
against float64."""

import pytest
import torch
from quantkit_kernels import (
    CodedKeys,
    CodedLatents,
    KeySteps,
    Norms,
    PagedLatents,
    Prompts,
    Rotation,
    gqa_decode,
    gqa_prefill,
    gqa_prepare,
    mla_decode,
    mla_prefill,
    mla_prepare,
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
from quantkit_kernels.cpu.build import why_no_library
from quantkit_kernels.samples import (
    TOLERANCE,
    code_latents,
    distance,
    grouped_attention,
    latent_attention,
)

CPU = torch.device("cpu")
BACKENDS = [
    "reference",
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(bool(why_no_library("gqa")), reason=str(why_no_library("gqa"))),
    ),
]
KINDS = pytest.mark.parametrize("codes", CODES.values(), ids=CODES)
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@KINDS
def test_codes_are_the_nearest_numbers_of_their_type(codes: torch.dtype) -> None:
    x = torch.randn(50, 64) * torch.randn(50, 1).exp()
    found, scales = encode(x, codes)
    assert torch.equal(scales, x.abs().amax(dim=1) / LARGEST[codes])
    every = torch.arange(256, dtype=torch.uint8).view(codes).float()
    every = every[every.isfinite() & (every.abs() <= LARGEST[codes])]
    nearest = (x[..., None] - every * scales[:, None, None]).abs().amin(dim=-1)
    assert ((decode(found, scales) - x).abs() <= nearest + 1e-6 * x.abs()).all()


@KINDS
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, -3e4])
def test_tokens_without_size_and_of_any_size(codes: torch.dtype, value: float) -> None:
    found, scales = encode(torch.full((2, 8), value), codes)
    assert (scales > 0).all()
    assert (decode(found, scales) - value).abs().max() <= max(1e-6 * abs(value), 1e-10)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_rotary_key_far_larger_than_its_latent_stays_a_number(
    codes: torch.dtype, dtype: torch.dtype
) -> None:
    cache = torch.cat([torch.full((1, 1, 16), 1e-3), torch.full((1, 1, 4), 3000.0)], dim=-1).to(
        dtype
    )
    assert (
        distance(decoded(code_latents(cache, 16, codes))[..., 16:], cache[..., 16:].double()) < 1e-2
    )


@KINDS
@DTYPES
@pytest.mark.parametrize("interleaved", [True, False])
def test_mla_prepare_stores_codes_of_what_it_would_have_stored(
    codes: torch.dtype, dtype: torch.dtype, interleaved: bool
) -> None:
    q_lora, kv_lora, rope_dim = 24, 40, 16
    qkv_a, gains = (
        torch.randn(3, q_lora + kv_lora + rope_dim).to(dtype) * 2,
        (torch.rand(q_lora), torch.rand(kv_lora)),
    )
    angles, slots, norms = (
        torch.rand(3, rope_dim // 2) * 6,
        torch.tensor([30, 0, 9]),
        Norms(*gains, 1e-6),
    )
    rotation, keys = (
        Rotation(angles.cos(), angles.sin(), interleaved),
        torch.bfloat16 if dtype == torch.float32 else dtype,
    )
    plain, coded = (
        torch.zeros(4, 8, kv_lora + rope_dim, dtype=dtype),
        empty_latents((4, 8), kv_lora, rope_dim, codes, keys, CPU),
    )
    coded.scales.fill_(float("nan"))
    assert torch.equal(
        mla_prepare(qkv_a, norms, rotation, plain, slots),
        mla_prepare(qkv_a, norms, rotation, coded, slots),
    )
    found, exact = decoded(coded).flatten(0, 1), plain.flatten(0, 1).double()
    assert distance(found[slots, :kv_lora], exact[slots, :kv_lora]) < (
        1.2e-2 if codes == torch.int8 else 4e-2
    )
    assert distance(found[slots, kv_lora:], exact[slots, kv_lora:]) < 4e-3
    assert coded.scales.isnan().sum() == 29


@DTYPES
def test_mla_prepare_stores_codes_by_a_known_step(dtype: torch.dtype) -> None:
    """The same for every token, whatever it holds; what lies beyond 127 steps is cut off, rotary
    keys are not."""
    kv_lora, rope_dim, step = 40, 16, torch.tensor(0.02)
    qkv_a, norms = (
        torch.randn(3, 24 + kv_lora + rope_dim).to(dtype),
        Norms(torch.rand(24), torch.rand(kv_lora) * 2, 1e-6),
    )
    angles, slots = torch.rand(3, rope_dim // 2) * 6, torch.tensor([30, 0, 9])
    rotation, keys = (
        Rotation(angles.cos(), angles.sin()),
        torch.bfloat16 if dtype == torch.float32 else dtype,
    )
    plain, coded = (
        torch.zeros(4, 8, kv_lora + rope_dim, dtype=dtype),
        empty_latents((4, 8), kv_lora, rope_dim, torch.int8, keys, CPU),
    )
    q_a = mla_prepare(qkv_a, norms, rotation, plain, slots)
    assert torch.equal(mla_prepare(qkv_a, norms, rotation, coded, slots, code_step=step), q_a)
    exact = plain.flatten(0, 1)[slots].float()
    codes = (exact[:, :kv_lora] / step).round()
    assert codes.abs().max() > 127
    assert torch.equal(coded.codes.flatten(0, 1)[slots].float(), codes.clamp(-127, 127))
    assert bool((coded.scales.flatten()[slots] == step).all())
    assert (
        distance(decoded(coded).flatten(0, 1)[slots, kv_lora:], exact[:, kv_lora:].double()) < 4e-3
    )
    for wrong, told in (
        (torch.tensor([0.02]), "code_step: shape"),
        (step.double(), "code_step: dtype"),
    ):
        with pytest.raises(ValueError, match=told):
            mla_prepare(qkv_a, norms, rotation, coded, slots, code_step=wrong)
    with pytest.raises(ValueError, match="code_step: the cache holds no codes"):
        mla_prepare(qkv_a, norms, rotation, plain, slots, code_step=step)


@KINDS
@DTYPES
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_mla_decode_over_codes(codes: torch.dtype, dtype: torch.dtype, block_size: int) -> None:
    case = latent_attention(
        [1, 0, 37, 64],
        heads=5,
        block_size=block_size,
        sizes=(24, 16, 20, 64),
        dtype=dtype,
        codes=codes,
    )
    out = mla_decode(*case.arguments, scale=case.scale)
    assert distance(out, case.exact) < TOLERANCE[dtype]
    assert out[1].abs().max() == 0


@KINDS
@DTYPES
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_mla_prefill_is_mla_decode(codes: torch.dtype, dtype: torch.dtype, backend: str) -> None:
    spans, (nope, rope, value, latent), heads = [(130, 20), (0, 150)], (24, 8, 16, 40), 3
    tokens = sum(new for _, new in spans)
    q, kv_b = (
        torch.randn(tokens, heads, nope + rope).to(dtype),
        (torch.randn(heads, nope + value, latent) * latent**-0.5).to(dtype),
    )
    cache, angles = (
        code_latents(torch.randn(21, 16, latent + rope).to(dtype), latent, codes),
        torch.rand(tokens, rope // 2) * 6,
    )
    table = (torch.randperm(20) + 1).view(2, 10)
    rows = torch.cat([table[i].expand(new, -1) for i, (_, new) in enumerate(spans)])
    seen = torch.cat([torch.arange(start, start + new) + 1 for start, new in spans])
    rotation = Rotation(angles.cos(), angles.sin())
    exact = mla_decode(
        q.float(),
        kv_b.float(),
        rotation,
        PagedLatents(cache, rows, seen),
        scale=0.2,
        backend="reference",
    )
    out = mla_prefill(
        q, kv_b, rotation, cache, Prompts.of(spans, table), scale=0.2, backend=backend
    )
    assert distance(out, exact.double()) < 2 * TOLERANCE[dtype]


@KINDS
@DTYPES
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(
    ("heads", "width", "block_size"), [((6, 2), 16, 7), ((4, 4), 24, 64), ((5, 1), 80, 1)]
)
def test_gqa_decode_over_codes(
    codes: torch.dtype,
    heads: tuple[int, int],
    width: int,
    block_size: int,
    window: int,
    dtype: torch.dtype,
    backend: str,
) -> None:
    case = grouped_attention(
        [1, 0, 37, 64], [1] * 4, heads, width, block_size, dtype, window=window, codes=codes
    )
    out = gqa_decode(case.q, case.pages, scale=case.scale, window=window, backend=backend)
    assert distance(out, case.exact) < TOLERANCE[dtype]
    assert out[1].abs().max() == 0


@KINDS
@DTYPES
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("window", [0, 50])
def test_gqa_prefill_over_codes(
    codes: torch.dtype, window: int, dtype: torch.dtype, backend: str
) -> None:
    case = grouped_attention(
        [3, 300, 140], [3, 200, 1], (6, 2), 16, 16, dtype, window=window, codes=codes
    )
    out = gqa_prefill(
        case.q, case.pages.cache, case.prompts, scale=case.scale, window=window, backend=backend
    )
    assert distance(out, case.exact) < TOLERANCE[dtype]


@KINDS
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_over_codes(codes: torch.dtype, backend: str) -> None:
    sinks = torch.randn(6)
    case = grouped_attention(
        [1, 0, 37, 64], [1] * 4, (6, 2), 16, 7, torch.float32, window=20, sinks=sinks, codes=codes
    )
    out = gqa_decode(case.q, case.pages, scale=case.scale, window=20, sinks=sinks, backend=backend)
    assert distance(out, case.exact) < TOLERANCE[torch.float32]


@KINDS
@pytest.mark.parametrize("normed", [True, False])
def test_gqa_prepare_stores_codes_of_what_it_would_have_stored(
    codes: torch.dtype, normed: bool
) -> None:
    tokens, heads, kv_heads, width = 3, 4, 2, 24
    qkv, gains = (
        torch.randn(tokens, (heads + 2 * kv_heads) * width),
        (torch.rand(width), torch.rand(width)),
    )
    angles, slots = torch.rand(tokens, 8) * 6, torch.tensor([30, 0, 9])
    rotation, norms = Rotation(angles.cos(), angles.sin()), Norms(*gains, 1e-6) if normed else None
    plain, coded = (
        torch.zeros(2, 4, 8, kv_heads, width).unbind(),
        empty_keys((4, 8, kv_heads, width), codes, CPU),
    )
    coded.key_scales.fill_(float("nan"))
    q = gqa_prepare(qkv, norms, rotation, (plain[0], plain[1]), slots)
    assert torch.equal(gqa_prepare(qkv, norms, rotation, coded, slots), q)
    for side, found, scales in zip(plain, coded[:2], coded.scales):
        exact, stored = side.flatten(0, 1)[slots], decode(found, scales).flatten(0, 1)[slots]
        assert distance(stored, exact.double()) < (1.2e-2 if codes == torch.int8 else 4e-2)
    assert coded.key_scales.isnan().sum() == 29 * kv_heads


def test_gqa_prepare_stores_codes_by_known_steps() -> None:
    """Of each channel; scales are 1, and queries as they would be."""
    tokens, heads, kv_heads, width = 3, 4, 2, 24
    qkv, angles, slots = (
        torch.randn(tokens, (heads + 2 * kv_heads) * width),
        torch.rand(tokens, 8) * 6,
        torch.tensor([30, 0, 9]),
    )
    rotation, steps = (
        Rotation(angles.cos(), angles.sin()),
        KeySteps(*(torch.rand(2, kv_heads, width) * 0.02 + 0.01)),
    )
    plain, coded = (
        torch.zeros(2, 4, 8, kv_heads, width).unbind(),
        empty_keys((4, 8, kv_heads, width), torch.int8, CPU),
    )
    q = gqa_prepare(qkv, None, rotation, (plain[0], plain[1]), slots)
    assert torch.equal(gqa_prepare(qkv, None, rotation, coded, slots, code_steps=steps), q)
    for side, step, found, scales in zip(plain, steps, coded[:2], coded.scales):
        exact = (side.flatten(0, 1)[slots] / step).round().clamp(-127, 127)
        assert torch.equal(found.flatten(0, 1)[slots].float(), exact)
        assert bool((scales.flatten(0, 1)[slots] == 1).all())
    with pytest.raises(ValueError, match="code_steps: the cache holds no codes"):
        gqa_prepare(qkv, None, rotation, (plain[0], plain[1]), slots, code_steps=steps)
    with pytest.raises(ValueError, match="code_steps: shape"):
        gqa_prepare(
            qkv, None, rotation, coded, slots, code_steps=KeySteps(steps.keys[:1], steps.values)
        )


def test_what_is_no_code_is_refused() -> None:
    q, kv_b, angles = (
        torch.zeros(1, 2, 8),
        torch.zeros(2, 6, 4),
        Rotation(torch.zeros(1, 2), torch.zeros(1, 2)),
    )
    where = (torch.zeros(1, 1).int(), torch.ones(1).int())
    room = empty_latents((1, 4), 4, 4, torch.int8, torch.bfloat16, CPU)
    for wrong, told in (
        (room._replace(codes=room.codes.to(torch.uint8)), r"cache\.codes: dtype"),
        (room._replace(keys=room.keys[..., :3]), r"cache\.keys: shape"),
        (room._replace(scales=room.scales.bfloat16()), r"cache\.scales: dtype"),
    ):
        with pytest.raises(ValueError, match=told):
            mla_decode(q, kv_b, angles, PagedLatents(CodedLatents(*wrong), *where), scale=1.0)
    keys = empty_keys((1, 4, 2, 8), torch.int8, CPU)
    with pytest.raises(ValueError, match="keys: dtype"):
        gqa_prepare(
            torch.zeros(1, 48), None, angles, (keys.keys, keys.values), torch.zeros(1).long()
        )
    with pytest.raises(ValueError, match="scales: shape"):
        gqa_prepare(
            torch.zeros(1, 48),
            None,
            angles,
            CodedKeys(*keys[:2], *(one[..., :1] for one in keys.scales)),
            torch.zeros(1).long(),
        )
