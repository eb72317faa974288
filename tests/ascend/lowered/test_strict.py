"""Every kernel once, as hostile as a launch gets: fewer programs than items, ragged rows and
columns, experts in no order and blocks of none, groups of every size, operands at a guard page,
memory that was never written; and weights beyond 2 GiB."""

import pytest
import torch
from ascend import npu_double
from ascend.lowered.ascend_ir import execute
from ascend.row_blocks import in_order, last_of_many
from ascend.triton_double import check
from kernel_weights import exact_experts, random_experts
from quantkit_kernels import Fp4, ascend, dequantize
from quantkit_kernels.ascend import chip, launch, layout
from quantkit_kernels.linear import quantize_rows
from quantkit_kernels.samples import distance, exact_linear, random_weight

CPU = torch.device("cpu")
CANARY = 12345.0
GRIDS = ("int4-asym-128", "int4-asym-64", "int4-asym-32", "int4-sym-128", "fp4", "int8")
# Input features of R1's linears on one of 8 ranks: down, and everything that reads the hidden state.
WIDTHS = (256, 7168)
TOLERANCE = {"int4": 4e-3, "fp4": 4e-3, "int8": 3e-3}


@pytest.fixture(autouse=True)
def executed(monkeypatch):
    """The kernels that ran, on three cube and five vector cores, so that every launch has more
    items than programs; fresh memory is NaN."""
    ran = []
    monkeypatch.setattr(launch, "cores", lambda device: (3, 5))
    monkeypatch.setattr(launch, "run", lambda one: (ran.append(one.kernel), run(one)))
    torch.use_deterministic_algorithms(True)  # torch then fills what `empty` gives with NaN
    with npu_double.installed():
        yield ran
    torch.use_deterministic_algorithms(False)


def run(one):
    check(one)
    execute(one.function, one.programs, one.args, one.constants)


