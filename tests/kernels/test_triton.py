"""The Triton backend against float64: on a GPU, or in Triton's interpreter (`make test-triton`)."""

import pytest
import torch
from decode_attention import check_gqa_decode, check_mla_decode
from kernel_weights import exact_experts, exact_gated_experts, layer, random_experts
from quantkit_kernels import (
    ExpertBiases,
    ExpertsBuilder,
    Gating,
    Norms,
    Prompts,
    Rotation,
    Routing,
    add_rms_norm,
    functional,
    gate_and_mul,
    gqa_decode,
    gqa_prefill,
    gqa_prepare,
    likeliest,
    mla_prefill,
    moe_gate,
    prepare,
    quantize_rows,
    rms_norm,
    rope,
    route,
    silu_and_mul,
)
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.gating import SILU
from quantkit_kernels.samples import (
    GRIDS,
    TOLERANCE,
    distance,
    exact_linear,
    grouped_attention,
    random_weight,
)
from quantkit_kernels.triton.cards import ExpertsPlan, LinearPlan
from quantkit_kernels.triton.experts import TritonExperts
from quantkit_kernels.triton.launch import scaled_sums
from quantkit_kernels.triton.linear import TritonLinear
from quantkit_kernels.triton.operators import cut_in_three

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    why_unusable("rms_norm", "triton", DEVICE) is not None,
    reason="no GPU with Triton, and not interpreted",
)
HALF = (torch.bfloat16, torch.float16)
PACKED = [grid for grid in GRIDS if grid != "dense"]


def generator() -> torch.Generator:
    rng = torch.Generator(DEVICE)
    rng.seed()
    return rng


def usable(grid: str) -> list[torch.dtype]:
    return [
        dtype
        for dtype in HALF
        if why_unusable(f"linear_{grid.split('-')[0]}", "triton", DEVICE, dtype) is None
    ]


def step_of(grid: str) -> int:
    """What K is a multiple of."""
    last = grid.split("-")[-1]
    return int(last) if last.isdigit() else 16


@pytest.mark.parametrize("grid", PACKED)
def test_linears_of_any_shape(grid: str, poisoned_memory: None) -> None:
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
            assert distance(y, exact_linear(x, weight)) < TOLERANCE[dtype], (
                tokens,
                n,
                k,
                rng.initial_seed(),
            )


@pytest.mark.parametrize("grid", ["int4-asym-64", "fp4", "int8", "w8a16-32"])
def test_programs_that_share_k_add_up_in_order(grid: str) -> None:
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
def test_few_tokens_of_int4_whose_sums_are_scaled(grid: str) -> None:
    """As exact as scaled weights, also where all features are near 20 and what decoding by bits
    adds is far more than the result."""
    rng = generator()
    weight = random_weight(grid, 70, 128 * 9, rng)
    for dtype in HALF:
        linear = prepare(weight, backend="triton", dtype=dtype)
        assert isinstance(linear, TritonLinear)
        for tokens, mean in ((1, 0.0), (5, 20.0), (11, 1.0)):
            x = (torch.randn(tokens, 128 * 9, generator=rng, device=DEVICE) + mean).to(dtype)
            exact = exact_linear(x, weight)
            plan = LinearPlan(64, 8, 2, 2, 3)
            assert scaled_sums("int4", plan)
            assert distance(linear.tiles(x, plan), exact) < TOLERANCE[dtype], (
                tokens,
                mean,
                rng.initial_seed(),
            )


def test_every_code_of_fp4_and_scales_of_zero() -> None:
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
def test_activations_are_rounded_as_the_operator_states(width: int) -> None:
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


@pytest.mark.parametrize(
    "grid", ["int4-asym-32", "int4-sym-128", "int8", "w8a16-32", "w8a16-128", "fp4"]
)
def test_experts_few_and_many(grid: str) -> None:
    """Ragged, empty and doubled: expert 5 is asked by none, and one token names an expert twice."""
    rng = torch.Generator()
    rng.seed()
    weights = random_experts(grid, 6, 128, 128, rng)
    on_device = [
        [type(one)._make(None if part is None else part.to(DEVICE) for part in one) for one in side]
        for side in weights
    ]
    experts = layer(on_device, "triton", torch.bfloat16)
    for tokens, top_k in ((1, 2), (20, 2)):
        x = torch.randn(tokens, 128, generator=rng).bfloat16()
        ids = torch.rand(tokens, 5, generator=rng).topk(top_k, dim=-1).indices
        ids[0] = 4
        topk_weights = torch.rand(tokens, top_k, generator=rng)
        y = experts(x.to(DEVICE), ids.to(DEVICE), topk_weights.to(DEVICE)).cpu()
        exact = exact_experts(x, ids, topk_weights, weights)
        assert distance(y, exact) < (2e-2 if grid == "int8" else 2 * TOLERANCE[torch.bfloat16]), (
            tokens,
            rng.initial_seed(),
        )
    assert torch.equal(
        experts(x.to(DEVICE), ids.int().to(DEVICE), topk_weights.to(DEVICE)).cpu(), y
    )


