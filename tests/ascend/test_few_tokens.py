"""Experts of few tokens in two launches, and routing's rest in one: on the double of the Triton
kernels."""

import pytest
import torch
from ascend import triton_double
from kernel_weights import exact_experts, layer, random_experts
from quantkit_kernels import Routing, ascend, moe_gate, reference
from quantkit_kernels.ascend import gate, launch
from quantkit_kernels.ascend.chip import COLUMNS, FEW_TOKENS, SPAN, VECTOR_CORES
from quantkit_kernels.ascend.experts import assigned
from quantkit_kernels.ascend.layout import pack
from quantkit_kernels.samples import distance, random_weight

LARGE = 2.0**20
"""More than fp16 holds."""
GRIDS = ("int4-asym-128", "int4-asym-32", "int4-sym-64", "fp4", "int8")


@pytest.fixture(autouse=True)
def launched():
    with triton_double.installed() as names:
        yield names


@pytest.mark.parametrize("grid", GRIDS)
def test_experts_of_few_tokens_are_two_launches(grid, launched):
    rng, kind = torch.Generator().manual_seed(3), grid.split("-")[0]
    weights = random_experts(grid, 6, 256, 128, rng)
    experts = layer(weights, "ascend", torch.bfloat16)
    for tokens, top_k in ((1, 1), (2, 3), (FEW_TOKENS, 6), (FEW_TOKENS + 1, 2)):
        launched.clear()
        x = torch.randn(tokens, 512, generator=rng).bfloat16()[:, ::2]
        ids = torch.rand(tokens, 6, generator=rng).topk(top_k, dim=-1).indices
        share = torch.rand(tokens, top_k, generator=rng) * LARGE
        assert distance(experts(x, ids, share), exact_experts(x, ids, share, weights)) < 1.2e-2
        few, many = [f"{kind}_gate_up", f"{kind}_down"], ["assign", *[f"{kind}_blocks"] * 2]
        assert launched == (few if tokens <= FEW_TOKENS else many), tokens


@pytest.mark.parametrize("grid", GRIDS)
def test_weights_of_experts_are_added_in_float32(grid):
    """Two experts that differ in down's sign alone, by weights that 16 bits do not tell apart: what
    is left is the difference of the weights."""
    weights = random_experts(grid, 1, 256, 128, torch.Generator().manual_seed(3))
    down = weights[2][0]
    signed = "global_scale" if grid == "fp4" else "scale"
    opposite = down._replace(**{signed: -getattr(down, signed)})
    experts = layer([2 * weights[0], 2 * weights[1], [down, opposite]], "ascend", torch.bfloat16)
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
    one, ids = experts(x, torch.tensor([[0]]), torch.ones(1, 1)), torch.tensor([[0, 1]])
    left = experts(x, ids, torch.tensor([[1 + 2.0**-12, 1.0]]))
    assert distance(left * 2.0**12, one.double()) < 1e-2


def test_gate_ends_with_a_column_tile():
    """Down's inputs, as many as gate has columns, are whole spans, and a span is whole tiles: up
    begins with one."""
    assert all(SPAN % columns == 0 for columns in COLUMNS.values())
    for grid in ("int4", "fp4", "int8"):
        reasons = [
            ascend.refused(f"experts_{grid}", torch.bfloat16, size)
            for size in ((256, 192), (128, 256))
        ]
        assert "multiples of 128" in str(reasons[0])
        assert reasons[1] is None


