"""The lowered IR of every shipped configuration: only vector and cube instructions in the inner
loop, within the buffers."""

import pytest
import torch
import triton
import triton.language as tl
from ascend.lowered.ascend_ir import lower
from ascend.lowered.ir_facts import loops, peak_bytes, scalar_accesses
from ascend.row_blocks import in_order
from quantkit_kernels.ascend import chip, launch, layout
from quantkit_kernels.samples import random_weight

GRIDS = ("int4-asym-128", "int4-asym-64", "int4-asym-32", "int4-sym-128", "fp4", "int8")
SHIPPED = [(grid, 1) for grid in GRIDS if grid != "int8"] + [
    (grid, bm) for grid in GRIDS for bm in chip.BLOCK_ROWS
]


def lowered(grid: str, bm: int) -> str:
    """The IR of a dense linear; bm is 1 for the vector cores' kernels."""
    packed = layout.pack(random_weight(grid, 128, 256, torch.Generator().manual_seed(0)))
    x = torch.zeros(bm, 256, dtype=torch.int8 if grid == "int8" else torch.bfloat16)
    out, experts = torch.zeros(bm, 128, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    row_scale = torch.zeros(bm) if grid == "int8" else None
    one = (
        launch.rows(packed, x, experts, out)
        if bm == 1
        else launch.blocks(packed, x, row_scale, in_order(experts, len(x), bm), out)
    )
    return lower(one.function, one.args, one.constants)


@pytest.mark.parametrize(("grid", "bm"), SHIPPED)
def test_inner_loop(grid: str, bm: int) -> None:
    text = lowered(grid, bm)
    outer, inner = loops(text)
    assert (outer.depth, inner.depth) == (0, 1)
    assert scalar_accesses(inner) == []
    # Scalars that an item reads: its expert, and a block's two ends.
    outside = [line for line in scalar_accesses(outer) if "scf.for" not in line]
    assert len(outside) == (1 if bm == 1 else 3)
    assert all("memref.load" in line for line in outside)
    # Half of the unified buffer, so that the next tile can be loaded while this one is decoded.
    assert peak_bytes(text, inner) <= chip.UNIFIED_BUFFER * (1 if bm > 1 else 0.55)


@pytest.mark.parametrize(
    ("grid", "bm"),
    [(grid, bm) for grid in ("int4-asym-128", "fp4", "int8") for bm in chip.BLOCK_ROWS],
)
def test_cube_tiles_are_the_budgeted_ones(grid: str, bm: int) -> None:
    kind = grid.split("-")[0]
    tile = chip.tile(kind, bm)
    element = "i8" if kind == "int8" else "bf16"
    products = [line for line in lowered(grid, bm).splitlines() if "linalg.matmul" in line]
    assert len(products) == (1 if kind == "int8" else 2)
    for line in products:
        assert (
            f"tensor<{tile.bm}x{tile.bk}x{element}>, tensor<{tile.bk}x{tile.bn}x{element}>" in line
        )


@triton.jit
def looked_up(codes, table, out, n: tl.constexpr):  # type: ignore[no-untyped-def]
    for step in range(0, 4):
        place = step * n + tl.arange(0, n)
        tl.store(out + place, tl.load(table + tl.load(codes + place)))


def test_a_look_up_table_is_seen_as_a_scalar_loop() -> None:
    codes = torch.zeros(256, dtype=torch.int32)
    text = lower(looked_up, (codes, torch.zeros(16), torch.zeros(256)), {"n": 64})
    assert any(scalar_accesses(loop) for loop in loops(text))