@pytest.mark.parametrize("grid", ["int4-asym-32", "int4-sym-128"])
def test_experts_of_int4_in_tiles_of_8(grid: str) -> None:
    """One token whose pairs are tiles of their own; and twenty, all of which ask for expert 4, so
    that it has three tiles."""
    rng = torch.Generator()
    rng.seed()
    weights = random_experts(grid, 6, 256, 128, rng)
    on_device = [
        [type(one)._make(None if part is None else part.to(DEVICE) for part in one) for one in side]
        for side in weights
    ]
    experts = layer(on_device, "triton", torch.bfloat16)
    assert isinstance(experts, TritonExperts)
    plan = ExpertsPlan(LinearPlan(64, 8, 1, 2, 3), LinearPlan(128, 8, 1, 4, 3))
    for tokens in (1, 20):
        x, topk_weights = (
            torch.randn(tokens, 256, generator=rng).bfloat16(),
            torch.rand(tokens, 2, generator=rng),
        )
        ids = torch.stack(
            [torch.full((tokens,), 4), torch.randint(0, 4, (tokens,), generator=rng)], dim=1
        )
        y = experts.by_plan(x.to(DEVICE), ids.to(DEVICE), topk_weights.to(DEVICE), plan).cpu()
        exact = exact_experts(x, ids, topk_weights, weights)
        assert distance(y, exact) < 2 * TOLERANCE[torch.bfloat16], (tokens, rng.initial_seed())


@pytest.mark.parametrize("grid", ["int4-asym-64", "int8"])
def test_experts_whose_programs_share_k(grid: str) -> None:
    """One token and a long K: gate and up are each added up."""
    rng = torch.Generator()
    rng.seed()
    weights = random_experts(grid, 2, 128 * 15, 64, rng)
    on_device = [
        [type(one)._make(None if part is None else part.to(DEVICE) for part in one) for one in side]
        for side in weights
    ]
    experts = layer(on_device, "triton", torch.bfloat16)
    x, ids, topk_weights = (
        torch.randn(1, 128 * 15, generator=rng).bfloat16(),
        torch.tensor([[1]]),
        torch.rand(1, 1, generator=rng),
    )
    exact = exact_experts(x, ids, topk_weights, weights)
    for _ in range(2):
        y = experts(x.to(DEVICE), ids.to(DEVICE), topk_weights.to(DEVICE)).cpu()
        assert distance(y, exact) < 2e-2, rng.initial_seed()


GATES = {
    "gpt-oss": Gating(1.702, 7.0, 1.0),
    "DeepSeek-V4": Gating(limit=3.0),
    "SiLU": SILU,
    "shifted": Gating(shift=-0.5),
}
"""With a smaller limit than DeepSeek-V4's 10, so that it is reached on either side."""


@pytest.mark.parametrize(("grid", "gate", "biased"), [
    ("fp4", "gpt-oss", True), ("int4-asym-32", "gpt-oss", True), ("int8", "gpt-oss", True), ("int4-asym-128", "DeepSeek-V4", False),
    ("fp4", "DeepSeek-V4", False), ("int8", "DeepSeek-V4", False), ("int4-sym-128", "SiLU", True), ("int4-asym-64", "shifted", False),
])  # fmt: skip
def test_experts_with_gates_and_biases(grid: str, gate: str, biased: bool) -> None:
    """Of widths that are no whole strips: one token, whose programs share K, and many of a short K.
    Expert 2 is asked by none."""
    rng, gating = torch.Generator(), GATES[gate]
    rng.seed()
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
        ids, topk_weights = (
            torch.randint(0, 2, (tokens, 2), generator=rng),
            torch.rand(tokens, 2, generator=rng),
        )
        y = experts(x.to(DEVICE), ids.to(DEVICE), topk_weights.to(DEVICE)).cpu()
        exact = exact_gated_experts(x, ids, topk_weights, weights, gating, biases)
        assert distance(y, exact) < (2e-2 if grid == "int8" else 2 * TOLERANCE[torch.bfloat16]), (
            tokens,
            rng.initial_seed(),
        )
        # Neither is left out.
        others = [(SILU, biases)] * (gating != SILU) + [(gating, [None] * 3)] * biased
        assert all(
            distance(exact_gated_experts(x, ids, topk_weights, weights, *other), exact) > 0.05
            for other in others
        )


