"""Plans of wgmma_kernel.py, int8 products of linears on Hopper: where there may be any, the rule
for a weight that is in no table, and what
`quantkit kernels --tune` tries."""

import functools
import importlib.util
from dataclasses import dataclass

from quantkit_kernels.triton.layout import SPAN

_MOST_SPLIT = 14


@dataclass(frozen=True)
class WgmmaPlan:
    """rows, tokens: of a tile; split: programs that share K; warps; stages: places that tiles are
    loaded to; left: the weight is the left operand; programs: on a multiprocessor, each of which
    computes tile after tile, or 0 for one to each part of a tile."""

    rows: int
    tokens: int
    split: int
    warps: int
    stages: int
    left: bool
    programs: int


def has_wgmma(name: str, k: int) -> bool:
    """Whether products over K of int8 on cards of this architecture may be by wgmma_kernel.py: TMA
    reads rows of whole 16 bytes."""
    return name == "sm_90" and k % 16 == 0 and has_gluon()


@functools.cache
def has_gluon() -> bool:
    """Whether this Triton has the language of wgmma_kernel.py, as it is from 3.6 on."""
    found = importlib.util.find_spec
    return (
        found("triton") is not None and found("triton.experimental.gluon.nvidia.hopper") is not None
    )


def shared_bytes(plan: WgmmaPlan) -> int:
    """Shared memory of a program: the tiles, their barriers, and room in which half of the result
    is brought into rows."""
    return plan.stages * ((plan.rows + plan.tokens) * SPAN + 8) + plan.rows * plan.tokens


Shape = tuple[int, int, int, int, bool, int]
"""Rows and tokens of a tile, warps, stages, whether the weight is left, programs on a
multiprocessor."""
_SHALLOW = 2048
"""K up to which the way out of a tile counts, which two programs of a multiprocessor hide from one
another."""


def wgmma_rule(processors: int, n: int, k: int, tokens: int) -> WgmmaPlan:
    """What the plans measured on an H200 have in common: the largest tiles of which there are
    enough, and from 17 tokens on K is shared only where a third or half of the multiprocessors
    would have none."""

    def tiles(rows: int, wide: int) -> int:
        return -(-n // rows) * -(-tokens // wide)

    if tokens <= 16:
        return _shared((128, 16, 4, 6, True, 2), processors, n, k, tokens)
    if tokens <= 32:
        shape: Shape = (64, 32, 4, 8, True, 2)
        enough = tiles(64, 32) >= processors * 2 // 3
    else:
        shape = (64, 64, 4, 10, False, 1)
        if tokens > 256 and k > _SHALLOW and tiles(128, 256) >= processors * 4 // 5:
            shape = (128, 256, 8, 4, False, 1)
        elif tokens > 64 and k <= _SHALLOW and tiles(128, 128) >= processors:
            shape = (128, 128, 4, 3, False, 2)
        elif tokens > 64 and tokens <= 128 and processors * 4 // 5 <= tiles(64, 128) <= processors:
            shape = (64, 128, 4, 9, False, 1)
        elif tokens > 64 and tiles(128, 128) >= processors * (3 if tokens > 128 else 2) // 6:
            shape = (128, 128, 8, 6, False, 1)
        enough = shape[0] > 64 or 2 * tiles(*shape[:2]) > processors
    return _plan(shape, 1) if enough else _shared(shape, processors, n, k, tokens)


def wgmma_candidates(processors: int, n: int, k: int, tokens: int) -> list[WgmmaPlan]:
    """What --tune tries, the rule's first."""
    found = [wgmma_rule(processors, n, k, tokens)]
    for shape in _shapes(tokens):
        shared = _shared(shape, processors, n, k, tokens)
        found += [shared, _plan(shape, min(shared.split, 2)), _plan(shape, 1)]
    return list(dict.fromkeys(found))


def _plan(shape: Shape, split: int) -> WgmmaPlan:
    rows, wide, warps, stages, left, programs = shape
    return WgmmaPlan(rows, wide, split, warps, stages, left, programs if split == 1 else 0)


def _shared(shape: Shape, processors: int, n: int, k: int, tokens: int) -> WgmmaPlan:
    """With K shared among as many programs as fit."""
    tiles, steps = -(-n // shape[0]) * -(-tokens // shape[1]), -(-k // SPAN)
    return _plan(shape, max(1, min(shape[-1] * processors // tiles, steps // 4, _MOST_SPLIT)))


def _shapes(tokens: int) -> list[Shape]:
    if tokens <= 32:
        width = 16 if tokens <= 16 else 32
        return [
            (128, width, 4, 6 if width == 16 else 5, True, 2),
            (64, width, 4, 8, True, 2),
            (64, width, 4, 4, True, 4),
        ]
    if tokens <= 64:
        return [(64, 64, 4, 10, False, 1), (64, 64, 4, 6, True, 2), (128, 64, 4, 4, True, 2)]
    found: list[Shape] = [
        (128, 128, 8, 6, False, 1),
        (128, 128, 4, 3, False, 2),
        (64, 64, 4, 6, False, 2),
    ]
    if tokens <= 256:
        return [
            *found,
            (64, 128, 4, 4, False, 2),
            (64, 128, 4, 9, False, 1),
            (64, 64, 4, 10, False, 1),
        ]
    return [*found, (128, 256, 8, 4, False, 1), (256, 128, 8, 4, False, 1)]
