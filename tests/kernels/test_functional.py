"""Norms, activation, router, rotary embedding and latent attention against formulas written out in
float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from quantkit_kernels import (
    Gating,
    Norms,
    PagedLatents,
    Rotation,
    Routing,
    add_rms_norm,
    gate_and_mul,
    likeliest,
    mla_decode,
    mla_prepare,
    mla_queries,
    moe_gate,
    prepare_dense,
    rms_norm,
    rope,
    route,
    silu_and_mul,
)
from quantkit_kernels.backends import choose
from quantkit_kernels.codes import empty_latents
from quantkit_kernels.cpu.build import why_no_library
from quantkit_kernels.paged import parts_of
from quantkit_kernels.samples import TOLERANCE, distance, latent_attention

DTYPES = tuple(TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_activation(dtype: torch.dtype) -> None:
    for shape in ((1, 384), (2, 5, 96)):
        x, residual = torch.randn(shape).to(dtype) * 3, torch.randn(shape).to(dtype)
        weight = torch.rand(shape[-1]).bfloat16()
        total = x + residual

        def norm(value: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
            return (
                value.double()
                / (value.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
                * weight.double()
            )

        assert distance(rms_norm(x, weight, 1e-6), norm(x)) < TOLERANCE[dtype]
        normed, summed = add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(summed, total)
        assert distance(normed, norm(total)) < TOLERANCE[dtype]
        gate, up = x.double().chunk(2, dim=-1)
        assert distance(silu_and_mul(x), gate / (1 + (-gate).exp()) * up) < TOLERANCE[dtype]
        held, inside = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
        exact = held / (1 + (-1.702 * held).exp()) * (inside + 0.5)
        assert distance(gate_and_mul(x, Gating(1.702, 1.0, 0.5)), exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_activation_by_rows_is_that_of_all_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler: to the last bit, whatever rows are left over, of slices too."""
    monkeypatch.setattr("quantkit_kernels.cpu.functional._ROWS_BYTES", 3 * 4 * 96)
    monkeypatch.setattr("quantkit_kernels.cpu.functional.once", lambda name: None)
    for shape in ((1, 96), (7, 96), (2, 5, 96), (96,), (0, 96)):
        x = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., : shape[-1]]
        assert torch.equal(silu_and_mul(x, backend="cpu"), silu_and_mul(x, backend="reference"))
    assert choose("silu_and_mul", "auto", torch.device("cpu")) == "cpu"


@pytest.mark.skipif(bool(why_no_library("silu")), reason=str(why_no_library("silu")))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_compiled_activation(dtype: torch.dtype) -> None:
    """Of odd widths, slices and gates far from zero; numbers that are none stay none."""
    for shape in ((1, 2), (7, 26), (2, 5, 96), (66,), (0, 96)):
        x = (torch.randn(*shape[:-1], 2 * shape[-1]) * 30).to(dtype)[..., : shape[-1]]
        gate, up = x.double().chunk(2, dim=-1)
        found = silu_and_mul(x, backend="cpu")
        assert found.shape == up.shape
        assert torch.allclose(
            found.double(),
            F.silu(gate) * up,
            rtol=5e-3 if dtype == torch.bfloat16 else 1e-6,
            atol=1e-6,
        )
    for value in (float("nan"), float("inf")):
        x = torch.tensor([[value, -1.0, 2.0, 1.0, 1.0, value]], dtype=dtype)
        assert torch.equal(
            silu_and_mul(x, backend="cpu").isfinite(), torch.tensor([[False, True, False]])
        )