@pytest.mark.parametrize("dtype", tuple(TOLERANCE), ids=str)
def test_norms_activation_and_rotation(dtype: torch.dtype) -> None:
    for shape in ((1, 384), (2, 5, 90)):
        x, residual = (
            torch.randn(shape, device=DEVICE).to(dtype) * 3,
            torch.randn(shape, device=DEVICE).to(dtype),
        )
        weight = torch.rand(shape[-1], device=DEVICE).bfloat16()
        for found, expected in (
            (
                rms_norm(x, weight, 1e-6, backend="triton"),
                rms_norm(x.float(), weight.float(), 1e-6, backend="reference"),
            ),
            (silu_and_mul(x, backend="triton"), silu_and_mul(x.float(), backend="reference")),
            *(
                (
                    gate_and_mul(x, one, backend="triton"),
                    gate_and_mul(x.float(), one, backend="reference"),
                )
                for one in GATES.values()
            ),
        ):
            assert distance(found, expected.double()) < TOLERANCE[dtype]
        normed, total = add_rms_norm(x, residual, weight, 1e-6, backend="triton")
        assert torch.equal(total, x + residual)
        assert (
            distance(
                normed, rms_norm(total.float(), weight.float(), 1e-6, backend="reference").double()
            )
            < TOLERANCE[dtype]
        )
    q, positions, angles = (
        torch.randn(4, 9, 24, device=DEVICE).to(dtype),
        torch.tensor([49, 0, 7, 7], device=DEVICE),
        torch.rand(50, 12),
    )
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    for interleaved in (True, False):
        found = rope(q[..., :24], positions, cos, sin, interleaved=interleaved, backend="triton")
        expected = rope(
            q.float(), positions, cos, sin, interleaved=interleaved, backend="reference"
        )
        assert distance(found, expected.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [1280, 1010, 100, 1])
