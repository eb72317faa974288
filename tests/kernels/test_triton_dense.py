"""Few rows by 16-bit weights: the kernel against float64 on a GPU or in the interpreter, where it
is taken, and how plans are measured."""

import json

import pytest
import torch
import torch.nn.functional as F
from quantkit_kernels import cuda, prepare_dense, rms_norm, silu_and_mul
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.linear import laid_out
from quantkit_kernels.samples import GRIDS, TOLERANCE, distance, exact_linear, random_weight
from quantkit_kernels.sizes import QWEN3_8B_LINEARS
from quantkit_kernels.triton import cards, dense_linear, small
from quantkit_kernels.triton.dense_linear import TritonDenseLinear, multiply_rows
from quantkit_kernels.triton.dense_plans import MOST_ROWS, DenseRowsPlan, dense_candidates
from quantkit_kernels.triton.small import multiply_small
from quantkit_kernels.weights import Dense

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUNS = pytest.mark.skipif(
    why_unusable("rms_norm", "triton", DEVICE) is not None,
    reason="no GPU with Triton, and not interpreted",
)
N, K = 256, 1280
PLANS = [
    DenseRowsPlan(64, 128, 1, 4, 4),
    DenseRowsPlan(64, 128, 3, 4, 6),
    DenseRowsPlan(128, 64, 4, 4, 6),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cards._table.cache_clear()
    yield
    cards._table.cache_clear()


def write_plans(name, rows):
    """A table of this machine's own, which has nothing but plans of 16-bit weights."""
    path = cards.own_table(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"plans": {"linear": [], "experts": [], "dense": rows}}))
    cards._table.cache_clear()


def made(tokens, dtype=torch.bfloat16):
    rng = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, K, generator=rng).to(dtype).to(DEVICE), (
        torch.randn(N, K, generator=rng) / K**0.5
    ).to(dtype).to(DEVICE)


@RUNS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_tokens_that_fill_no_tile(plan, dtype):
    for tokens in (1, 17, MOST_ROWS):
        x, weight = made(tokens, dtype)
        y = multiply_rows(x, weight, plan)
        assert distance(y.cpu(), exact_linear(x.cpu(), Dense(weight.cpu()))) < TOLERANCE[dtype], (
            tokens
        )
        assert torch.equal(y, multiply_rows(x, weight, plan)), (
            "sums of parts are added in their order"
        )