def plain_route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    scoring: str,
) -> tuple[list[list[int]], torch.Tensor]:
    """The choice, spelled out for one token at a time, and what each expert is chosen by."""
    chosen, chosen_by = [], []
    for row in logits.double():
        scores = row.sigmoid() if scoring == "sigmoid" else row.softmax(-1)
        choice = (scores if bias is None else scores + bias.double()).tolist()
        size = len(choice) // n_group
        by_group = sorted(
            range(n_group), key=lambda g: -sum(sorted(choice[g * size : (g + 1) * size])[-2:])
        )
        kept = [e for e in range(len(choice)) if e // size in by_group[:topk_group]]
        chosen.append(sorted(kept, key=lambda e: -choice[e])[:top_k])
        chosen_by.append(choice)
    return chosen, torch.tensor(chosen_by, dtype=torch.float64)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("experts", "top_k", "n_group", "topk_group"),
    [(256, 8, 8, 4), (16, 4, 4, 2), (64, 6, 1, 1), (8, 8, 1, 1)],
)
def test_route(
    scoring: str, biased: bool, experts: int, top_k: int, n_group: int, topk_group: int
) -> None:
    logits = torch.randn(40, experts) * 2
    bias = (
        torch.randn(experts) * 2 if biased else None
    )  # large enough to make some choices negative
    rule = Routing(experts, top_k, scoring_func=scoring, n_group=n_group, topk_group=topk_group)
    ids, weights = route(logits, bias, replace(rule, routed_scaling_factor=2.5))
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    plain_ids, choice = plain_route(logits, bias, top_k, n_group, topk_group, scoring)
    # Two experts whose float32 values round to one another may change places: which do is the
    # processor's.
    assert all(len(set(row)) == top_k for row in ids.tolist())
    assert distance(choice.gather(1, ids).float(), choice.gather(1, torch.tensor(plain_ids))) < 1e-6
    scores = (
        logits.double().sigmoid() if scoring == "sigmoid" else logits.double().softmax(-1)
    ).gather(1, ids)
    assert distance(weights, scores / scores.sum(-1, keepdim=True) * 2.5) < 1e-6
    _, plain = route(logits, bias, replace(rule, norm_topk_prob=False))
    assert distance(plain, scores) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_multiplies_and_routes(dtype: torch.dtype) -> None:
    x, router, bias = torch.randn(5, 48).to(dtype), torch.randn(16, 48), torch.randn(16) * 0.1
    rule = Routing(16, 3, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    ids, weights = moe_gate(x, router, bias, rule)
    expected_ids, expected = route(x.float() @ router.T, bias, rule)
    assert torch.equal(ids, expected_ids)
    assert distance(weights, expected.double()) < 1e-5


def test_shared_experts_follow_the_chosen_ones() -> None:
    logits = torch.randn(5, 16)
    plain_ids, plain_weights = route(logits, None, Routing(16, 3))
    ids, weights = route(logits, None, Routing(16, 3, num_joined_experts=2))
    assert torch.equal(ids[:, :3], plain_ids)
    assert torch.equal(weights[:, :3], plain_weights)
    assert ids[:, 3:].tolist() == [[16, 17]] * 5
    assert weights[:, 3:].eq(1).all()


def turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, heads, D] in float64 by angles [T, D/2]."""
    x = x.double()
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    pairs = torch.complex(first, second) * torch.polar(
        torch.ones_like(angles.double()), angles.double()
    ).unsqueeze(1)
    sides = torch.view_as_real(pairs)
    return sides.flatten(-2) if interleaved else torch.cat(sides.unbind(-1), dim=-1)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_pairs(interleaved: bool) -> None:
    angles = torch.rand(50, 8) * 6
    x, positions = torch.randn(4, 3, 16), torch.tensor([49, 0, 7, 7])
    y = rope(x, positions, angles.cos(), angles.sin(), interleaved=interleaved)
    assert distance(y, turned(x, angles[positions], interleaved)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
def test_mla_prepare_norms_turns_and_caches(dtype: torch.dtype, interleaved: bool) -> None:
    q_lora, kv_lora, rope_dim, eps = 24, 40, 16, 1e-6
    qkv_a, q_norm, kv_norm = (
        torch.randn(3, q_lora + kv_lora + rope_dim).to(dtype) * 2,
        torch.rand(q_lora),
        torch.rand(kv_lora),
    )
    angles = torch.rand(3, rope_dim // 2) * 6
    cache = torch.full((4, 8, kv_lora + rope_dim), float("nan"), dtype=dtype)
    slots = torch.tensor([30, 0, 9])
    q_a = mla_prepare(
        qkv_a,
        Norms(q_norm, kv_norm, eps),
        Rotation(angles.cos(), angles.sin(), interleaved),
        cache,
        slots,
    )

    def norm(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (
            value.double()
            / (value.double().square().mean(-1, keepdim=True) + eps).sqrt()
            * weight.double()
        )

    exact_q, latent, k_pe = qkv_a.split([q_lora, kv_lora, rope_dim], dim=-1)
    assert q_a.dtype == dtype
    assert distance(q_a, norm(exact_q, q_norm)) < TOLERANCE[dtype]
    stored = cache.view(-1, kv_lora + rope_dim)
    exact = torch.cat(
        [norm(latent, kv_norm), turned(k_pe.unsqueeze(1), angles, interleaved).squeeze(1)], dim=-1
    )
    assert distance(stored[slots], exact) < TOLERANCE[dtype]
    untouched = torch.ones(32, dtype=torch.bool).index_fill(0, slots, False)
    assert stored[untouched].isnan().all()


def test_mla_queries_are_the_product_of_what_mla_prepare_returns() -> None:
    """Also of a cache in codes by a known step, and arguments are checked the same."""
    qkv_a, norms, angles = (
        torch.randn(3, 24 + 40 + 16),
        Norms(torch.rand(24), torch.rand(40), 1e-6),
        torch.rand(3, 8),
    )
    rotation, slots = Rotation(angles.cos(), angles.sin()), torch.tensor([30, 0, 9])
    q_b = prepare_dense(torch.randn(32, 24), dtype=torch.float32)
    coded = empty_latents((4, 8), 40, 16, torch.int8, torch.float32, torch.device("cpu"))
    for cache, known in ((torch.zeros(4, 8, 56), None), (coded, torch.tensor(0.02))):
        q_a = mla_prepare(qkv_a, norms, rotation, cache, slots, code_step=known)
        expected = [part.flatten(0, 1)[slots] for part in parts_of(cache)]
        for part in parts_of(cache):
            part.zero_()
        assert torch.equal(
            mla_queries(qkv_a, norms, rotation, cache, slots, q_b, code_step=known), q_b(q_a)
        )
        assert all(
            torch.equal(part.flatten(0, 1)[slots], one)
            for part, one in zip(parts_of(cache), expected)
        )
    with pytest.raises(ValueError, match="code_step: the cache holds no codes"):
        mla_queries(
            qkv_a, norms, rotation, torch.zeros(4, 8, 56), slots, q_b, code_step=torch.tensor(0.02)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("block_size", "heads", "interleaved"),
    [(1, 5, True), (16, 5, True), (64, 5, True), (16, 12, False)],
)
def test_mla_decode_over_scattered_blocks(
    dtype: torch.dtype, backend: str, block_size: int, heads: int, interleaved: bool
) -> None:
    sizes = (24, 16, 20, 64)
    case = latent_attention(
        [1, 0, 37, 64],
        heads=heads,
        block_size=block_size,
        sizes=sizes,
        dtype=dtype,
        interleaved=interleaved,
    )
    out = mla_decode(*case.arguments, scale=case.scale, backend=backend)
    assert out.dtype == dtype
    assert distance(out, case.exact) < TOLERANCE[dtype]
    assert out[1].abs().max() == 0


def test_wrong_arguments_are_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight: shape"):
        rms_norm(x, torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, torch.zeros(2, 4), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="odd"):
        silu_and_mul(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="odd"):
        gate_and_mul(torch.zeros(2, 7), Gating(limit=1.0))
    with pytest.raises(ValueError, match="n_group"):
        route(x, None, Routing(8, 2, n_group=3))
    with pytest.raises(ValueError, match="num_experts_per_tok: 5"):
        route(x, None, Routing(8, 5, n_group=4, topk_group=2))
    with pytest.raises(ValueError, match="scoring_func: 'relu'"):
        route(x, None, Routing(8, 2, scoring_func="relu"))
    with pytest.raises(ValueError, match="logits: shape"):
        route(x, None, Routing(9, 2))
    with pytest.raises(ValueError, match="bias: dtype"):
        route(x, torch.zeros(8).double(), Routing(8, 2))
    with pytest.raises(ValueError, match="positions"):
        rope(
            torch.zeros(2, 1, 4),
            torch.zeros(3, dtype=torch.int64),
            torch.ones(4, 2),
            torch.ones(4, 2),
        )
    angles, slots = (
        Rotation(torch.zeros(1, 2), torch.zeros(1, 2)),
        torch.zeros(1, dtype=torch.int64),
    )
    norms = Norms(torch.ones(2), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="qkv_a: shape"):
        mla_prepare(torch.zeros(1, 9), norms, angles, torch.zeros(1, 4, 8), slots)
    with pytest.raises(ValueError, match="not contiguous"):
        mla_prepare(torch.zeros(1, 10), norms, angles, torch.zeros(4, 1, 8).expand(4, 2, 8), slots)
    q, kv_b, where = (
        torch.zeros(1, 2, 8),
        torch.zeros(2, 6, 4),
        (torch.zeros(1, 1).int(), torch.ones(1).int()),
    )
    with pytest.raises(ValueError, match="cache: shape"):
        mla_decode(q, kv_b, angles, PagedLatents(torch.zeros(1, 4, 6), *where), scale=1.0)
    with pytest.raises(ValueError, match="kv_b: 4 rows"):
        mla_decode(q, kv_b[:, :4], angles, PagedLatents(torch.zeros(1, 4, 8), *where), scale=1.0)
    with pytest.raises(ValueError, match="backend"):
        likeliest(x, backend="cpu")