def test_the_likeliest_is_the_first_of_equals(width: int) -> None:
    rng = torch.Generator().manual_seed(width)
    logits = torch.randn(8, width, generator=rng)
    logits[1] = 0.0
    logits[2, [width // 70, width // 70 + 1 - (width == 1), width // 2]] = 9.0
    logits[3, [width - 1, width // 9]] = 9.0
    logits[4, width * 2 // 3] = float("nan")
    logits[5] = float("-inf")
    logits[6, ::2] = -0.0
    logits[6].clamp_(max=0.0)
    for one in (logits, logits[:1], logits[:0]):
        assert torch.equal(likeliest(one.to(DEVICE), backend="triton").cpu(), one.argmax(dim=-1))


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize(
    ("experts", "top_k", "n_group", "topk_group"),
    [(256, 8, 8, 4), (60, 6, 1, 1), (24, 4, 3, 2), (8, 8, 1, 1)],
)
def test_routing(scoring: str, experts: int, top_k: int, n_group: int, topk_group: int) -> None:
    """Groups that are no power of two go to the reference."""
    logits, bias = (
        torch.randn(9, experts, device=DEVICE) * 2,
        torch.randn(experts, device=DEVICE) * 2,
    )
    rule = Routing(
        experts,
        top_k,
        scoring_func=scoring,
        n_group=n_group,
        topk_group=topk_group,
        num_joined_experts=1,
    )
    for given in (bias, None):
        ids, weights = route(logits, given, rule, backend="triton")
        expected_ids, expected = route(logits, given, rule, backend="reference")
        assert torch.equal(ids.long(), expected_ids)
        assert distance(weights, expected.double()) < 1e-6
    # Logits of size one: sigmoids of large ones are all 1, and among equals the choice is free.
    for tokens, width in ((5, 48), (1, 300)):  # of the second two programs share the width
        x, router = (
            torch.randn(tokens, width, device=DEVICE).bfloat16(),
            torch.randn(experts, width, device=DEVICE) / width**0.5,
        )
        ids, weights = moe_gate(x, router, None, rule, backend="triton")
        expected_ids, expected = moe_gate(x, router, None, rule, backend="reference")
        assert torch.equal(ids.long(), expected_ids)
        assert distance(weights, expected.double()) < 1e-5


@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize(
    ("heads", "width", "block_size"), [((6, 2), 16, 7), ((4, 4), 24, 64), ((40, 2), 80, 1)]
)
def test_gqa_decode(heads: tuple[int, int], width: int, block_size: int, window: int) -> None:
    for lengths in ([1, 0, 37, 64], [300]):
        check_gqa_decode(
            "triton", DEVICE, heads, width, block_size, window, lengths, torch.bfloat16
        )


@pytest.mark.parametrize("window", [0, 20])
def test_attention_sinks(window: int) -> None:
    """One row of two is empty; several programs share a row, and one of them has the sink."""
    sinks = torch.randn(6, device=DEVICE) * 3
    case = grouped_attention(
        [300, 0], [1, 1], (6, 2), 32, 16, torch.bfloat16, DEVICE, window, sinks
    )
    out = gqa_decode(
        case.q, case.pages, scale=case.scale, window=window, sinks=sinks, backend="triton"
    )
    assert distance(out, case.exact) < TOLERANCE[torch.bfloat16]
    prompt = grouped_attention(
        [140, 20], [40, 20], (6, 2), 32, 16, torch.bfloat16, DEVICE, window, sinks
    )
    out = gqa_prefill(
        prompt.q,
        prompt.pages[:2],
        prompt.prompts,
        scale=prompt.scale,
        window=window,
        sinks=sinks,
        backend="triton",
    )
    assert distance(out, prompt.exact) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("interleaved", [True, False])
def test_mla_decode(interleaved: bool) -> None:
    """One row in small programs too, and so many that the products by head are kernels: in one tile
    of rows and in two."""
    several, many = [9, 0, 40, 5, 1, 64, 17, 30], [3] * 33
    for lengths, heads, block_size in (
        ([1, 0, 37, 64], 5, 16),
        ([300], 40, 64),
        ([37], 40, 16),
        (several, 3, 16),
        (many, 2, 16),
    ):
        check_mla_decode(
            "triton",
            DEVICE,
            heads,
            block_size,
            (24, 16, 20, 64),
            lengths,
            torch.float16,
            interleaved,
        )


@pytest.mark.parametrize("window", [0, 50])
def test_gqa_prefill(window: int) -> None:
    case = grouped_attention(
        [3, 300, 140], [3, 200, 1], (6, 2), 16, 16, torch.bfloat16, DEVICE, window
    )
    out = gqa_prefill(
        case.q, case.pages[:2], case.prompts, scale=case.scale, window=window, backend="triton"
    )
    assert distance(out, case.exact) < TOLERANCE[torch.bfloat16]


def test_mla_prefill() -> None:
    spans, tokens = [(30, 20), (0, 50)], 70
    q, kv_b = (
        torch.randn(tokens, 3, 48, device=DEVICE).half(),
        (torch.randn(3, 64, 40, device=DEVICE) / 40**0.5).half(),
    )
    cache, angles = (
        torch.randn(9, 16, 56, device=DEVICE).half(),
        torch.rand(tokens, 8, device=DEVICE) * 6,
    )
    rotation, prompts = (
        Rotation(angles.cos(), angles.sin()),
        Prompts.of(spans, (torch.randperm(8) + 1).view(2, 4).to(DEVICE)),
    )
    exact = mla_prefill(
        q.float(), kv_b.float(), rotation, cache.float(), prompts, scale=0.2, backend="reference"
    )
    out = mla_prefill(q, kv_b, rotation, cache, prompts, scale=0.2, backend="triton")
    assert distance(out, exact.double()) < 2 * TOLERANCE[torch.float16]


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_what_is_cached(interleaved: bool, normed: bool) -> None:
    angles, slots = torch.rand(3, 8, device=DEVICE) * 6, torch.tensor([30, 0, 9], device=DEVICE)
    rotation = Rotation(angles.cos(), angles.sin(), interleaved)
    qkv_a, gains = (
        torch.randn(3, 24 + 40 + 16, device=DEVICE).half(),
        (torch.rand(24, device=DEVICE).half(), torch.rand(40, device=DEVICE).half()),
    )
    qkv, gain = torch.randn(3, 8 * 24, device=DEVICE).half(), torch.rand(24, device=DEVICE).half()
    found = []
    for backend, dtype in (("triton", torch.float16), ("reference", torch.float32)):
        latents = torch.zeros(4, 8, 56, device=DEVICE, dtype=dtype)
        norms = Norms(gains[0].to(dtype), gains[1].to(dtype), 1e-6)
        q_a = functional.mla_prepare(
            qkv_a.to(dtype), norms, rotation, latents, slots, backend=backend
        )
        keys, values = torch.zeros(2, 4, 8, 2, 24, device=DEVICE, dtype=dtype).unbind()
        of_head = Norms(gain.to(dtype), gain.to(dtype), 1e-6) if normed else None
        q = gqa_prepare(qkv.to(dtype), of_head, rotation, (keys, values), slots, backend=backend)
        found.append((q_a, latents, q, keys, values))
    for ours, exact in zip(*found, strict=True):
        assert ours.dtype == torch.float16
        assert distance(ours, exact.double()) < TOLERANCE[torch.float16]


def test_three_numbers_of_bfloat16_are_one_of_float32() -> None:
    values = torch.randn(37, 211, generator=generator(), device=DEVICE) * torch.logspace(
        -20, 20, 211, device=DEVICE
    )
    parts, rest = cut_in_three(values), values
    assert torch.equal(parts.double().sum(dim=0), values.double())
    for part in parts:
        assert torch.equal(part, rest.to(torch.bfloat16))
        rest = rest - part.float()
