"""Grouped-query attention and attention of prompts on a CUDA device against float64. Skipped where
there is none."""

import pytest
import torch
from decode_attention import check_gqa_decode
from quantkit_kernels import (
    Norms,
    Prompts,
    Rotation,
    gqa_decode,
    gqa_prefill,
    gqa_prepare,
    mla_prefill,
)
from quantkit_kernels.samples import TOLERANCE, code_keys, distance, grouped_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("heads", "width", "block_size", "window", "lengths"),
    [
        ((32, 8), 128, 64, 0, [1, 0, 63, 64, 65, 128, 640, 1000]),
        ((32, 4), 128, 64, 0, [5000, 1, 30000]),
        ((8, 8), 64, 16, 0, [100, 17, 16, 15]),
        ((16, 1), 128, 64, 0, [700, 33]),
        ((40, 2), 64, 64, 0, [700, 33]),
        ((12, 4), 80, 7, 0, [900, 900, 900]),
        ((9, 1), 96, 1, 0, [40]),
        ((14, 2), 112, 64, 0, [300, 1]),
        ((24, 8), 160, 64, 0, [300, 1, 0]),
        ((8, 2), 192, 128, 0, [1000, 77]),
        ((16, 8), 256, 64, 0, [1000, 77]),
        ((16, 1), 256, 64, 0, [1000, 77]),
        ((32, 8), 128, 64, 100, [1, 0, 99, 100, 101, 640, 5000]),
        ((32, 8), 128, 64, 1, [1, 7]),
        ((32, 8), 128, 64, 0, [1] * 300),
        ((32, 8), 128, 64, 0, list(range(100, 164))),
        ((8, 8), 128, 64, 0, [0, 0]),
    ],
)
def test_gqa_decode(
    heads: tuple[int, int],
    width: int,
    block_size: int,
    window: int,
    lengths: list[int],
    dtype: torch.dtype,
    poisoned_memory: None,
) -> None:
    check_gqa_decode("cuda", "cuda", heads, width, block_size, window, lengths, dtype)


