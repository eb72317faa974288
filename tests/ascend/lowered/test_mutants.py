"""Wrong kernels must fail: each mutant changes one thing in the source, and its result, or what it
writes past the end, gives it away."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from ascend.guard import OutsideOperands
from ascend.lowered.ascend_ir import execute
from ascend.row_blocks import in_order
from imported import module_at
from quantkit_kernels import Fp4, samples
from quantkit_kernels.ascend import kernels, launch, layout
from quantkit_kernels.linear import quantize_rows

CANARY = 12345.0
SOURCE = Path(kernels.__file__).read_text()

# kernel, the function of it or shared by it that changes, what to replace, by what
MUTANTS = {
    "int4_rows, nibbles swapped": (
        "int4_rows",
        "int4_values",
        "return ((container << 12) >> 12)",
        "return (container >> 4)",
    ),
    "int4_rows, unsigned codes": (
        "int4_rows",
        "int4_values",
        "(container >> 4)",
        "((container >> 4) & 15)",
    ),
    "int4_rows, wrong group": (
        "int4_rows",
        "group_offsets",
        "first = span * (2",
        "first = (span + 1) % 3 * (2",
    ),
    "int4_rows, zero point added": ("int4_rows", "int4_row", "low_sum -= ", "low_sum += "),
    "int4_rows, halves of x swapped": (
        "int4_rows",
        "row_halves",
        "x_row + span * 2 * HALF + HALF + half",
        "x_row + span * 2 * HALF + half",
    ),
    "int4_rows, mask one column late": (
        "int4_rows",
        "store_row",
        "mask=target < n)",
        "mask=target <= n)",
    ),
    "int4_rows, mask one column early": (
        "int4_rows",
        "store_row",
        "mask=target < n)",
        "mask=target < n - 1)",
    ),
    "int4_rows, wrong expert": (
        "int4_rows",
        "int4_rows",
        "tl.load(experts + row)",
        "tl.load(experts)",
    ),
    "fp4_rows, nibbles swapped": (
        "fp4_rows",
        "e2m1_values",
        "low = (((container << 12) >> 3)",
        "low = ((container << 5)",
    ),
    "fp4_rows, sign lost": (
        "fp4_rows",
        "e2m1_values",
        "low = (((container << 12) >> 3) & -29184)",
        "low = (((container << 12) >> 3) & 3584)",
    ),
    "fp4_rows, wrong group": (
        "fp4_rows",
        "group_offsets",
        "first = span * (2",
        "first = (span + 1) % 3 * (2",
    ),
    "fp4_rows, scale shifted by 6": (
        "fp4_rows",
        "e4m3_values",
        "tl.int16) << 7)",
        "tl.int16) << 6)",
    ),
    "fp4_rows, global scale of tile 0": (
        "fp4_rows",
        "fp4_row",
        "global_scale + slot * BN",
        "global_scale + 0 * BN",
    ),
    "int4_blocks, nibbles swapped": (
        "int4_blocks",
        "int4_values",
        "return ((container << 12) >> 12)",
        "return (container >> 4)",
    ),
    "int4_blocks, wrong group": (
        "int4_blocks",
        "group_offsets",
        "first = span * (2",
        "first = (span + 1) % 3 * (2",
    ),
    "int4_blocks, zero point added": ("int4_blocks", "int4_blocks", "high -= ", "high += "),
    "int4_blocks, a half of x left out": (
        "int4_blocks",
        "multiplied",
        "span * 2 * HALF + HALF",
        "span * 2 * HALF",
    ),
    "int4_blocks, mask one row late": (
        "int4_blocks",
        "store_block",
        "mask = (row[:, None] < m)",
        "mask = (row[:, None] <= m)",
    ),
    "int4_blocks, mask one row early": (
        "int4_blocks",
        "store_block",
        "mask = (row[:, None] < m)",
        "mask = (row[:, None] < m - 1)",
    ),
    "int4_blocks, unused block written": (
        "int4_blocks",
        "int4_blocks",
        "if expert >= 0:",
        "if expert >= -1:",
    ),
    "fp4_blocks, nibbles swapped": (
        "fp4_blocks",
        "e2m1_values",
        "low = (((container << 12) >> 3)",
        "low = ((container << 5)",
    ),
    "fp4_blocks, scales of the halves swapped": (
        "fp4_blocks",
        "group_offsets",
        "return first, second",
        "return first, first",
    ),
    "fp4_blocks, mask one column late": (
        "fp4_blocks",
        "store_block",
        "(target[None, :] < n)",
        "(target[None, :] <= n)",
    ),
    "int8_blocks, mask one row late": (
        "int8_blocks",
        "store_block",
        "mask = (row[:, None] < m)",
        "mask = (row[:, None] <= m)",
    ),
    "int8_blocks, last step left out": (
        "int8_blocks",
        "int8_blocks",
        "steps = k // BK",
        "steps = k // BK - 1",
    ),
    "int8_blocks, scale of tile 0": (
        "int8_blocks",
        "int8_blocks",
        "tl.load(scale + slot * BN",
        "tl.load(scale + 0 * BN",
    ),
}


def mutant(tmp_path: Path, function: str, old: str, new: str) -> ModuleType:
    """kernels.py with one replacement, inside one function."""
    start = SOURCE.index(f"def {function}(")
    end = SOURCE.find("@triton.jit", start)
    body = SOURCE[start:] if end < 0 else SOURCE[start:end]
    assert old in body, f"{function} has no {old!r}: the mutant is out of date"
    path = tmp_path / "mutant.py"
    path.write_text(SOURCE[:start] + body.replace(old, new) + SOURCE[start + len(body) :])
    return module_at(path)


def passes(module: ModuleType, kernel: str) -> bool:
    """Two experts, a ragged last column tile, ragged rows: whether the result is right and nothing
    else is written."""
    rng = torch.Generator().manual_seed(9)
    grid = {"int4": "int4-asym-128", "fp4": "fp4", "int8": "int8"}[kernel.split("_")[0]]
    n, k, bm = 152, 384, 16
    weights = [samples.random_weight(grid, n, k, rng) for _ in range(2)]
    # As stacked gate and up are: a global scale per row.
    weights = [
        one._replace(global_scale=one.global_scale * torch.rand(n, generator=rng))
        if isinstance(one, Fp4)
        else one
        for one in weights
    ]
    packed = layout.allocate(weights[0], 2, torch.device("cpu"))
    for index, weight in enumerate(weights):
        layout.place(packed, index, weight)
    rows = 3 if kernel.endswith("rows") else bm + 3
    x = torch.randn(rows, k, generator=rng).bfloat16()
    memory = torch.full((2 * bm + 1, n), CANARY, dtype=torch.bfloat16)
    out = memory[:rows]
    expected = torch.full(memory.shape, CANARY, dtype=torch.float64)
    if kernel.endswith("rows"):
        experts = torch.tensor([1, 0, 1], dtype=torch.int32)
        one = launch.rows(packed, x, experts, out)
        expected[:rows] = torch.cat(
            [
                samples.exact_linear(x[row : row + 1], weights[expert])
                for row, expert in enumerate(experts)
            ]
        )
    else:
        experts = torch.tensor([-1, 1], dtype=torch.int32)
        codes, scale = quantize_rows(x)
        is_int8 = kernel.startswith("int8")
        one = launch.blocks(
            packed,
            codes if is_int8 else x,
            scale.flatten() if is_int8 else None,
            in_order(experts, len(x), bm),
            out,
        )
        expected[bm:rows] = samples.exact_linear(x[bm:], weights[1])
    assert one.kernel == kernel
    try:  # fewer programs than items, as on the chip
        execute(getattr(module, kernel), 4, one.args, one.constants)
    except OutsideOperands:
        return False
    touched = expected != CANARY
    untouched = bool((memory[~touched] == CANARY).all())
    return untouched and samples.distance(memory[touched], expected[touched]) < 6e-3


@pytest.mark.parametrize(
    "kernel", ["int4_rows", "fp4_rows", "int4_blocks", "fp4_blocks", "int8_blocks"]
)
def test_the_kernel_passes(kernel: str) -> None:
    assert passes(kernels, kernel)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name: str, tmp_path: Path) -> None:
    kernel, function, old, new = MUTANTS[name]
    assert not passes(mutant(tmp_path, function, old, new), kernel)
