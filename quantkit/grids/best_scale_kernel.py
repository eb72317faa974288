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

from quantkit.grids.base import Quantizer, Scales
from quantkit.grids.e2m1 import E2M1_MAX
from quantkit.grids.nvfp4 import E4M3_MAX

HALF_EVEN = tl.constexpr(12582912.0)
FP4_END = tl.constexpr(E2M1_MAX)
FP8_END = tl.constexpr(E4M3_MAX)
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
    candidates, rows_all, width, low, high,
    batch_stride, group_stride, row_stride, importance_batch, importance_group,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FP4: tl.constexpr, FP8: tl.constexpr,
    ZERO: tl.constexpr, WEIGHTED: tl.constexpr,
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
    for number in range(candidates):
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
    quantizer: Quantizer, candidates: list[Scales], groups: Tensor, importance: Tensor | None
) -> Scales:
    """As `Quantizer.best`: candidates [G, N] of groups [G, N, g], or with one leading dimension;
    channels are contiguous in memory."""
    count, rows, width = groups.shape[-3:]
    groups = groups.view(-1, *groups.shape[-3:]) if groups.dim() == 3 else groups
    shape = candidates[0].scale.shape
    scales = torch.stack([one.scale for one in candidates])
    points = [one.zero_point for one in candidates if one.zero_point is not None]
    zeros = torch.stack(points) if points else scales
    found = torch.empty(shape, device=groups.device)
    zero = torch.empty_like(found) if points else None
    weighted = scales
    if importance is not None:
        weighted = importance.expand(*groups.shape[:-2], 1, width).contiguous()
    low, high = quantizer.code_range or (0, 0)
    wide = triton.next_power_of_2(width)
    own = max(1, TILE // wide)
    _best_scale[(triton.cdiv(rows, own), count, len(groups))](
        groups, scales, zeros, weighted, found, found if zero is None else zero,
        len(candidates), rows, width, float(low), float(high),
        groups.stride(0), groups.stride(1), groups.stride(2), count * width, width,
        ROWS=own, WIDTH=wide, FP4=quantizer.kind == "fp4", FP8=quantizer.kind == "fp8",
        ZERO=zero is not None, WEIGHTED=importance is not None,
        num_warps=max(4, min(16, wide // 1024)),
    )  # fmt: skip
    return Scales(found, zero)
