"""What an Ascend 910B core holds, and the tile sizes that fit it.

Buffers of one core (Atlas A2): a vector core's unified buffer, a cube core's L1 and its L0A/L0B
operand and L0C accumulator buffers. The checked figures are of the 910B3, the smallest of the
family in cores; the others differ in the number of cores, not in a core.
"""

import functools
from dataclasses import dataclass

import torch

UNIFIED_BUFFER = 192 << 10
L1_BUFFER = 512 << 10
L0A_BUFFER = 64 << 10
L0B_BUFFER = 64 << 10
L0C_BUFFER = 128 << 10
BURST = 32
"""Bytes; a shorter run of memory costs as much as one of these."""

CUBE_CORES = 20
VECTOR_CORES = 40
VECTOR_TOKENS = 2
"""Up to this many tokens the vector cores multiply alone."""
FEW_TOKENS = 4
"""Up to this many tokens a layer's experts are two launches, and its router's product one, on the
vector cores."""
ROUTER_TILE = (16, 256)
"""Experts and input features of the router that are multiplied together, in float32."""


@dataclass(frozen=True)
class Tile:
    """bm rows of x times a [bk, bn] tile of the weight per step. bm is 1 on the vector cores."""

    bm: int
    bn: int
    bk: int


SPAN = 128
"""Input features whose two halves share the bytes of one 4-bit container tile."""

COLUMNS = {"int4": 64, "fp4": 64, "int8": 128}
"""Output features of a weight tile: what fits the unified buffer while two halves of a tile are
float32 there."""

BLOCK_ROWS = (16, 32, 64, 128)
EXPERT_BLOCK_ROWS = 16


def block_rows(m: int) -> int:
    """Rows of x in one block: the smallest block that holds them all, at most the largest."""
    return next((rows for rows in BLOCK_ROWS if rows >= m), BLOCK_ROWS[-1])


def tile(kind: str, bm: int) -> Tile:
    """The tile of one `tl.dot`: 4-bit weights are multiplied one half of a span at a time."""
    return Tile(bm, COLUMNS[kind], SPAN if kind == "int8" else SPAN // 2)


def cube_bytes(kind: str, bm: int) -> dict[str, int]:
    """Bytes that one step needs in the cube core's buffers. Operands of a step, of 4-bit weights
    those of both halves of a span, are held twice in L1, one loading while the other is multiplied:
    so Huawei's compiler places them."""
    shape = tile(kind, bm)
    products = SPAN // shape.bk
    operand = 1 if kind == "int8" else 2
    left, right = shape.bm * shape.bk * operand, shape.bk * shape.bn * operand
    return {
        "L0A": left,
        "L0B": right,
        "L0C": shape.bm * shape.bn * 4,
        "L1": 2 * products * (left + right),
    }


@functools.cache
def cores(device: torch.device) -> tuple[int, int]:
    """(cube, vector) cores of the device: one program is launched on each."""
    if device.type != "npu":
        return CUBE_CORES, VECTOR_CORES
    limit = torch.get_device_module(device).get_device_limit(device.index or 0)
    return limit["cube_core_num"], limit["vector_core_num"]
