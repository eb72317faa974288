"""The Ascend kernels, lowered for the Ascend910B, the IR executed on this CPU, against float64 at
the tile shapes of DeepSeek-R1.

Whole linears and layers of experts run, layout and launch code included; only `launch.run` is
replaced, by one that executes the IR.
"""

from collections.abc import Iterator

import pytest
import torch
from ascend import npu_double
from ascend.lowered.ascend_ir import execute
from kernel_weights import exact_experts, random_experts
from quantkit_kernels import Fp4, Int8, ascend, dequantize
from quantkit_kernels.ascend import chip, launch
from quantkit_kernels.samples import distance, exact_linear, random_weight

CPU = torch.device("cpu")
GRIDS = ("int4-asym-128", "int4-asym-64", "int4-asym-32", "int4-sym-128", "fp4", "int8")
# Input features of R1's linears on one of 8 ranks: down, q_b, o, everything that reads the hidden
# state.
WIDTHS = (256, 1536, 2048, 7168)
# What rounding the result to the dtype explains, and in the cube kernel for int4 rounding the
# decoded weight too.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 8e-4}


@pytest.fixture(autouse=True)
def executed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that ran."""
    ran: list[str] = []

    def run(one: launch.KernelLaunch) -> None:
        ran.append(one.kernel)
        execute(one.function, one.programs, one.args, one.constants)

    monkeypatch.setattr(launch, "run", run)
    with npu_double.installed():
        yield ran


def random(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("grid", GRIDS)
def test_decode_shapes(grid: str, k: int, executed: list[str]) -> None:
    # Two whole column tiles and a ragged one.
    weight = random_weight(
        grid, 2 * chip.COLUMNS[grid.split("-")[0]] + 24, k, torch.Generator().manual_seed(k)
    )
    linear = ascend.linear(weight, torch.bfloat16, CPU)
    for rows in (1, 2, 5):
        x = random(rows, k, torch.bfloat16)
        assert distance(linear(x), exact_linear(x, weight)) < TOLERANCE[torch.bfloat16], rows
    kind = grid.split("-")[0]
    assert (
        executed == [f"{kind}_blocks"] * 3
        if kind == "int8"
        else [f"{kind}_rows"] * 2 + [f"{kind}_blocks"]
    )


@pytest.mark.parametrize("rows", [1, 16, 19, 40, 100, 300])
@pytest.mark.parametrize("grid", ["int4-asym-128", "fp4", "int8"])
def test_prefill_blocks(grid: str, rows: int) -> None:
    weight = random_weight(grid, 72, 256, torch.Generator().manual_seed(rows))
    x = random(rows, 256, torch.bfloat16)
    assert (
        distance(ascend.linear(weight, torch.bfloat16, CPU)(x), exact_linear(x, weight))
        < TOLERANCE[torch.bfloat16]
    )


@pytest.mark.parametrize("grid", ["int4-asym-128", "int8"])
@pytest.mark.parametrize("rows", [1, 5])
def test_fp16(grid: str, rows: int) -> None:
    weight = random_weight(grid, 72, 1536, torch.Generator().manual_seed(1))
    x = random(rows, 1536, torch.float16)
    assert (
        distance(ascend.linear(weight, torch.float16, CPU)(x), exact_linear(x, weight))
        < TOLERANCE[torch.float16]
    )


def test_fp4_tiles_are_exact_for_every_code_and_scale() -> None:
    """All 16 codes under all 126 positive e4m3 scales: x picks one weight at a time, and the result
    is it, to the bit."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8).repeat(126, 8)
    weight = Fp4(codes, scales.unsqueeze(1).repeat(1, 8), torch.tensor(0.75))
    linear = ascend.linear(weight, torch.bfloat16, CPU)
    picks = torch.eye(128).bfloat16()
    exact = dequantize(weight, torch.float64).T
    # 0.75 adds two significant bits to the six of code and scale: still exact in bf16.
    assert torch.equal(linear(picks).double(), exact)
    assert torch.equal(linear(picks[:2]).double(), exact[:2])


def test_int8_is_exact_before_the_last_rounding() -> None:
    weight = random_weight("int8", 200, 7168, torch.Generator().manual_seed(4))
    assert isinstance(weight, Int8)
    x = random(3, 7168, torch.bfloat16)
    codes, scale = torch.ops.npu.npu_dynamic_quant(x)
    expected = (codes.int() @ weight.codes.int().T).float() * scale.unsqueeze(-1) * weight.scale.T
    assert torch.equal(ascend.linear(weight, torch.bfloat16, CPU)(x), expected.bfloat16())


@pytest.mark.parametrize("grid", ["int4-asym-128", "int4-asym-32", "fp4", "int8"])
def test_experts(grid: str, executed: list[str]) -> None:
    rng = torch.Generator().manual_seed(6)
    weights = random_experts(grid, 6, 256, 128, rng)
    layout = ascend.experts_layout(6, weights[0][0], weights[2][0], torch.bfloat16, CPU)
    for index in (3, 0, 5, 1, 2, 4):
        layout.place(index, *(projection[index] for projection in weights))
    experts = layout.finish()
    for tokens, top_k in ((1, 1), (2, 3), (5, 2), (33, 4)):
        x = random(tokens, 256, torch.bfloat16)
        ids = torch.rand(tokens, 6, generator=rng).topk(top_k, dim=-1).indices
        topk_weights = torch.rand(tokens, top_k, generator=rng)
        exact = exact_experts(x, ids, topk_weights, weights)
        assert distance(experts(x, ids, topk_weights), exact) < 1.2e-2, (tokens, top_k)
    kind = grid.split("-")[0]
    assert (
        executed
        == [f"{kind}_gate_up", f"{kind}_down"] * 2 + ["assign", *[f"{kind}_blocks"] * 2] * 2
    )


def test_r1_experts_of_one_rank() -> None:
    """Hidden 7168, intermediate 2048 / 8, eight experts per token: gate and up [512, 7168], down
    [7168, 256]."""
    rng = torch.Generator().manual_seed(7)
    weights = random_experts("int4-asym-128", 8, 7168, 256, rng)
    layout = ascend.experts_layout(8, weights[0][0], weights[2][0], torch.bfloat16, CPU)
    for index in range(8):
        layout.place(index, *(projection[index] for projection in weights))
    x, ids = random(1, 7168, torch.bfloat16), torch.randperm(8, generator=rng).unsqueeze(0)
    topk_weights = torch.rand(1, 8, generator=rng)
    assert (
        distance(
            layout.finish()(x, ids, topk_weights), exact_experts(x, ids, topk_weights, weights)
        )
        < 1.2e-2
    )
