"""Integer grids: scale and zero point of a group, and rounding to nearest.

Scales are rounded to the dtype the format stores BEFORE codes are computed, so that packing loses
nothing and every code is the nearest one under the scale that the engine will really use.
"""

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.grids.schemes import IntGrid


def int_range(bits: int) -> tuple[int, int]:
    """Smallest and largest code. Eight bits never use -128: omni-infer's kernels and the symmetric
    grid do not have it."""
    assert bits in (4, 8), f"{bits} bits"
    return (-8, 7) if bits == 4 else (-127, 127)


def int_params(
    groups: Tensor, grid: IntGrid, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of every group, from its extremes.

    groups float32 [..., g] -> scale float32 [...] exactly representable in `scale_dtype`,
    zero_point int8 [...] or None.

    Asymmetric: scale = (max - min) / 15 with min <= 0 <= max forced, so that zero stays exact.
    Symmetric: half the range of the grid, amax / 7.5 or amax / 127 (compressed-tensors' rule for
    int4; it clips +amax by half a step and spends all 16 codes). A scale that rounds to zero
    becomes 1: its codes are all zero.
    """
    low, high = int_range(grid.bits)
    if grid.symmetric:
        scale = groups.abs().amax(dim=-1) / ((high - low) / 2)
        return _stored_scale(scale, scale_dtype), None
    minimum = groups.amin(dim=-1).clamp(max=0.0)
    maximum = groups.amax(dim=-1).clamp(min=0.0)
    scale = _stored_scale((maximum - minimum) / (high - low), scale_dtype)
    zero_point = (low - minimum / scale).round().clamp(low, high).to(torch.int8)
    return scale, zero_point


def _stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    stored = scale.to(dtype).float()
    if not bool(torch.isfinite(stored).all()):
        raise QuantkitError(
            f"a weight is not finite or too large for scales in {str(dtype).removeprefix('torch.')}",
            "check the source weights",
        )
    return torch.where(stored > 0, stored, torch.ones_like(stored))


def round_int(w: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int) -> Tensor:
    """Nearest codes (ties to even): w float32 [N, K], scale and zero_point [N, G] -> int8 [N,
    K]."""
    low, high = int_range(bits)
    codes = _grouped(w, scale).div(scale.unsqueeze(-1)).round_()
    if zero_point is not None:
        codes += zero_point.unsqueeze(-1)
    return codes.clamp_(low, high).to(torch.int8).flatten(-2)


def _grouped(w: Tensor, scale: Tensor) -> Tensor:
    """[N, K] -> [N, G, K / G]"""
    return w.unflatten(1, (scale.shape[1], -1))
