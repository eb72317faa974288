"""Linears and experts of the Triton backend against float64: on a GPU, or in Triton's interpreter
(`make test-triton`)."""

import pytest
import torch
from kernel_backends import HALVES, device_of
from kernel_weights import exact_experts, layer, placed, random_experts
from quantkit_kernels import ExpertBiases, ExpertsBuilder, Gating, prepare, quantize_rows
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.gating import SILU
from quantkit_kernels.samples import GRIDS, TOLERANCE, distance, exact_linear, random_weight
from quantkit_kernels.triton.cards import ExpertsPlan, LinearPlan
from quantkit_kernels.triton.experts import TritonExperts
from quantkit_kernels.triton.launch import scaled_sums
from quantkit_kernels.triton.linear import TritonLinear

DEVICE = device_of("triton")
pytestmark = pytest.mark.skipif(
    why_unusable("rms_norm", "triton", DEVICE) is not None,
    reason="no GPU with Triton, and not interpreted",
)
PACKED = [grid for grid in GRIDS if grid != "dense"]
ON_A_CARD = torch.cuda.is_available()
"""Which takes every case; the interpreter, half."""


def generator():
    rng = torch.Generator(DEVICE)
    rng.manual_seed(0)
    return rng


def usable(grid):
    return [
        dtype
        for dtype in HALVES
        if why_unusable(f"linear_{grid.split('-')[0]}", "triton", DEVICE, dtype) is None
    ]


def step_of(grid):
    """What K is a multiple of."""
    last = grid.split("-")[-1]
    return int(last) if last.isdigit() else 16


@pytest.mark.parametrize("grid", PACKED)
def test_linears_of_any_shape(grid, poisoned_memory):
    rng = generator()
    sizes = torch.randint(1, 150, (3,), generator=rng, device=DEVICE).tolist()
    # Of one token 32 outputs at least: one or two may be sums that nearly cancel, whose rounding is
    # large beside them.
    for tokens, n, k in (
        (1, max(32, sizes[0]), 128 * 3),
        (17, sizes[1], 11 * step_of(grid)),
        (70, sizes[2], 128),
        (1025, 16, 128),
    ):
        weight = random_weight(grid, n, k, rng)
        for dtype in usable(grid):
            x = torch.randn(tokens, k, generator=rng, device=DEVICE).to(dtype)
            if grid == "int8" and tokens > 1000:
                continue
            linear = prepare(weight, backend="triton", dtype=dtype)
            y = linear(x)
            assert y.dtype == dtype
            assert distance(y, exact_linear(x, weight)) < TOLERANCE[dtype], (tokens, n, k)


@pytest.mark.parametrize("grid", ["int4-asym-64", "fp4", "int8", "w8a16-32"])
def test_programs_that_share_k_add_up_in_order(grid):
    """K is long and N short: the same bits again, for the counters are left at zero."""
    rng = generator()
    weight = random_weight(grid, 64, 128 * 16, rng)
    linear = prepare(weight, backend="triton")
    for tokens in (1, 3):
        x = torch.randn(tokens, 128 * 16, generator=rng, device=DEVICE).bfloat16()
        first = linear(x)
        assert distance(first, exact_linear(x, weight)) < TOLERANCE[torch.bfloat16]
        assert torch.equal(linear(x), first)


@pytest.mark.parametrize("grid", ["int4-asym-128", "int4-asym-64", "int4-asym-32", "int4-sym-128"])
def test_few_tokens_of_int4_whose_sums_are_scaled(grid):
    """As exact as scaled weights, also where all features are near 20 and what decoding by bits
    adds is far more than the result."""
    rng = generator()
    weight = random_weight(grid, 70, 128 * 9, rng)
    for dtype in HALVES:
        linear = prepare(weight, backend="triton", dtype=dtype)
        assert isinstance(linear, TritonLinear)
        for tokens, mean in ((1, 0.0), (5, 20.0), (11, 1.0)):
            x = (torch.randn(tokens, 128 * 9, generator=rng, device=DEVICE) + mean).to(dtype)
            exact = exact_linear(x, weight)
            plan = LinearPlan(64, 8, 2, 2, 3)
            assert scaled_sums("int4", plan)
            assert distance(linear.tiles(x, plan), exact) < TOLERANCE[dtype], (tokens, mean)