@RUNS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grid", ["int4-asym-64", "w8a16-64", *GRIDS])
def test_small_weights(grid, dtype, monkeypatch):
    """As SmolLM2 has them, and sizes that no tile divides: one launch with a norm or an activation
    before the product, and a sum after it."""
    if grid == "fp4" and dtype == torch.float16:
        pytest.skip("FP4 computes in bfloat16 only")
    monkeypatch.setattr(small, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(dense_linear, "is_small_dense", lambda *sizes: True)
    rng = torch.Generator().manual_seed(0)
    for n, k in ((49, 640 if grid.endswith("128") else 576), (40, 1536)):
        weight = random_weight(grid, n, k, rng)
        if isinstance(weight, Dense):
            weight = Dense(weight.weight.to(dtype))
        linear = laid_out("triton", weight, dtype, DEVICE)
        assert linear.fuses(1)
        assert not linear.fuses(2)
        x, both, residual = (torch.randn(1, width).to(dtype) for width in (k, 2 * k, n))
        gain = 1 + torch.rand(k)
        normed = rms_norm(x, gain, 1e-5, backend="reference")
        gated = silu_and_mul(both, backend="reference")
        plain = linear(x.to(DEVICE))
        assert distance(plain.cpu(), exact_linear(x, weight)) < TOLERANCE[dtype]
        found = linear.fused(x.to(DEVICE), gain.to(DEVICE), 1e-5)
        assert distance(found.cpu(), exact_linear(normed, weight)) < TOLERANCE[dtype]
        found = linear.fused(both.to(DEVICE), residual=residual.to(DEVICE))
        exact = exact_linear(gated, weight) + residual.double()
        assert distance(found.cpu(), exact) < TOLERANCE[dtype]


@RUNS
def test_a_small_gate_of_float32():
    for n, k in ((960, 576), (49, 1536), (3, 8)):
        x, gate = torch.randn(1, k).bfloat16(), torch.randn(n, k)
        error = multiply_small(x.to(DEVICE), gate.to(DEVICE)).cpu() - x.double() @ gate.T.double()
        assert (error.abs() <= 1e-6 * (x.double().abs() @ gate.T.double().abs())).all(), (n, k)


def test_what_is_small():
    for shape in ((960, 576), (49, 1536), (3, 8)):
        assert cards.why_no_dense("sm_90", (shape,)) is None
        assert cards.why_no_dense("sm_80", (shape,)) is not None
    for kind in ("int4", "int8", "fp4"):
        assert cuda.leaves(f"linear_{kind}", ((576, 1536), (3072, 576)))
        assert not cuda.leaves(f"linear_{kind}", ((576, 1536), (2048, 4096)))
        assert not cuda.leaves(f"experts_{kind}", ((576, 1536),))


@RUNS
def test_a_linear_takes_the_plan_of_its_rows_and_the_library_elsewhere():
    """One row and more than 64: the library. Rows that do not lie side by side are copied."""
    first, second = PLANS[:2]
    fields = [[N, K, 1, [0] * 5], [N, K, 16, [64, 128, 1, 4, 4]], [N, K, 64, [64, 128, 3, 4, 6]]]
    write_plans(cards.architecture(DEVICE), fields)
    x, weight = made(MOST_ROWS + 1)
    linear = prepare_dense(weight, backend="triton")
    assert isinstance(linear, TritonDenseLinear)
    for tokens, plan in (
        (1, None),
        (2, first),
        (16, first),
        (17, second),
        (MOST_ROWS, second),
        (MOST_ROWS + 1, None),
    ):
        expected = (
            F.linear(x[:tokens], weight)
            if plan is None
            else multiply_rows(x[:tokens], weight, plan)
        )
        assert torch.equal(linear(x[:tokens]), expected), tokens
    apart = x.repeat(1, 2)[:9, :K]
    assert not apart.is_contiguous()
    assert torch.equal(linear(apart), multiply_rows(x[:9], weight, first))


@pytest.mark.parametrize(("card", "processors"), [("sm_90", 132), ("sm_80", 108), ("gfx942", 304)])
def test_candidates_compute_all_of_a_weight_and_fit_the_card(card, processors):
    room = cards.shared_bytes(card)
    for n, k in QWEN3_8B_LINEARS.values():
        plans = dense_candidates(processors, n, k, room)
        assert plans
        assert len(set(plans)) == len(plans)
        for plan in plans:
            assert n % plan.rows == k % plan.features == 0
            assert plan.split <= k // plan.features
            assert (plan.rows + MOST_ROWS) * plan.features * 2 * plan.stages <= room
    assert dense_candidates(processors, 4100, 4096, room) == []


def test_it_serves_only_weights_whose_plans_were_measured():
    assert cards.why_no_dense("sm_80", ()) is not None, "nothing was measured"
    write_plans("sm_80", [[4096, 4096, 8, [64, 128, 2, 4, 6]], [6144, 4096, 8, [0] * 5]])
    assert cards.why_no_dense("sm_80", ()) is None
    assert cards.why_no_dense("sm_80", ((4096, 4096),)) is None
    for shape in ((6144, 4096), (4096, 4097)):
        told = cards.why_no_dense("sm_80", ((4096, 4096), shape))
        assert f"{shape[0]} x {shape[1]} of 16 bits" in told
    assert (
        cards.dense_plan("sm_80", 4096, 4096, 8)
        == cards.dense_plan("sm_80", 4096, 4096, 64)
        == DenseRowsPlan(64, 128, 2, 4, 6)
    )
    assert cards.dense_plan("sm_80", 4096, 4096, 65) is None
    assert cards.dense_plan("sm_80", 6144, 4096, 8) is None
