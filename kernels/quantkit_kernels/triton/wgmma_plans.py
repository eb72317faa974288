"""Plans of wgmma_kernel.py, int8 products of linears on Hopper: where there may be any, the rule for a weight that is in no table, and what
`quantkit kernels --tune` tries."""

import functools
import importlib.util
from dataclasses import dataclass

from quantkit_kernels.triton.layout import SPAN

_SHARED_BYTES = 227 << 10
_MOST_SPLIT = 14


@dataclass(frozen=True)
class WgmmaPlan:
    """rows, tokens: of a tile; split: programs that share K; warps; stages: places that tiles are loaded to; left: the weight is the left
    operand; programs: on a multiprocessor, each of which computes tile after tile, or 0 for one to each part of a tile."""

    rows: int
    tokens: int
    split: int
    warps: int
    stages: int
    left: bool
    programs: int


def has_wgmma(name: str, k: int) -> bool:
    """Whether products over K of int8 on cards of this architecture may be by wgmma_kernel.py: TMA reads rows of whole 16 bytes."""
    return name == "sm_90" and k % 16 == 0 and has_gluon()


@functools.cache
def has_gluon() -> bool:
    """Whether this Triton has the language of wgmma_kernel.py, as it is from 3.6 on."""
    found = importlib.util.find_spec
    return found("triton") is not None and found("triton.experimental.gluon.nvidia.hopper") is not None


def shared_bytes(plan: WgmmaPlan) -> int:
    """Shared memory of a program: the tiles, their barriers, and room in which half of the result is brought into rows."""
    return plan.stages * ((plan.rows + plan.tokens) * SPAN + 8) + plan.rows * plan.tokens


def wgmma_rule(processors: int, n: int, k: int, tokens: int) -> WgmmaPlan:
    """What the plans measured on an H200 have in common."""
    return wgmma_candidates(processors, n, k, tokens)[0]


def wgmma_candidates(processors: int, n: int, k: int, tokens: int) -> list[WgmmaPlan]:
    """What --tune tries, the rule's first."""
    found: list[WgmmaPlan] = []
    for rows, wide, warps, stages, left, programs in _shapes(tokens):
        tiles, steps = -(-n // rows) * -(-tokens // wide), -(-k // SPAN)
        shared = max(1, min(programs * processors // tiles, steps // 4, _MOST_SPLIT))
        for split in dict.fromkeys((shared, min(shared, 2), 1)):
            plan = WgmmaPlan(rows, wide, split, warps, stages, left, programs if split == 1 else 0)
            if plan not in found:
                found.append(plan)
    return found


def _shapes(tokens: int) -> list[tuple[int, int, int, int, bool, int]]:
    """Rows and tokens of a tile, warps, stages, whether the weight is left, programs on a multiprocessor."""
    width = max(16, 1 << (tokens - 1).bit_length())
    if width <= 32:
        return [(64, width, 4, 8, True, 2), (128, width, 4, 6, True, 2), (64, width, 4, 4, True, 4)]
    if width <= 64:
        return [(64, 64, 4, 6, True, 2), (128, 64, 4, 4, True, 2), (64, 64, 4, 10, False, 1), (32, 64, 4, 14, False, 1)]
    if width <= 128:
        return [(128, 128, 8, 6, False, 1), (128, 128, 4, 3, False, 2), (64, 128, 4, 4, False, 2), (64, 64, 4, 10, False, 1)]
    if width <= 256:
        return [(128, 128, 8, 6, False, 1), (64, 128, 4, 4, False, 2), (128, 128, 4, 3, False, 2), (64, 64, 4, 6, False, 2)]
    return [(128, 256, 8, 4, False, 1), (128, 128, 4, 3, False, 2), (128, 128, 8, 6, False, 1), (256, 128, 8, 4, False, 1)]