def test_every_code_of_fp4_and_scales_of_zero():
    rng = generator()
    weight = random_weight("fp4", 16, 256, rng)
    codes = torch.arange(16, dtype=torch.uint8, device=DEVICE).repeat(16, 16)
    scale = weight.scale.float()
    scale[:, 0], scale[:, 1], scale[:, 2] = 0.0, 2.0**-9, 448.0
    weight = weight._replace(codes=codes, scale=scale.to(torch.float8_e4m3fn))
    x = torch.randn(4, 256, generator=rng, device=DEVICE).bfloat16()
    assert (
        distance(prepare(weight, backend="triton")(x), exact_linear(x, weight))
        < TOLERANCE[torch.bfloat16]
    )


@pytest.mark.parametrize("width", [1, 256, 300, (1 << 15) + 16])
def test_activations_are_rounded_as_the_operator_states(width):
    """Rows that a program holds, and longer ones."""
    from quantkit_kernels.triton.rows import quantize_rows as launched

    x = torch.randn(5, width, generator=generator(), device=DEVICE).half()
    x[1] = 0
    codes, scale = launched(x)
    expected = quantize_rows(
        x.cpu()
    )  # on a GPU torch divides by a number as it multiplies by its reciprocal
    assert torch.equal(scale.cpu(), expected[1][:, 0])
    assert torch.equal(codes.cpu(), expected[0])


def near(grid):
    return 2e-2 if grid == "int8" else 2 * TOLERANCE[torch.bfloat16]


def ask(experts, *given, plan=None):
    """x, ids and weights on the CPU, as is what comes back."""
    x, ids, weights = (one.to(DEVICE) for one in given)
    return (
        experts(x, ids, weights) if plan is None else experts.by_plan(x, ids, weights, plan)
    ).cpu()


@pytest.mark.parametrize(
    ("grid", "tokens", "top_k", "hidden", "plan"),
    [
        *(
            (grid, tokens, 2, 128, None)
            for at, grid in enumerate(
                ("int4-asym-32", "int8", "int4-sym-128", "w8a16-32", "fp4", "w8a16-128")
            )
            for tokens in ((1, 20) if ON_A_CARD else (1, 20)[at % 2 :][:1])
        ),
        # Tiles of 8: one token whose pairs are tiles of their own; and twenty, all of which ask for
        # expert 4, so that it has three tiles.
        *(
            (
                grid,
                tokens,
                2,
                256,
                ExpertsPlan(LinearPlan(64, 8, 1, 2, 3), LinearPlan(128, 8, 1, 4, 3)),
            )
            for grid, tokens in (("int4-asym-32", 20), ("int4-sym-128", 1))
        ),
        # Of many tokens, whose results are rounded before they are added up.
        ("fp4", 20, 2, 256, ExpertsPlan(*[LinearPlan(64, 128, 1, 4, 3)] * 2)),
        # Programs share K: gate and up are each added up.
        ("int4-asym-64", 1, 1, 128 * 15, None),
        ("int8", 1, 1, 128 * 15, None),
    ],
    ids=str,
)
def test_experts(grid, tokens, top_k, hidden, plan):
    """Ragged, empty and doubled: expert 5 is asked by none, and one token names an expert twice."""
    rng = torch.Generator().manual_seed(0)
    weights = random_experts(grid, 6, hidden, 128 if hidden < 1000 else 64, rng)
    experts = layer(placed(weights, DEVICE), "triton", torch.bfloat16)
    assert isinstance(experts, TritonExperts)
    x = torch.randn(tokens, hidden, generator=rng).bfloat16()
    ids = torch.rand(tokens, 5, generator=rng).topk(top_k, dim=-1).indices
    ids[0 if plan is None else slice(None), 0] = 4
    topk_weights = torch.rand(tokens, top_k, generator=rng)
    y = ask(experts, x, ids, topk_weights, plan=plan)
    exact = exact_experts(x, ids, topk_weights, weights)
    assert distance(y, exact) < near(grid)
    assert torch.equal(ask(experts, x, ids.int(), topk_weights, plan=plan), y)


GATES = {
    "gpt-oss": Gating(1.702, 7.0, 1.0),
    "DeepSeek-V4": Gating(limit=3.0),
    "SiLU": SILU,
    "shifted": Gating(shift=-0.5),
    "Kimi-K3": Gating(bound=4.0, up_bound=2.5),
}
"""With a smaller limit than DeepSeek-V4's 10, so that it is reached on either side."""


