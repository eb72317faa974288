"""The cache in 8 bits on a CUDA device against float64 and against the reference. Skipped where
there is none."""

import pytest
import torch
from decode_attention import check_gqa_decode, check_mla_decode
from quantkit_kernels import (
    Norms,
    Prompts,
    Rotation,
    gqa_prefill,
    gqa_prepare,
    mla_prefill,
    mla_prepare,
)
from quantkit_kernels.codes import CODES, LARGEST, decode, decoded, empty_keys, empty_latents
from quantkit_kernels.samples import TOLERANCE, code_latents, distance, grouped_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
KINDS = pytest.mark.parametrize("codes", CODES.values(), ids=CODES)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
R1 = (128, 64, 128, 512)


@KINDS
@DTYPES
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [128, 32, 20, 8, 3])
def test_mla_decode(
    codes: torch.dtype, dtype: torch.dtype, interleaved: bool, heads: int, poisoned_memory: None
) -> None:
    for lengths, block_size in (
        ([1, 0, 31, 32, 33, 64, 640, 1000], 64),
        ([5000, 1], 16),
        ([257] * 40, 64),
    ):
        check_mla_decode("cuda", "cuda", heads, block_size, R1, lengths, dtype, interleaved, codes)


@KINDS
def test_mla_decode_of_a_long_row(codes: torch.dtype, poisoned_memory: None) -> None:
    check_mla_decode("cuda", "cuda", 32, 64, R1, [30000, 77], torch.bfloat16, codes=codes)


