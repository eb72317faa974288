"""Latent attention, its preparation and the router on a CUDA device against float64. Skipped where
there is none."""

import pytest
import torch
from quantkit_kernels import Norms, Rotation, Routing, functional, moe_gate, route
from quantkit_kernels.samples import TOLERANCE, distance, latent_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
R1 = (128, 64, 128, 512)
ROUTING = Routing(256, 8, n_group=8, topk_group=4, routed_scaling_factor=2.5, num_joined_experts=1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "block_size", "lengths"),
    [
        (32, 64, [1, 0, 31, 32, 33, 64, 65, 640, 1000]),
        (16, 16, [1, 700, 0, 5]),
        (128, 64, [100, 640, 1]),
        (20, 64, [77, 500]),
        (5, 1, [40]),
        (48, 7, [900, 900, 900]),
        (32, 64, [5000, 1, 30000]),
        (32, 64, [30000]),
        (32, 64, [60001, 7]),
        (128, 64, [30001]),
        (20, 16, [9000, 4000, 3]),
        (32, 7, [5000, 33]),
        (16, 16, [5000, 700]),
        (100, 64, [3000]),
        (32, 64, [900, 1, 640, 33, 5000]),
        (32, 64, [1000, 64, 0, 640, 31, 700, 2]),
        (32, 64, [0, 5000, 1, 640, 33, 900, 2, 65, 31, 64, 300, 700, 1000, 32, 77, 500]),
        (32, 64, [1] * 200),
        (32, 64, list(range(640, 672))),
    ],
)
def test_mla_decode(
    heads: int, block_size: int, lengths: list[int], dtype: torch.dtype, interleaved: bool
) -> None:
    case = latent_attention(lengths, heads, block_size, R1, dtype, "cuda", interleaved)

    def run() -> torch.Tensor:
        return functional.mla_decode(*case.arguments, scale=case.scale, backend="cuda")

    out = run()
    assert distance(out, case.exact) < TOLERANCE[dtype]
    for row, length in enumerate(lengths):
        assert length or out[row].abs().max() == 0
    assert all(torch.equal(out, run()) for _ in range(5))


def test_a_captured_mla_decode_follows_the_lengths() -> None:
    case = latent_attention([640] * 8, 32, 64, R1, torch.bfloat16, "cuda")
    lengths = case.arguments[-1].seq_lens

    def run(backend: str) -> torch.Tensor:
        return functional.mla_decode(*case.arguments, scale=case.scale, backend=backend)

    run("cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run("cuda")
    for now in ([640] * 8, [1, 2, 3, 33, 100, 400, 639, 640], [32] * 8):
        lengths.copy_(torch.tensor(now))
        graph.replay()
        torch.cuda.synchronize()
        assert distance(out, run("reference").double()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_mla_prepare(tokens: int, interleaved: bool) -> None:
    qkv_a, angles = (
        torch.randn(tokens, 2112, device="cuda").bfloat16() * 3,
        torch.rand(tokens, 32, device="cuda") * 6,
    )
    gains = torch.rand(1536, device="cuda").bfloat16(), torch.rand(512, device="cuda").bfloat16()
    slots = torch.randperm(640, device="cuda")[:tokens]
    cache = torch.full((10, 64, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    exact = torch.zeros(10, 64, 576, device="cuda")
    rotation, in_float = (
        Rotation(angles.cos(), angles.sin(), interleaved),
        Norms(gains[0].float(), gains[1].float(), 1e-6),
    )
    q_a = functional.mla_prepare(qkv_a, Norms(*gains, 1e-6), rotation, cache, slots, backend="cuda")
    exact_q = functional.mla_prepare(
        qkv_a.float(), in_float, rotation, exact, slots, backend="reference"
    )
    assert distance(q_a, exact_q.double()) < TOLERANCE[torch.bfloat16]
    rows = cache.view(-1, 576)
    assert distance(rows[slots], exact.view(-1, 576)[slots].double()) < TOLERANCE[torch.bfloat16]
    assert rows.isnan().all(dim=-1).sum() == 640 - tokens


@pytest.mark.parametrize("hidden", [7168, 7680])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 300])
def test_moe_gate(tokens: int, hidden: int) -> None:
    x, router = (
        torch.randn(tokens, hidden, device="cuda").bfloat16(),
        torch.randn(256, hidden, device="cuda") * hidden**-0.5,
    )
    bias = torch.randn(256, device="cuda") * 0.1
    expected, expected_weights = route(
        (x.double() @ router.double().T).float(), bias, ROUTING, backend="reference"
    )
    for _ in range(20):
        ids, weights = moe_gate(x, router, bias, ROUTING, backend="cuda")
        assert torch.equal(ids, expected)
        assert distance(weights, expected_weights.double()) < 1e-5


@pytest.mark.parametrize("tokens", [1, 9, 64, 65])
@pytest.mark.parametrize(("experts", "hidden"), [(128, 2048), (60, 1000), (8, 4096)])
def test_moe_gate_of_other_numbers_of_experts(experts: int, hidden: int, tokens: int) -> None:
    x, router = (
        torch.randn(tokens, hidden, device="cuda").bfloat16(),
        torch.randn(experts, hidden, device="cuda") * hidden**-0.5,
    )
    rule = Routing(experts, 4, scoring_func="softmax")
    expected, expected_weights = route(
        (x.double() @ router.double().T).float(), None, rule, backend="reference"
    )
    for _ in range(20):
        ids, weights = moe_gate(x, router, None, rule, backend="cuda")
        assert torch.equal(ids, expected)
        assert distance(weights, expected_weights.double()) < 1e-5


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize(
    ("experts", "n_group", "topk_group", "top_k"),
    [
        (256, 8, 4, 8),
        (16, 4, 2, 4),
        (64, 1, 1, 6),
        (8, 1, 1, 8),
        (160, 8, 3, 6),
        (384, 1, 1, 8),
        (24, 3, 2, 4),
        (1024, 1, 1, 8),
    ],
)
def test_route(experts: int, n_group: int, topk_group: int, top_k: int, scoring: str) -> None:
    logits, bias = (
        torch.randn(50, experts, device="cuda") * 2,
        torch.randn(experts, device="cuda") * 2,
    )
    rule = Routing(
        experts,
        top_k,
        scoring_func=scoring,
        n_group=n_group,
        topk_group=topk_group,
        num_joined_experts=2,
    )
    ids, weights = route(logits, bias, rule, backend="cuda")
    expected, expected_weights = route(logits, bias, rule, backend="reference")
    assert torch.equal(ids, expected)
    assert distance(weights, expected_weights.double()) < 1e-5


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope(interleaved: bool) -> None:
    q, positions = (
        torch.randn(9, 5, 64, device="cuda").bfloat16(),
        torch.randint(0, 50, (9,), device="cuda"),
    )
    angles = torch.rand(50, 32, device="cuda")
    ours = functional.rope(
        q, positions, angles.cos(), angles.sin(), interleaved=interleaved, backend="cuda"
    )
    exact = functional.rope(
        q.float(),
        positions,
        angles.cos(),
        angles.sin(),
        interleaved=interleaved,
        backend="reference",
    )
    assert distance(ours, exact.double()) < TOLERANCE[torch.bfloat16]
