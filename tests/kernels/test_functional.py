"""Norms, activation, router, rotary embedding and latent attention against formulas written out in float64."""

import math

import pytest
import torch
from quantkit_kernels import add_rms_norm, mla_decode, rms_norm, rope, route, silu_and_mul
from quantkit_kernels.samples import TOLERANCE, distance

DTYPES = tuple(TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_activation(dtype: torch.dtype) -> None:
    for shape in ((1, 384), (2, 5, 96)):
        x, residual = torch.randn(shape).to(dtype) * 3, torch.randn(shape).to(dtype)
        weight = torch.rand(shape[-1]).bfloat16()
        total = x + residual

        def norm(value: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
            return value.double() / (value.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()

        assert distance(rms_norm(x, weight, 1e-6), norm(x)) < TOLERANCE[dtype]
        normed, summed = add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(summed, total)
        assert distance(normed, norm(total)) < TOLERANCE[dtype]
        gate, up = x.double().chunk(2, dim=-1)
        assert distance(silu_and_mul(x), gate / (1 + (-gate).exp()) * up) < TOLERANCE[dtype]


def plain_route(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, n_group: int, topk_group: int, scoring: str
) -> list[list[int]]:
    """The choice, spelled out for one token at a time."""
    chosen = []
    for row in logits.double():
        scores = row.sigmoid() if scoring == "sigmoid" else row.softmax(-1)
        choice = (scores if bias is None else scores + bias.double()).tolist()
        size = len(choice) // n_group
        by_group = sorted(range(n_group), key=lambda g: -sum(sorted(choice[g * size : (g + 1) * size])[-2:]))
        kept = [e for e in range(len(choice)) if e // size in by_group[:topk_group]]
        chosen.append(sorted(kept, key=lambda e: -choice[e])[:top_k])
    return chosen


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("experts", "top_k", "n_group", "topk_group"), [(256, 8, 8, 4), (16, 4, 4, 2), (64, 6, 1, 1), (8, 8, 1, 1)])
def test_route(scoring: str, biased: bool, experts: int, top_k: int, n_group: int, topk_group: int) -> None:
    logits = torch.randn(40, experts) * 2
    bias = torch.randn(experts) * 2 if biased else None  # large enough to make some choices negative
    ids, weights = route(
        logits, bias, top_k=top_k, n_group=n_group, topk_group=topk_group, scoring=scoring, norm_topk_prob=True, routed_scaling_factor=2.5
    )
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert ids.tolist() == plain_route(logits, bias, top_k, n_group, topk_group, scoring)
    scores = (logits.double().sigmoid() if scoring == "sigmoid" else logits.double().softmax(-1)).gather(1, ids)
    assert distance(weights, scores / scores.sum(-1, keepdim=True) * 2.5) < 1e-6
    _, plain = route(logits, bias, top_k=top_k, n_group=n_group, topk_group=topk_group, scoring=scoring, norm_topk_prob=False)
    assert distance(plain, scores) < 1e-6


def test_rope_turns_interleaved_pairs() -> None:
    angles = torch.rand(50, 8) * 6
    x, positions = torch.randn(4, 3, 16), torch.tensor([49, 0, 7, 7])
    y = rope(x, positions, angles.cos(), angles.sin())
    pairs = torch.view_as_complex(x.double().unflatten(-1, (8, 2)))
    turned = pairs * torch.polar(torch.ones(4, 1, 8, dtype=torch.float64), angles[positions].double().unsqueeze(1))
    assert distance(y, torch.view_as_real(turned).flatten(-2)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_mla_decode_over_scattered_blocks(dtype: torch.dtype, block_size: int) -> None:
    heads, lora, rope_dim = 5, 64, 16
    lengths = [1, 0, 37, 64]
    max_blocks = -(-max(lengths) // block_size)
    table = torch.randperm(4 * max_blocks + 1)[: 4 * max_blocks].view(4, max_blocks)
    cache = torch.full((4 * max_blocks + 1, block_size, lora + rope_dim), float("nan"), dtype=torch.bfloat16)
    q = torch.randn(4, heads, lora + rope_dim).to(dtype)
    exact = torch.zeros(4, heads, lora, dtype=torch.float64)
    for row, length in enumerate(lengths):
        latents = torch.randn(length, lora + rope_dim).bfloat16()
        for token in range(length):
            cache[table[row, token // block_size], token % block_size] = latents[token]
        if length:
            probabilities = (q[row].double() @ latents.double().T / math.sqrt(96)).softmax(-1)
            exact[row] = probabilities @ latents.double()[:, :lora]
    out = mla_decode(q, cache, table.int(), torch.tensor(lengths), scale=1 / math.sqrt(96), kv_lora_rank=lora)
    assert out.dtype == dtype
    assert distance(out, exact) < TOLERANCE[dtype]
    assert out[1].abs().max() == 0


def test_wrong_arguments_are_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight: shape"):
        rms_norm(x, torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, torch.zeros(2, 4), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="odd"):
        silu_and_mul(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="n_group"):
        route(x, None, top_k=2, n_group=3)
    with pytest.raises(ValueError, match="top_k: 5"):
        route(x, None, top_k=5, n_group=4, topk_group=2)
    with pytest.raises(ValueError, match="scoring"):
        route(x, None, top_k=2, scoring="relu")
    with pytest.raises(ValueError, match="bias: dtype"):
        route(x, torch.zeros(8).double(), top_k=2)
    with pytest.raises(ValueError, match="positions"):
        rope(torch.zeros(2, 1, 4), torch.zeros(3, dtype=torch.int64), torch.ones(4, 2), torch.ones(4, 2))
    with pytest.raises(ValueError, match="cache: shape"):
        mla_decode(torch.zeros(1, 2, 8), torch.zeros(1, 4, 6), torch.zeros(1, 1).int(), torch.ones(1).int(), scale=1.0, kv_lora_rank=4)
    with pytest.raises(ValueError, match="backend"):
        rms_norm(x, torch.ones(8), 1e-6, backend="cpu")