@pytest.mark.parametrize(
    ("counts", "spare"),
    [([1], 0), ([0, 3, 0, 16, 17, 0, 40], 2), ([0] * 256 + [2], 1), ([33, 0, 0], 3)],
)
def test_assign(counts, spare):
    """Every row is in one block of its expert, none holds more than 16; what is left over has
    expert -1."""
    needed, rows = sum(-(-count // 16) for count in counts), sum(counts)
    experts, first, last = (torch.full((needed + spare,), 777, dtype=torch.int32) for _ in range(3))
    one = launch.assign(torch.tensor(counts), launch.Blocks(16, experts, first, last))
    assert one.programs == 1, "each would write all blocks"
    run(one)
    assert (experts[needed:] == -1).all()
    assert (first[needed:] == 777).all()
    held = [
        (row, expert)
        for expert, *ends in zip(experts[:needed].tolist(), first.tolist(), last.tolist())
        for row in range(*ends)
    ]
    assert held == list(
        zip(range(rows), [expert for expert, count in enumerate(counts) for _ in range(count)])
    )
    assert ((last - first)[:needed] <= 16).all()


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("grid", GRIDS)
def test_linear(grid, k, executed):
    """Every way through a linear: the vector cores' up to two rows, blocks of every size, rows not
    contiguous, two whole column tiles and a ragged one."""
    kind = grid.split("-")[0]
    weight = random_weight(grid, 2 * chip.COLUMNS[kind] + 24, k, torch.Generator().manual_seed(k))
    linear = ascend.linear(weight, torch.bfloat16, CPU)
    counts = (1, 2, 3, 16, 17, 40, 100, 300) if k == WIDTHS[0] else (1, 2, 5)
    for rows in counts:
        x = torch.randn(rows, 2 * k, generator=torch.Generator().manual_seed(rows)).bfloat16()
        x = x[:, ::2]
        assert distance(linear(x), exact_linear(x, weight)) < TOLERANCE[kind], rows
    few = 0 if kind == "int8" else 2
    assert executed == [f"{kind}_rows"] * few + [f"{kind}_blocks"] * (len(counts) - few)


@pytest.mark.parametrize("grid", ["int4-asym-128", "int8"])
def test_fp16(grid):
    weight = random_weight(grid, 72, 1536, torch.Generator().manual_seed(1))
    for rows in (1, 5):
        x = torch.randn(rows, 1536, generator=torch.Generator().manual_seed(rows)).half()
        linear = ascend.linear(weight, torch.float16, CPU)
        assert distance(linear(x), exact_linear(x, weight)) < 8e-4


def test_int8_is_exact_before_the_last_rounding():
    weight = random_weight("int8", 200, 7168, torch.Generator().manual_seed(4))
    x = torch.randn(3, 7168, generator=torch.Generator().manual_seed(3)).bfloat16() * 2.0**20
    codes, scale = quantize_rows(x)
    expected = (codes.int() @ weight.codes.int().T).float() * scale * weight.scale.T
    assert torch.equal(ascend.linear(weight, torch.bfloat16, CPU)(x), expected.bfloat16())


def test_every_code_of_fp4_rows_and_blocks():
    """x picks one weight at a time, and the result is it, to the bit."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8).repeat(126, 8)
    weight = Fp4(codes, scales.unsqueeze(1).repeat(1, 8), torch.tensor(0.75))
    linear, picks = ascend.linear(weight, torch.bfloat16, CPU), torch.eye(128).bfloat16()
    exact = dequantize(weight, torch.float64).T
    for first in range(0, 128, 18):  # on the vector cores: codes 0 and 1, 2 and 3, ..
        assert torch.equal(linear(picks[first : first + 2]).double(), exact[first : first + 2])
    assert torch.equal(linear(picks).double(), exact)


@pytest.mark.parametrize("grid", ["int4-asym-128", "int4-asym-64", "int4-asym-32", "fp4", "int8"])
def test_experts_in_fresh_memory(grid, executed):
    """What no kernel writes is never read: torch's fresh memory is NaN here, and blocks of no
    expert stay so."""
    rng, kind = torch.Generator().manual_seed(6), grid.split("-")[0]
    weights = random_experts(grid, 5, 384, 128, rng)
    experts = ascend.experts_layout(5, weights[0][0], weights[2][0], torch.bfloat16, CPU)
    for index in (3, 0, 1, 2, 4):
        experts.place(index, *(projection[index] for projection in weights))
    for tokens, top_k in ((1, 3), (2, 2), (3, 4), (20, 2), (33, 4)):
        x = torch.randn(tokens, 384, generator=rng).bfloat16()
        ids = torch.rand(tokens, 5, generator=rng).topk(top_k, dim=-1).indices
        topk_weights = torch.rand(tokens, top_k, generator=rng)
        exact = exact_experts(x, ids, topk_weights, weights)
        assert distance(experts.finish()(x, ids, topk_weights), exact) < 1.2e-2, (tokens, top_k)
    few, many = [f"{kind}_gate_up", f"{kind}_down"], ["assign", *[f"{kind}_blocks"] * 2]
    assert executed == few * 3 + many * 2


@pytest.mark.parametrize(
    ("kernel", "grid"),
    [
        ("int4_rows", "int4-asym-128"),
        ("fp4_rows", "fp4"),
        ("int4_blocks", "int4-asym-128"),
        ("fp4_blocks", "fp4"),
        ("int8_blocks", "int8"),
    ],
)
def test_offsets_past_two_gib(kernel, grid):
    """The last of so many experts that its weights lie beyond 2^31 bytes; the others' memory is
    never touched."""
    n, k = chip.COLUMNS[grid.split("-")[0]], 256
    weight = random_weight(grid, n, k, torch.Generator().manual_seed(n))
    packed, experts = last_of_many(layout.pack(weight))
    x = torch.randn(1, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.zeros(1, n, dtype=torch.bfloat16)
    if kernel.endswith("rows"):
        one = launch.rows(packed, x, experts, out)
    else:
        codes, scale = quantize_rows(x) if packed.kind == "int8" else (x, None)
        scale = scale if scale is None else scale.flatten()
        one = launch.blocks(packed, codes, scale, in_order(experts, 1, 16), out)
    assert one.kernel == kernel
    run(one)
    assert distance(out, exact_linear(x, weight)) < TOLERANCE[packed.kind]
