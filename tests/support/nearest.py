"""Weights rounded to the nearest value of a grid, one linear at a time, plainly: what rounders,
formats and kernels are held against."""

import torch
from torch.nn import functional

from quantkit import QuantkitError
from quantkit.grids.base import round_to_nearest
from quantkit.grids.e2m1 import E2M1_MAX, encode_e2m1
from quantkit.grids.fp8_block import Fp8BlockGrid, Fp8BlockWeight
from quantkit.grids.int_groups import IntWeight, int_params, round_int
from quantkit.grids.nvfp4 import E4M3_MAX, E4M3_MIN, FP4_GROUP, Nvfp4Weight
from quantkit.grids.nvfp4 import global_scale as fused_scale


def quantize_int(w, grid, *, scale_dtype):
    """Round W float32 [N, K] to the nearest codes of `grid`, no calibration."""
    columns = w.shape[1]
    group_size = grid.group_size or columns
    if columns % group_size:
        raise QuantkitError(
            f"group size {group_size} does not divide {columns} input channels",
            "choose a group size that does",
        )
    w = w.float()
    scale, zero_point = int_params(w.unflatten(1, (-1, group_size)), grid, scale_dtype)
    return IntWeight(round_int(w, scale, zero_point, grid.bits), scale, zero_point, grid.bits)


def fp4_scale(groups, global_scale):
    """e4m3 scales of groups float32 [..., 16] -> float8_e4m3fn [...]; a group of zeros gets 1
    (ModelOpt's rule)."""
    amax = groups.abs().amax(dim=-1)
    scale = (amax / E2M1_MAX / global_scale).clamp(E4M3_MIN, E4M3_MAX)
    return torch.where(amax > 0, scale, torch.ones_like(scale)).to(torch.float8_e4m3fn)


def round_fp4(w, scale, global_scale):
    """Nearest codes: w float32 [N, K], scale float8_e4m3fn [N, G] -> uint8 [N, K]."""
    step = scale.float() * global_scale
    return encode_e2m1(w.unflatten(1, (scale.shape[1], -1)) / step.unsqueeze(-1)).flatten(-2)


def quantize_fp4(w, *, global_scale=None):
    """Round W float32 [N, K] to the nearest NVFP4 values. `global_scale` is the one shared with
    fused siblings, if any."""
    columns = w.shape[1]
    if columns % FP4_GROUP:
        raise QuantkitError(
            f"FP4 groups of {FP4_GROUP} do not divide {columns} input channels",
            "leave this weight unquantized",
        )
    w = w.float()
    multiplier = fused_scale(w.abs().amax()) if global_scale is None else global_scale
    scale = fp4_scale(w.unflatten(1, (-1, FP4_GROUP)), multiplier)
    return Nvfp4Weight(round_fp4(w, scale, multiplier), scale, multiplier)


def quantize_mx(w, grid):
    """Round W float32 [N, K] to the nearest values of MXFP4 or MXFP8."""
    quantizer = grid.quantizer(w.abs().amax(), torch.float32, 0)
    return quantizer.encode(*round_to_nearest(w.float(), quantizer))


def quantize_fp8_block(w):
    return quantize_fp8(w, Fp8BlockGrid())


def quantize_fp8(w, grid):
    """Round W float32 [N, K] to the nearest e4m3 values, scale = amax / 448 of each block of the
    grid, 1 for a block of zeros."""
    rows, columns = w.shape
    tall, wide = grid.scale_rows, grid.group_size or columns
    padded = functional.pad(w.float(), (0, -columns % wide, 0, -rows % tall))
    # [row block, rows, column block, columns]
    blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, tall))
    scale = blocks.abs().amax(dim=(1, 3)) / E4M3_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = (blocks / scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
    return Fp8BlockWeight(codes, scale, (tall, wide))
