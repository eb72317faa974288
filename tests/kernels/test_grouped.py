"""Grouped-query attention and attention of prompts, of every backend that runs here, against
float64."""

import pytest
import torch
from quantkit_kernels import (
    Norms,
    PagedKeys,
    PagedLatents,
    Prompts,
    Rotation,
    backends,
    gqa_decode,
    gqa_prefill,
    gqa_prepare,
    mla_decode,
    mla_prefill,
    reference,
)
from quantkit_kernels import cpu as cpu_backend
from quantkit_kernels.cpu.build import why_no_library
from quantkit_kernels.reference import prompts as prompts_in_torch
from quantkit_kernels.samples import TOLERANCE, distance, grouped_attention

DTYPES = tuple(TOLERANCE)


BACKENDS = [
    "reference",
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(bool(why_no_library("gqa")), reason=str(why_no_library("gqa"))),
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize(
    ("heads", "width", "block_size"), [((6, 2), 16, 7), ((4, 4), 24, 64), ((5, 1), 80, 1)]
)
def test_gqa_decode_over_scattered_blocks(
    heads: tuple[int, int],
    width: int,
    block_size: int,
    window: int,
    dtype: torch.dtype,
    backend: str,
) -> None:
    lengths = [1, 0, 37, 64]
    case = grouped_attention(lengths, [1] * 4, heads, width, block_size, dtype, window=window)
    out = gqa_decode(case.q, case.pages, scale=case.scale, window=window, backend=backend)
    assert out.dtype == dtype
    assert distance(out, case.exact) < TOLERANCE[dtype]
    assert out[1].abs().max() == 0


@pytest.mark.parametrize("threads", [1, 3, 7])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_threads_share_a_row(threads: int, backend: str) -> None:
    """More threads than key heads: a row's tokens lie in several parts, some of them empty."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for lengths in ([2], [300], [0]):
            case = grouped_attention(lengths, [1], (4, 1), 32, 16, torch.float32)
            wide = case.pages._replace(
                keys=case.pages.keys.float(), values=case.pages.values.float()
            )
            for pages in (case.pages, wide):
                out = gqa_decode(case.q, pages, scale=case.scale, backend=backend)
                assert (out - case.exact).norm() <= 3e-6 * case.exact.norm()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 1, 50])
def test_gqa_prefill_of_several_prompts(window: int, dtype: torch.dtype, backend: str) -> None:
    case = grouped_attention([3, 300, 140], [3, 200, 1], (6, 2), 16, 16, dtype, window=window)
    out = gqa_prefill(
        case.q, case.pages.cache, case.prompts, scale=case.scale, window=window, backend=backend
    )
    assert distance(out, case.exact) < TOLERANCE[dtype]


@pytest.mark.skipif(bool(why_no_library("prompts")), reason=str(why_no_library("prompts")))
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("at_once", [4096, 100])
@pytest.mark.parametrize("window", [0, 1, 130])
def test_compiled_attention_of_prompts_is_float32(
    window: int, at_once: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd heads, keys in one part or several, of which the first tokens may see none."""
    monkeypatch.setattr(prompts_in_torch, "AT_ONCE", at_once)
    monkeypatch.setattr(prompts_in_torch, "attend_one", None)  # it is not asked
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for heads, width in (((14, 2), 64), ((3, 3), 80), ((5, 1), 24), ((2, 1), 256)):
        case = grouped_attention(
            [1, 700, 257], [1, 500, 3], heads, width, 16, torch.float32, window=window
        )
        out = gqa_prefill(
            case.q, case.pages.cache, case.prompts, scale=case.scale, window=window, backend="cpu"
        )
        assert distance(out, case.exact) < 2e-6


@pytest.mark.skipif(bool(why_no_library("prompts")), reason=str(why_no_library("prompts")))
def test_a_score_that_is_no_number_stays_none() -> None:
    case = grouped_attention([300], [300], (6, 2), 16, 16, torch.float32)
    case.q[290, 1] = float("nan")
    out = gqa_prefill(case.q, case.pages.cache, case.prompts, scale=case.scale, backend="cpu")
    assert out[290, 1].isnan().all()
    assert out.isnan().sum() == 16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_is_a_key_without_a_value(backend: str, window: int, dtype: torch.dtype) -> None:
    sinks = torch.tensor([-30.0, -1.0, 0.0, 2.0, 8.0, 40.0])
    case = grouped_attention(
        [1, 0, 37, 64], [1] * 4, (6, 2), 16, 7, dtype, window=window, sinks=sinks
    )
    out = gqa_decode(
        case.q, case.pages, scale=case.scale, window=window, sinks=sinks, backend=backend
    )
    assert distance(out, case.exact) < TOLERANCE[dtype]
    prompts = grouped_attention(
        [3, 300, 140], [3, 200, 1], (6, 2), 16, 16, dtype, window=window, sinks=sinks
    )
    out = gqa_prefill(
        prompts.q,
        prompts.pages.cache,
        prompts.prompts,
        scale=case.scale,
        window=window,
        sinks=sinks,
        backend=backend,
    )
    assert distance(out, prompts.exact) < TOLERANCE[dtype]


def test_backends_without_sinks_are_told_and_the_reference_computes_them() -> None:
    cpu = torch.device("cpu")
    assert backends.find_with_sinks("gqa_prefill", "auto", cpu) is cpu_backend
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(cpu_backend, "SINKS")
        backends.forget()
        assert backends.find_with_sinks("gqa_prefill", "auto", cpu) is reference
        with pytest.raises(ValueError, match="cpu runs gqa_prefill without attention sinks"):
            backends.find_with_sinks("gqa_prefill", "cpu", cpu)
        told = {row.operator: row.reason for row in backends.table("cpu") if row.backend == "cpu"}
        assert told["gqa_prefill"] == "attention sinks: another backend"
        backends.forget()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_gqa_prepare_norms_turns_and_caches(normed: bool, interleaved: bool) -> None:
    """Heads of 24 of which 16 channels turn."""
    tokens, heads, kv_heads, width, eps = 3, 4, 2, 24, 1e-6
    qkv, gains = (
        torch.randn(tokens, (heads + 2 * kv_heads) * width),
        (torch.rand(width), torch.rand(width)),
    )
    angles, slots = torch.rand(tokens, 8) * 6, torch.tensor([30, 0, 9])
    keys, values = torch.full((2, 4, 8, kv_heads, width), float("nan")).unbind()
    norms = Norms(*gains, eps) if normed else None
    q = gqa_prepare(
        qkv, norms, Rotation(angles.cos(), angles.sin(), interleaved), (keys, values), slots
    )
    sides = qkv.double().unflatten(1, (-1, width)).split([heads, kv_heads, kv_heads], dim=1)

    def expected(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        if normed:
            x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain.double()
        first, second = (
            (x[..., :16:2], x[..., 1:16:2]) if interleaved else (x[..., :8], x[..., 8:16])
        )
        pairs = torch.complex(first, second) * torch.polar(
            torch.ones_like(angles.double()), angles.double()
        ).unsqueeze(1)
        both = (
            torch.view_as_real(pairs).flatten(-2)
            if interleaved
            else torch.cat((pairs.real, pairs.imag), dim=-1)
        )
        return torch.cat((both, x[..., 16:]), dim=-1)

    assert distance(q, expected(sides[0], gains[0])) < 1e-6
    for cache, side in ((keys, expected(sides[1], gains[1])), (values, sides[2])):
        stored = cache.view(-1, kv_heads, width)
        assert distance(stored[slots], side) < 1e-6
        assert stored.isnan().flatten(1).all(dim=1).sum() == 29


def test_a_prompt_cut_anywhere_gives_the_same() -> None:
    case = grouped_attention([200], [200], (4, 2), 16, 16, torch.float32)
    q, cache, table = case.q, case.pages.cache, case.pages.block_table
    whole = gqa_prefill(q, cache, case.prompts, scale=case.scale)
    for start, stop in ((0, 1), (1, 130), (130, 200)):
        part = Prompts.of([(start, stop - start)], table)
        assert (
            distance(
                gqa_prefill(q[start:stop], cache, part, scale=case.scale),
                whole[start:stop].double(),
            )
            < 1e-6
        )


@pytest.mark.parametrize("keys", [4096, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mla_prefill_is_mla_decode(
    dtype: torch.dtype, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expanded or absorbed, at once or some keys at a time: each token of two prompts as a row of
    its own."""
    monkeypatch.setattr(prompts_in_torch, "_KEYS", keys)
    monkeypatch.setattr(prompts_in_torch, "AT_ONCE", keys)
    spans, (nope, rope, value, latent), heads = [(130, 20), (0, 150)], (24, 8, 16, 40), 3
    tokens = sum(new for _, new in spans)
    q, kv_b = (
        torch.randn(tokens, heads, nope + rope).to(dtype),
        (torch.randn(heads, nope + value, latent) * latent**-0.5).to(dtype),
    )
    cache, angles = torch.randn(21, 16, latent + rope).to(dtype), torch.rand(tokens, rope // 2) * 6
    table = (torch.randperm(20) + 1).view(2, 10)
    rows = torch.cat([table[i].expand(new, -1) for i, (_, new) in enumerate(spans)])
    seen = torch.cat([torch.arange(start, start + new) + 1 for start, new in spans])
    rotation = Rotation(angles.cos(), angles.sin())
    pages = PagedLatents(cache.float(), rows, seen)
    exact = mla_decode(q.float(), kv_b.float(), rotation, pages, scale=0.2, backend="reference")
    for backend in ("reference", "cpu"):
        out = mla_prefill(
            q, kv_b, rotation, cache, Prompts.of(spans, table), scale=0.2, backend=backend
        )
        assert distance(out, exact.double()) < 2 * TOLERANCE[dtype]


def test_wrong_arguments_are_refused() -> None:
    q, cache, table, lengths = (
        torch.zeros(1, 4, 8),
        torch.zeros(2, 4, 2, 8),
        torch.zeros(1, 1).int(),
        torch.ones(1).int(),
    )
    with pytest.raises(ValueError, match="keys: shape"):
        gqa_decode(q, PagedKeys(cache[..., :4], cache, table, lengths), scale=1.0)
    three = cache[:, :, :1].repeat(1, 1, 3, 1)
    with pytest.raises(ValueError, match="share 3 key heads"):
        gqa_decode(q, PagedKeys(three, three, table, lengths), scale=1.0)
    with pytest.raises(ValueError, match="window: -1"):
        gqa_decode(q, PagedKeys(cache, cache, table, lengths), scale=1.0, window=-1)
    prompts = Prompts.of([(0, 2)], table)
    with pytest.raises(ValueError, match="the prompts have 2"):
        gqa_prefill(q, (cache, cache), prompts, scale=1.0)
    rotation, slots = Rotation(torch.zeros(1, 2), torch.zeros(1, 2)), torch.zeros(1).long()
    with pytest.raises(ValueError, match="not heads next to 2 of 8"):
        gqa_prepare(torch.zeros(1, 36), None, rotation, (cache, cache), slots)
    with pytest.raises(ValueError, match=r"norms\.k: shape"):
        gqa_prepare(
            torch.zeros(1, 64),
            Norms(torch.ones(8), torch.ones(4), 1e-6),
            rotation,
            (cache, cache),
            slots,
        )
    one, narrow = Prompts.of([(0, 1)], table), Rotation(torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(ValueError, match="cache: 9 values"):
        mla_prefill(q[:, :, :6], torch.zeros(4, 6, 6), narrow, torch.zeros(2, 4, 9), one, scale=1.0)