@pytest.mark.parametrize(("grid", "gate", "biased"), [
    ("fp4", "gpt-oss", True), ("int4-asym-32", "gpt-oss", True), ("int8", "DeepSeek-V4", False), ("int4-sym-128", "SiLU", True),
    ("fp4", "Kimi-K3", False),
    ("int8", "gpt-oss", True), ("int4-asym-128", "DeepSeek-V4", False), ("fp4", "DeepSeek-V4", False), ("int4-asym-64", "shifted", False),
][: 9 if ON_A_CARD else 5])  # fmt: skip
def test_experts_with_gates_and_biases(grid, gate, biased):
    """Of widths that are no whole strips: one token, whose programs share K, and many of a short K.
    Expert 2 is asked by none."""
    rng, gating = torch.Generator(), GATES[gate]
    rng.manual_seed(0)
    inner = {"64": 192, "128": 128}.get(grid.split("-")[-1], 96)
    for tokens, hidden in ((1, 128 * 15), (20, 128)):
        weights = random_experts(grid, 3, hidden, inner, rng)
        sizes = (inner, inner, hidden)
        biases = [
            ExpertBiases(*(2 * torch.randn(size, generator=rng) for size in sizes))
            if biased
            else None
            for _ in range(3)
        ]
        builder = ExpertsBuilder(
            3, backend="triton", dtype=torch.bfloat16, device=DEVICE, gating=gating
        )
        for expert in (1, 0, 2):
            builder.add(expert, *(side[expert] for side in weights), biases=biases[expert])
        experts = builder.finish()
        assert isinstance(experts, TritonExperts)
        x = 4 * torch.randn(tokens, hidden, generator=rng).bfloat16()
        ids = torch.randint(0, 2, (tokens, 2), generator=rng)
        topk_weights = torch.rand(tokens, 2, generator=rng)
        y = ask(experts, x, ids, topk_weights)
        exact = exact_experts(x, ids, topk_weights, weights, gating, biases)
        assert distance(y, exact) < near(grid), tokens
        # Neither is left out.
        others = [(SILU, biases)] * (gating != SILU) + [(gating, [None] * 3)] * biased
        assert all(
            distance(exact_experts(x, ids, topk_weights, weights, *other), exact) > 0.05
            for other in others
        )


@pytest.mark.parametrize(
    ("grid", "gate", "biased"),
    [
        ("fp4", "gpt-oss", True),
        ("int4-asym-32", "SiLU", False),
        ("w8a16-32", "SiLU", True),
        ("int4-sym-128", "DeepSeek-V4", False),
        ("int4-asym-64", "gpt-oss", True),
        ("w8a16-128", "Kimi-K3", False),
    ][: 6 if ON_A_CARD else 4],
)
def test_experts_whose_weights_are_decoded(grid, gate, biased, monkeypatch, poisoned_memory):
    """At once and in parts, of which the last is smaller; expert 2 is asked by none, and one token
    names an expert twice."""
    rng, gating = torch.Generator().manual_seed(0), GATES[gate]
    hidden, inner, count = 320 if step_of(grid) <= 64 else 384, 128 + step_of(grid), 4
    weights = random_experts(grid, count, hidden, inner, rng)
    biases = [
        ExpertBiases(*(2 * torch.randn(size, generator=rng) for size in (inner, inner, hidden)))
        if biased
        else None
        for _ in range(count)
    ]
    builder = ExpertsBuilder(count, backend="triton", device=DEVICE, gating=gating)
    for expert in range(count):
        builder.add(expert, *(side[expert] for side in weights), biases=biases[expert])
    experts = builder.finish()
    assert isinstance(experts, TritonExperts)
    x = 4 * torch.randn(30, hidden, generator=rng).bfloat16()
    ids = torch.tensor([0, 1, 3])[torch.randint(0, 3, (30, 2), generator=rng)]
    ids[0] = 3
    topk_weights = torch.rand(30, 2, generator=rng)
    exact = exact_experts(x, ids, topk_weights, weights, gating, biases)
    for part in (1 << 28, 2 * count * 256 * hidden):
        monkeypatch.setattr("quantkit_kernels.triton.decoded_experts.DECODED_BYTES", part)
        y = experts.decoded(*(one.to(DEVICE) for one in (x, ids, topk_weights)))
        assert distance(y.cpu(), exact) < near(grid), part