def check_gate(*given):
    """It is the reference's."""
    ids, weights = moe_gate(*given, backend="ascend")
    twin_ids, twin_weights = reference.moe_gate(*given)
    assert torch.equal(ids.long(), twin_ids.long())
    torch.testing.assert_close(weights, twin_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("joined", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_gate(joined, tokens, launched):
    """Rows of 32 bits are not the router's: it multiplies rows of 16."""
    rng = torch.Generator().manual_seed(tokens)
    x, router = torch.randn(tokens, 512, generator=rng), torch.randn(40, 512, generator=rng)
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    how, bias = Routing(40, 5, num_joined_experts=joined, **groups), torch.rand(40, generator=rng)
    for rows in (x.bfloat16(), x):
        launched.clear()
        check_gate(rows, router, bias, how)
        by_router = tokens <= FEW_TOKENS and rows is not x
        assert launched == ["router"] * by_router + ["join"] * bool(joined)


@pytest.mark.parametrize(
    "rule",
    [{"scoring_func": "sqrtsoftplus"}, {"scoring_func": "softmax"}, {"joined_gate": True}],
    ids=["scores", "divided", "gated"],
)
def test_gates_that_the_device_does_not_have_are_the_references(rule):
    rng, how = torch.Generator().manual_seed(5), Routing(40, 5, num_joined_experts=1, **rule)
    x = torch.randn(3, 512, generator=rng).bfloat16()
    router, bias = torch.randn(how.num_logits, 512, generator=rng), torch.rand(40, generator=rng)
    check_gate(x, router, bias, how)


@pytest.mark.parametrize("hidden", [512, 272])
def test_gate_of_a_part_and_of_nothing(hidden, launched):
    """Rows that lie apart, widths that are no whole tiles of the router's, and no rows at all."""
    rng = torch.Generator().manual_seed(3)
    how = Routing(40, 8, n_group=4, topk_group=2, num_joined_experts=1)
    wide = torch.randn(2, 2 * hidden, generator=rng).bfloat16()
    router = torch.randn(40, hidden, generator=rng)
    bias = torch.rand(40, generator=rng)
    for x in (wide[:, ::2], wide[:0, ::2]):
        launched.clear()
        check_gate(x, router, bias, how)
        assert launched == (["router"] * (hidden == 512) + ["join"] if len(x) else [])


def test_a_kernel_has_one_program_for_each_vector_core_at_most():
    """More items than cores are taken in turns."""
    packed = pack(random_weight("int8", 64 * VECTOR_CORES, 256, torch.Generator().manual_seed(1)))
    x, many = torch.empty(4, 256), torch.empty(4, 64 * VECTOR_CORES)
    ids, weights = torch.zeros(4, dtype=torch.int32), torch.zeros(4)
    rows = [torch.empty(2 * VECTOR_CORES, columns) for columns in (5, 5, 6, 6)]
    for made in (
        launch.gate_up(packed, x, ids, many),
        launch.down(packed, x, ids, weights, many),
        launch.router(x, many.new_empty(many.shape[1], 256), many),
        launch.join(*rows, 40),
    ):
        assert made.programs == VECTOR_CORES, made.kernel


def test_results_lie_where_their_operands_do(monkeypatch):
    launches = []
    monkeypatch.setattr(launch, "run", launches.append)
    meta, how = torch.device("meta"), Routing(40, 5, num_joined_experts=1)
    chosen = torch.empty(2, 5, dtype=torch.int32, device=meta), torch.empty(2, 5, device=meta)
    monkeypatch.setattr(gate, "choose", lambda logits, bias, routing: chosen)
    x = torch.empty(2, 512, dtype=torch.bfloat16, device=meta)
    found = [*gate.moe_gate(x, torch.empty(40, 512, device=meta), None, how)]
    blocks = assigned(torch.empty(6, dtype=torch.int64, device=meta), 20)
    weight = random_weight("int8", 72, 256, torch.Generator().manual_seed(1))
    found += [blocks.experts, blocks.first, blocks.last]
    found += [*ascend.linear(weight, torch.bfloat16, meta).held()]
    weight = random_weight("fp4", 72, 256, torch.Generator().manual_seed(1))
    linear = ascend.linear(weight, torch.bfloat16, meta)
    found += [linear(torch.empty(rows, 256, dtype=torch.bfloat16, device=meta)) for rows in (1, 17)]
    found += [arg for one in launches for arg in one.args if isinstance(arg, torch.Tensor)]
    assert {one.device for one in found} == {meta}
    names = ["router", "join", "assign", "fp4_rows", "fp4_blocks"]
    assert [one.kernel for one in launches] == names


@pytest.mark.parametrize(("tokens", "top_k"), [(5, 1), (33, 4), (300, 2)])
def test_blocks_are_known_before_the_experts_are(tokens, top_k):
    """As many for all tokens at one expert as for tokens at all, and enough for every pair."""
    for ids in (torch.zeros(tokens, top_k), torch.arange(tokens * top_k).view(tokens, top_k) % 7):
        counts = torch.bincount(ids.flatten().long(), minlength=7)
        found = assigned(counts, tokens * top_k)
        assert len(found.experts) == tokens * top_k // 16 + min(tokens * top_k, 7)
        used = found.experts >= 0
        assert int((found.last - found.first)[used].sum()) == tokens * top_k
