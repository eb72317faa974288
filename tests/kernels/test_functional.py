"""Norms, activations and the router of every backend against formulas written out in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_backends import backends_of, device_of
from kernel_formulas import chosen_experts, normed
from kernel_weights import exact_gating
from quantkit_kernels import (
    Gating,
    Routing,
    add_rms_norm,
    block_hadamard,
    float32_linear,
    gate_and_mul,
    gate_and_rotate,
    likeliest,
    moe_gate,
    mx_rounded,
    rms_norm,
    rotary_angles,
    round_to_mx,
    route,
    route_chosen,
    silu_and_mul,
)
from quantkit_kernels.samples import TOLERANCE, distance
from quantkit_kernels.triton.operators import cut_in_three

GATES = (
    Gating(1.702, 7.0, 1.0),
    Gating(1.702, 1.0, 0.5),
    Gating(limit=3.0),
    Gating(),
    Gating(shift=-0.5),
    Gating(bound=4.0, up_bound=2.5),
)


@pytest.mark.parametrize(("backend", "dtype"), backends_of("rms_norm"))
def test_norms(backend, dtype, poisoned_memory):
    device = device_of(backend)
    for shape in ((1, 384), (2, 5, 96), (3, 90)):
        x = torch.randn(shape, device=device).to(dtype) * 3
        residual = torch.randn(shape, device=device).to(dtype)
        weight = (
            torch.rand(shape[-1], device=device)
            .bfloat16()
            .to(dtype if backend == "cuda" else torch.bfloat16)
        )

        found = rms_norm(x, weight, 1e-6, backend=backend)
        assert distance(found, normed(x, weight)) < TOLERANCE[dtype], shape
        added, total = add_rms_norm(x, residual, weight, 1e-6, backend=backend)
        assert torch.equal(total, x + residual), shape
        assert distance(added, normed(total, weight)) < TOLERANCE[dtype], shape


@pytest.mark.parametrize(
    ("operator", "backend", "dtype"),
    [
        pytest.param(operator, *one.values, marks=one.marks, id=f"{operator}-{one.id}")
        for operator in ("silu_and_mul", "gate_and_mul")
        for one in backends_of(operator)
    ],
)
def test_activations(operator, backend, dtype):
    for gating in GATES if operator == "gate_and_mul" else GATES[3:4]:
        for shape, scale in (((1, 384), 3), ((2, 5, 96), 3), ((7, 26), 30)):
            x = torch.randn(shape, device=device_of(backend)).to(dtype) * scale
            gate, up = x.double().chunk(2, dim=-1)
            exact = exact_gating(gate, up, gating)
            found = (
                silu_and_mul(x, backend=backend)
                if operator == "silu_and_mul"
                else gate_and_mul(x, gating, backend=backend)
            )
            assert distance(found, exact) < TOLERANCE[dtype], gating


@pytest.mark.parametrize(("backend", "dtype"), backends_of("gate_and_rotate"))
def test_activations_are_rotated(backend, dtype):
    for gating in GATES:
        for shape, block in (((3, 768), 128), ((2, 5, 96), 16), ((1, 2048), 512), ((0, 64), 32)):
            x = torch.randn(shape, device=device_of(backend)).to(dtype) * 3
            exact = block_hadamard(exact_gating(*x.double().chunk(2, dim=-1), gating), block)
            found = gate_and_rotate(x, gating, block, backend=backend)
            assert found.shape == exact.shape
            assert not len(x) or distance(found, exact) < TOLERANCE[dtype], (gating, shape)


@pytest.mark.parametrize(("backend", "dtype"), backends_of("mx_rounded"))
@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_are_rounded_to_mx(backend, dtype, bits):
    """To the bit: with zeros, halves between values, what saturates, and groups of every size."""
    x = torch.randn(5, 3, 128) * torch.logspace(-6, 3, 128)
    x[0, 0, :64] = torch.arange(64) / 8
    x[1], x[2, 1] = 0, 7 * x[2, 1].sign()
    x = x.to(device_of(backend), dtype)
    levels, scales = round_to_mx(x, bits)
    exact = (levels * scales.unsqueeze(-1)).flatten(-2).to(dtype)
    assert torch.equal(mx_rounded(x, bits, backend=backend), exact)
    assert not mx_rounded(x[:0], bits, backend=backend).numel()


def scores_of(logits, scoring):
    root = {"sqrtsoftplus": lambda x: F.softplus(x).sqrt(), "softmax": lambda x: x.softmax(-1)}
    return root.get(scoring, torch.sigmoid)(logits.double())


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax", "sqrtsoftplus"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("backend", backends_of("route", dtypes=False))
def test_route(backend, biased, scoring):
    device = device_of(backend)
    for experts, top_k, n_group, topk_group in (
        (256, 8, 8, 4),
        (16, 4, 4, 2),
        (24, 4, 3, 2),
        (64, 6, 1, 1),
        (8, 8, 1, 1),
        *((160, 6, 8, 3), (384, 8, 1, 1), (1024, 8, 1, 1)) * (backend == "cuda"),
    ):
        logits = torch.randn(40, experts, device=device) * (6 if scoring == "sqrtsoftplus" else 2)
        # Large enough to make some choices negative.
        bias = torch.randn(experts, device=device) * 2 if biased else None
        rule = Routing(experts, top_k, True, scoring, n_group=n_group, topk_group=topk_group)
        full = replace(rule, routed_scaling_factor=2.5, num_joined_experts=2)
        ids, weights = route(logits, bias, full, backend=backend)
        assert weights.dtype == torch.float32
        assert backend != "reference" or ids.dtype == torch.int64
        scores = scores_of(logits, scoring)
        choice = scores if bias is None else scores + bias.double()
        joined, ids = ids[:, top_k:], ids[:, :top_k].long()
        assert joined.tolist() == [[experts, experts + 1]] * 40
        assert weights[:, top_k:].eq(1).all()
        # Two experts whose float32 values round to one another may change places: which do is the
        # processor's.
        assert all(len(set(row)) == top_k for row in ids.tolist())
        exact = choice.gather(1, torch.tensor(chosen_experts(choice, rule), device=device))
        assert distance(choice.gather(1, ids), exact) < 1e-6
        scores = scores.gather(1, ids)
        shares = scores / scores.sum(-1, keepdim=True) * 2.5
        scaled = replace(rule, routed_scaling_factor=2.5)
        chooser = "auto" if backend == "cuda" else backend
        alone = route_chosen(logits, ids.contiguous(), scaled, backend=chooser)
        assert distance(alone, shares) < 1e-5
        assert distance(weights[:, :top_k], shares) < 1e-5
        _, plain = route(logits, bias, replace(rule, norm_topk_prob=False), backend=backend)
        assert distance(plain, scores) < 1e-5


@pytest.mark.parametrize("backend", backends_of("moe_gate", dtypes=False))
def test_gate_multiplies_and_routes(backend):
    """The bias is small, and logits of size one: sigmoids of large ones are all 1, and among equals
    the choice is free."""
    device = device_of(backend)
    sizes = (
        [(256, 7168), (256, 7680), (128, 2048), (60, 1000), (8, 4096)]
        if backend == "cuda"
        else [(16, 48), (60, 300)]
    )
    counts = (1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 300) if backend == "cuda" else (1, 5)
    for (experts, hidden), tokens in ((size, count) for size in sizes for count in counts):
        grouped = experts in (16, 256)
        rule = Routing(
            experts,
            8 if grouped and experts > 16 else 4,
            scoring_func="sigmoid" if grouped else "softmax",
            n_group=8 if experts == 256 else 4 if grouped else 1,
            topk_group=4 if experts == 256 else 2 if grouped else 1,
            routed_scaling_factor=2.5,
            num_joined_experts=1,
            joined_gate=not grouped,
        )
        x = torch.randn(tokens, hidden, device=device).bfloat16()
        router = torch.randn(rule.num_logits, hidden, device=device) * hidden**-0.5
        bias = torch.randn(experts, device=device) * 0.1 if grouped else None
        logits = (x.double() @ router.double().T).float()
        expected_ids, expected = route(logits, bias, rule, backend="reference")
        if rule.joined_gate:
            assert distance(expected[:, -1], logits[:, -1].double().sigmoid()) < 1e-6
        for _ in range(20 if backend == "cuda" else 1):
            ids, weights = moe_gate(x, router, bias, rule, backend=backend)
            assert torch.equal(ids.long(), expected_ids), (experts, hidden, tokens)
            assert distance(weights, expected.double()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_activation_of_a_slice_and_of_numbers_that_are_none(dtype):
    x = torch.randn(7, 2 * 96).to(dtype)[:, 50:146]
    assert torch.equal(silu_and_mul(x, backend="cpu"), silu_and_mul(x.clone(), backend="cpu"))
    for value in (float("nan"), float("inf")):
        x = torch.tensor([[value, -1.0, 2.0, 1.0, 1.0, value]], dtype=dtype)
        assert silu_and_mul(x, backend="cpu").isfinite().tolist() == [[False, True, False]]


@pytest.mark.parametrize(("backend", "dtype"), backends_of("float32_linear"))
def test_a_product_in_float32(backend, dtype):
    """Of few tokens and of many; of as few outputs as a gate has."""
    for tokens, outputs, inputs in ((1, 1, 300), (5, 64, 96), (70, 33, 256), (600, 3, 64)):
        x = torch.randn(tokens, inputs, device=device_of(backend)).to(dtype)
        weight = torch.randn(outputs, inputs, device=x.device)
        found = float32_linear(x, weight, backend=backend)
        assert found.dtype == torch.float32
        error = (found.double() - x.double() @ weight.double().T).abs()
        assert (error <= 1e-6 * (x.double().abs() @ weight.double().abs().T)).all()


@pytest.mark.parametrize("backend", backends_of("likeliest", ("triton",), dtypes=False))
@pytest.mark.parametrize("width", [1280, 1010, 100, 1])
def test_the_likeliest_is_the_first_of_equals(backend, width):
    logits = torch.randn(8, width, generator=torch.Generator().manual_seed(width))
    logits[1] = 0.0
    logits[2, [width // 70, width // 70 + 1 - (width == 1), width // 2]] = 9.0
    logits[3, [width - 1, width // 9]] = 9.0
    logits[4, width * 2 // 3] = float("nan")
    logits[5] = float("-inf")
    logits[6, ::2] = -0.0
    logits[6].clamp_(max=0.0)
    for one in (logits, logits[:1], logits[:0]):
        found = likeliest(one.to(device_of(backend)), backend=backend).cpu()
        assert torch.equal(found, one.argmax(dim=-1))


@pytest.mark.parametrize("backend", backends_of("rms_norm", ("triton",), dtypes=False))
def test_three_numbers_of_bfloat16_are_one_of_float32(backend):
    device = device_of(backend)
    values = torch.randn(37, 211, device=device) * torch.logspace(-20, 20, 211, device=device)
    parts, rest = cut_in_three(values), values
    assert torch.equal(parts.double().sum(dim=0), values.double())
    for part in parts:
        assert torch.equal(part, rest.to(torch.bfloat16))
        rest = rest - part.float()


@pytest.mark.parametrize(("factor", "group"), [(1.0, 1), (1.25, 4), (1.0, 128)])
@pytest.mark.parametrize("backend", backends_of("rotary_angles", dtypes=False))
def test_angles_of_positions(backend, factor, group):
    """Up to a million, where a cosine of float32's angle needs more than float32."""
    positions = torch.tensor([0, 1, 127, 128, 5000, 999_999], device=device_of(backend))
    frequencies = 10000.0 ** -torch.linspace(0, 1, 33, device=positions.device)[:-1]
    found = rotary_angles(positions, frequencies, factor=factor, group=group, backend=backend)
    angles = ((positions // group * group).float()[:, None] * frequencies).double()
    for one, exact in zip(found, (angles.cos(), angles.sin())):
        assert one.shape == (6, 32)
        assert (one.double() - exact * factor).abs().max() < 1e-6
    empty = rotary_angles(positions[:0], frequencies, backend=backend)
    assert [one.shape for one in empty] == [(0, 32)] * 2