@KINDS
@DTYPES
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("sizes", [(1536, 512, 64), (24, 40, 16)])
def test_mla_prepare(
    codes: torch.dtype, dtype: torch.dtype, interleaved: bool, sizes: tuple[int, int, int]
) -> None:
    q_lora, kv_lora, rope = sizes
    tokens = 300
    qkv_a, slots = (
        torch.randn(tokens, sum(sizes), device="cuda").to(dtype) * 2,
        torch.randperm(640, device="cuda")[:tokens],
    )
    qkv_a[7] = 0
    norms = Norms(
        torch.rand(q_lora, device="cuda").to(dtype),
        torch.rand(kv_lora, device="cuda").to(dtype),
        1e-6,
    )
    angles = torch.rand(tokens, rope // 2, device="cuda") * 6
    rotation = Rotation(angles.cos(), angles.sin(), interleaved)
    found, exact = (
        empty_latents((10, 64), kv_lora, rope, codes, dtype, torch.device("cuda")) for _ in range(2)
    )
    for one in (found, exact):
        one.scales.fill_(float("nan"))
    q = mla_prepare(qkv_a, norms, rotation, found, slots, backend="cuda")
    assert (
        distance(q, mla_prepare(qkv_a, norms, rotation, exact, slots, backend="reference").double())
        < TOLERANCE[dtype]
    )
    # What is rounded to 16 bits first may fall either way, and take a code along.
    ours, theirs = decoded(found).flatten(0, 1)[slots], decoded(exact).flatten(0, 1)[slots]
    assert distance(ours, theirs.double()) < TOLERANCE[dtype]
    assert found.scales.isnan().sum() == 640 - tokens


@KINDS
@DTYPES
@pytest.mark.parametrize(
    ("heads", "width", "block_size", "window", "lengths"),
    [
        ((32, 8), 128, 64, 0, [1, 0, 63, 64, 65, 128, 640, 1000]),
        ((32, 4), 128, 64, 0, [5000, 1, 30000]),
        ((8, 8), 64, 16, 0, [100, 17, 16, 15]),
        ((40, 2), 64, 64, 0, [700, 33]),
        ((12, 4), 80, 7, 0, [900, 900, 900]),
        ((12, 4), 24, 7, 0, [90, 9]),
        ((14, 2), 112, 64, 0, [300, 1]),
        ((24, 8), 160, 64, 0, [300, 1, 0]),
        ((16, 1), 256, 64, 0, [1000, 77]),
        ((32, 8), 128, 64, 100, [1, 0, 99, 100, 101, 640, 5000]),
        ((32, 8), 128, 64, 0, list(range(100, 164))),
    ],
)
def test_gqa_decode(
    codes: torch.dtype,
    heads: tuple[int, int],
    width: int,
    block_size: int,
    window: int,
    lengths: list[int],
    dtype: torch.dtype,
    poisoned_memory: None,
) -> None:
    check_gqa_decode("cuda", "cuda", heads, width, block_size, window, lengths, dtype, codes)


@KINDS
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "rope"),
    [(1, (32, 8), 128, 128), (300, (8, 1), 80, 40), (3, (4, 4), 256, 256)],
)
def test_gqa_prepare(
    codes: torch.dtype,
    tokens: int,
    heads: tuple[int, int],
    width: int,
    rope: int,
    normed: bool,
    interleaved: bool,
) -> None:
    qkv = torch.randn(tokens, (heads[0] + 2 * heads[1]) * width, device="cuda").bfloat16() * 3
    angles, slots = (
        torch.rand(tokens, rope // 2, device="cuda") * 6,
        torch.randperm(640, device="cuda")[:tokens],
    )
    gains = torch.rand(2, width, device="cuda").bfloat16()
    norms = Norms(gains[0], gains[1], 1e-6) if normed else None
    rotation = Rotation(angles.cos(), angles.sin(), interleaved)
    found, exact = (
        empty_keys((10, 64, heads[1], width), codes, torch.device("cuda")),
        torch.zeros(2, 10, 64, heads[1], width, device="cuda"),
    )
    found.key_scales.fill_(float("nan"))
    q = gqa_prepare(qkv, norms, rotation, found, slots, backend="cuda")
    in_float = Norms(gains[0].float(), gains[1].float(), 1e-6) if normed else None
    exact_q = gqa_prepare(
        qkv.float(), in_float, rotation, (exact[0], exact[1]), slots, backend="reference"
    )
    assert distance(q, exact_q.double()) < TOLERANCE[torch.bfloat16]
    for side, scales, wide in zip(found[:2], found.scales, exact):
        stored, expected = decode(side, scales).flatten(0, 1)[slots], wide.flatten(0, 1)[slots]
        assert distance(stored, expected.double()) < (1.2e-2 if codes == torch.int8 else 4e-2)
        assert (
            distance(
                scales.flatten(0, 1)[slots], expected.abs().amax(dim=-1).double() / LARGEST[codes]
            )
            < TOLERANCE[torch.bfloat16]
        )
    assert found.key_scales.isnan().sum() == (640 - tokens) * heads[1]


@KINDS
@pytest.mark.parametrize("room", [1 << 29, 1 << 20])
@pytest.mark.parametrize(
    ("heads", "width", "block_size", "window", "lengths", "news"),
    [
        ((32, 8), 128, 64, 0, [1, 300, 5000], [1, 300, 1000]),
        ((4, 2), 80, 7, 0, [200, 300], [100, 300]),
        ((8, 2), 128, 64, 100, [1, 50, 1000, 900], [1, 50, 600, 3]),
    ],
)
def test_gqa_prefill(
    codes: torch.dtype,
    room: int,
    heads: tuple[int, int],
    width: int,
    block_size: int,
    window: int,
    lengths: list[int],
    news: list[int],
    poisoned_memory: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All keys decoded at once, and in parts that begin within sequences."""
    monkeypatch.setattr("quantkit_kernels.triton.attention.prefill._EXPANDED_BYTES", room)
    case = grouped_attention(
        lengths, news, heads, width, block_size, torch.bfloat16, "cuda", window, codes=codes
    )
    out = gqa_prefill(
        case.q, case.pages.cache, case.prompts, scale=case.scale, window=window, backend="cuda"
    )
    assert distance(out, case.exact) < TOLERANCE[torch.bfloat16]


@KINDS
@pytest.mark.parametrize("room", [1 << 29, 1 << 22])
@pytest.mark.parametrize("sizes", [R1, (32, 16, 64, 96)])
def test_mla_prefill(
    codes: torch.dtype, sizes: tuple[int, int, int, int], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit_kernels.triton.attention.prefill._EXPANDED_BYTES", room)
    nope, rope, value, latent = sizes
    spans, heads = [(0, 300), (700, 40), (1500, 200)], 8
    tokens, rows = (
        sum(new for _, new in spans),
        1 + sum(-(-(start + new) // 64) for start, new in spans),
    )
    q = torch.randn(tokens, heads, nope + rope, device="cuda").bfloat16()
    kv_b = (torch.randn(heads, nope + value, latent, device="cuda") * latent**-0.5).bfloat16()
    angles = torch.rand(tokens, rope // 2, device="cuda") * 6
    cache = code_latents(
        torch.randn(rows, 64, latent + rope, device="cuda").bfloat16(), latent, codes
    )
    table, at = torch.zeros(3, 40, dtype=torch.int32, device="cuda"), 1
    for row, span in enumerate(spans):
        count = -(-sum(span) // 64)
        table[row, :count] = torch.arange(at, at + count).flip(0)
        at += count
    prompts, rotation = Prompts.of(spans, table), Rotation(angles.cos(), angles.sin())
    found = mla_prefill(q, kv_b, rotation, cache, prompts, scale=0.07, backend="cuda")
    exact = mla_prefill(
        q.float(), kv_b.float(), rotation, cache, prompts, scale=0.07, backend="reference"
    )
    assert distance(found, exact.double()) < TOLERANCE[torch.bfloat16]