def test_a_captured_gqa_decode_follows_the_lengths() -> None:
    case = grouped_attention([640] * 8, [1] * 8, (32, 8), 128, 64, torch.bfloat16, "cuda")
    lengths = case.pages.seq_lens

    def run(backend: str) -> torch.Tensor:
        return gqa_decode(case.q, case.pages, scale=case.scale, backend=backend)

    run("cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run("cuda")
    for now in ([640] * 8, [1, 2, 3, 33, 100, 400, 639, 640], [32] * 8, [0] * 7 + [1]):
        lengths.copy_(torch.tensor(now))
        graph.replay()
        torch.cuda.synchronize()
        assert distance(out, run("reference").double()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "rope"),
    [(1, (32, 8), 128, 128), (300, (8, 1), 80, 40), (3, (4, 4), 256, 256)],
)
def test_gqa_prepare(
    tokens: int, heads: tuple[int, int], width: int, rope: int, normed: bool, interleaved: bool
) -> None:
    qkv = torch.randn(tokens, (heads[0] + 2 * heads[1]) * width, device="cuda").bfloat16() * 3
    angles, slots = (
        torch.rand(tokens, rope // 2, device="cuda") * 6,
        torch.randperm(640, device="cuda")[:tokens],
    )
    gains = [torch.rand(width, device="cuda").bfloat16() for _ in range(2)]
    found, exact = (
        torch.full((2, 10, 64, heads[1], width), float("nan"), dtype=kind, device="cuda")
        for kind in (qkv.dtype, torch.float32)
    )
    rotation = Rotation(angles.cos(), angles.sin(), interleaved)
    norms, in_float = (
        Norms(*one, 1e-6) if normed else None for one in (gains, [gain.float() for gain in gains])
    )
    q = gqa_prepare(qkv, norms, rotation, found.unbind(), slots, backend="cuda")
    exact_q = gqa_prepare(
        qkv.float(), in_float, rotation, exact.unbind(), slots, backend="reference"
    )
    assert distance(q, exact_q.double()) < TOLERANCE[torch.bfloat16]
    for side, other in zip(found, exact):
        rows = side.view(640, -1)
        assert (
            distance(rows[slots], other.view(640, -1)[slots].double()) < TOLERANCE[torch.bfloat16]
        )
        assert rows.isnan().all(dim=-1).sum() == 640 - tokens


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("heads", "width", "rope"),
    [
        ((32, 8), 128, 128),
        ((7, 1), 64, 64),
        ((3, 3), 80, 40),
        ((9, 3), 96, 96),
        ((2, 1), 120, 64),
        ((6, 2), 192, 64),
        ((16, 8), 256, 256),
        ((40, 2), 24, 8),
    ],
)
def test_gqa_prepare_of_a_prompt_is_that_of_its_tokens(
    heads: tuple[int, int],
    width: int,
    rope: int,
    normed: bool,
    interleaved: bool,
    codes: torch.dtype | None,
    dtype: torch.dtype,
) -> None:
    """To the bit: of many a block takes a token, of few a warp takes a head."""
    tokens, blocks = 300, 5
    qkv = torch.randn(tokens, (heads[0] + 2 * heads[1]) * width, device="cuda").to(dtype) * 3
    angles, slots = (
        torch.rand(tokens, rope // 2, device="cuda") * 6,
        torch.randperm(64 * blocks, device="cuda")[:tokens],
    )
    gains = torch.rand(2, width, device="cuda").to(dtype)

    def run(pieces: int) -> list[torch.Tensor]:
        plain = torch.zeros(2, blocks, 64, heads[1], width, dtype=dtype, device="cuda")
        room = plain.unbind() if codes is None else code_keys(plain[0], plain[1], codes)
        made = []
        for at in torch.arange(tokens, device="cuda").chunk(pieces):
            rotation = Rotation(angles[at].cos(), angles[at].sin(), interleaved)
            norms = Norms(gains[0], gains[1], 1e-6) if normed else None
            made.append(gqa_prepare(qkv[at], norms, rotation, room, slots[at], backend="cuda"))
        return [torch.cat(made), *room]

    whole, few = run(1), run(4)
    assert whole[0].abs().max() > 0
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(whole, few, strict=True)
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("heads", "width", "block_size", "window", "lengths", "news"),
    [
        ((32, 8), 128, 64, 0, [1, 300, 5000], [1, 300, 1000]),
        ((8, 1), 64, 16, 0, [77, 129], [77, 1]),
        ((4, 2), 80, 7, 0, [200, 300], [100, 300]),
        ((4, 2), 96, 64, 0, [200], [130]),
        ((4, 2), 192, 64, 0, [200, 64], [130, 64]),
        ((4, 2), 256, 64, 0, [200, 700], [130, 700]),
        ((8, 2), 128, 64, 100, [1, 50, 1000, 900], [1, 50, 600, 3]),
        ((8, 2), 128, 64, 1, [200], [200]),
    ],
)
def test_gqa_prefill(
    heads: tuple[int, int],
    width: int,
    block_size: int,
    window: int,
    lengths: list[int],
    news: list[int],
    dtype: torch.dtype,
    poisoned_memory: None,
) -> None:
    case = grouped_attention(lengths, news, heads, width, block_size, dtype, "cuda", window)
    out = gqa_prefill(
        case.q, case.pages.cache, case.prompts, scale=case.scale, window=window, backend="cuda"
    )
    assert distance(out, case.exact) < TOLERANCE[dtype]


def test_a_prompt_cut_anywhere_gives_the_same_bits() -> None:
    case = grouped_attention([2000], [2000], (8, 2), 128, 64, torch.bfloat16, "cuda")
    q, cache, table = case.q, case.pages.cache, case.pages.block_table
    whole = gqa_prefill(q, cache, case.prompts, scale=case.scale, backend="cuda")
    for start, stop in ((0, 1), (1, 130), (130, 1111), (1111, 2000)):
        part = Prompts.of([(start, stop - start)], table)
        assert torch.equal(
            gqa_prefill(q[start:stop], cache, part, scale=case.scale, backend="cuda"),
            whole[start:stop],
        )


@pytest.mark.parametrize("room", [1 << 29, 1 << 22])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("sizes", [(128, 64, 128, 512), (32, 16, 64, 96)])
def test_mla_prefill(
    sizes: tuple[int, int, int, int], interleaved: bool, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All latents expanded at once, and in parts that begin within sequences."""
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
    cache = torch.randn(rows, 64, latent + rope, device="cuda").bfloat16()
    table, at = torch.zeros(3, 40, dtype=torch.int32, device="cuda"), 1
    for row, span in enumerate(spans):
        count = -(-sum(span) // 64)
        table[row, :count] = torch.arange(at, at + count).flip(0)
        at += count
    prompts, rotation = Prompts.of(spans, table), Rotation(angles.cos(), angles.sin(), interleaved)
    found = mla_prefill(q, kv_b, rotation, cache, prompts, scale=0.07, backend="cuda")
    exact = mla_prefill(
        q.float(), kv_b.float(), rotation, cache.float(), prompts, scale=0.07, backend="reference"
    )
    assert distance(found, exact.double()) < TOLERANCE[torch.bfloat16]
