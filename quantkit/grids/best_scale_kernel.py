# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Rounding to a grid in Triton, and the best of several scales of every group in one kernel launch on
a GPU, where PyTorch reads the weights ten times a candidate.

`round_level` does what `quantize` of the quantizers does; clamping precedes rounding, which is the
same if the limits are whole levels, and keeps every number where adding and subtracting 1.5 * 2^23
rounds to even.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HALF_EVEN = tl.constexpr(12582912.0)
FP4_END, FP8_END = tl.constexpr(6.0), tl.constexpr(448.0)
"""Largest values of E2M1 and e4m3."""
TILE = 2048
"""Weights of a program."""


@triton.jit
def _whole(x):
    """Round to the nearest integer, ties to even; |x| below 2^22."""
    return (x + HALF_EVEN) - HALF_EVEN


@triton.jit
def round_level(level, zero, low, high, FP4: tl.constexpr, FP8: tl.constexpr, ZERO: tl.constexpr):
    """The nearest level of the grid: an integer in low..high less the zero point, or a value of E2M1
    or e4m3."""
    if FP4:
        level = tl.minimum(tl.maximum(level, -FP4_END), FP4_END)
        spacing = tl.where(tl.abs(level) < 2, 0.5, tl.where(tl.abs(level) < 4, 1.0, 2.0))
        level = _whole(level / spacing) * spacing
    elif FP8:
        level = tl.minimum(tl.maximum(level, -FP8_END), FP8_END)
        power = level.to(tl.int32, bitcast=True) & 0x7F800000
        # an eighth of the level's power of two, at least 2^-9
        spacing = tl.maximum(power - (3 << 23), 118 << 23).to(tl.float32, bitcast=True)
        level = _whole(level / spacing) * spacing
    elif ZERO:
        level = _whole(tl.minimum(tl.maximum(level, low - zero), high - zero))
    else:
        level = _whole(tl.minimum(tl.maximum(level, low), high))
    return level


@triton.jit
def _best_scale(
    weights, scales, zeros, importance, best_scale, best_zero,
    rows_all, width, low, high,
    batch_stride, group_stride, row_stride, importance_batch, importance_group,
    CANDIDATES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FP4: tl.constexpr,
    FP8: tl.constexpr, ZERO: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    group, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside, known = row < rows_all, channel < width
    w = tl.load(
        weights + batch * batch_stride + group * group_stride
        + row[:, None].to(tl.int64) * row_stride + channel[None, :],
        mask=inside[:, None] & known[None, :],
        other=0.0,
    )  # fmt: skip
    if WEIGHTED:
        weight = tl.load(
            importance + batch * importance_batch + group * importance_group + channel,
            mask=known,
            other=0.0,
        )
    own = (batch * tl.num_programs(1) + group) * rows_all + row
    step = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * rows_all
    least = tl.full((ROWS,), float("inf"), tl.float32)
    scale, zero = tl.full((ROWS,), 1.0, tl.float32), tl.zeros((ROWS,), tl.float32)
    for number in range(CANDIDATES):
        size = tl.load(scales + number * step + own, mask=inside, other=1.0)
        nought = tl.zeros((ROWS,), tl.float32)
        if ZERO:
            nought = tl.load(zeros + number * step + own, mask=inside, other=0.0)
        level = round_level(
            tl.div_rn(w, size[:, None] + tl.zeros_like(w)),
            nought[:, None],
            low,
            high,
            FP4,
            FP8,
            ZERO,
        )
        error = level * size[:, None] - w
        squared = error * error
        if WEIGHTED:
            squared *= weight[None, :]
        total = tl.sum(tl.where(known[None, :], squared, 0.0), axis=1)
        better = total < least
        least = tl.where(better, total, least)
        scale, zero = tl.where(better, size, scale), tl.where(better, nought, zero)
    tl.store(best_scale + own, scale, mask=inside)
    if ZERO:
        tl.store(best_zero + own, zero, mask=inside)


def best_scale(
    groups: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    importance: Tensor | None,
    kind: str,
    code_range: tuple[int, int] | None,
) -> tuple[Tensor, Tensor | None]:
    """The scale and the zero point, float32 [..., G, N], with the least (weighted) squared error, the
    first of equals. groups float32 [..., G, N, g], channels contiguous in memory, with at most one
    leading dimension; scales, zeros [C, ..., G, N]: of C candidates; importance [..., G, 1, g]; kind,
    code_range: a quantizer's."""
    groups = groups.unsqueeze(0) if groups.dim() == 3 else groups
    batch, count, rows, width = groups.shape
    found = torch.empty_like(scales[0])
    zero = None if zeros is None else torch.empty_like(found)
    weights = (
        scales if importance is None else importance.expand(batch, count, 1, width).contiguous()
    )
    low, high = code_range or (0, 0)
    wide = triton.next_power_of_2(width)
    own = max(1, TILE // wide)
    _best_scale[(triton.cdiv(rows, own), count, batch)](
        groups, scales, scales if zeros is None else zeros, weights,
        found, found if zero is None else zero,
        rows, width, float(low), float(high),
        *groups.stride()[:3], count * width, width,
        CANDIDATES=len(scales), ROWS=own, WIDTH=wide, FP4=kind == "fp4", FP8=kind == "fp8",
        ZERO=zeros is not None, WEIGHTED=importance is not None,
        num_warps=max(4, min(16, wide // 1024)),
    )  # fmt: skip
    return found, zero
