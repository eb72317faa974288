"""NVFP4 operands as cuBLAS reads them: codes two to a byte, and a scale for each 16 of them in
blocks of 128 rows and 4 scales.

cuBLAS documentation, "1D Block Scaling Factors Layout": in a block, which is 512 bytes, the scale
of row r and group g lies at (r % 32) * 16 + (r // 32) * 4 + g; blocks of the same rows follow one
another. PyTorch calls this SWIZZLE_32_4_4.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, GROUPS = 128, 4
E2M1_MOST, E4M3_MOST = 6.0, 448.0
_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between neighbouring magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6."""


def swizzled(scales: Tensor) -> Tensor:
    """float8_e4m3fn [N, K/16] -> the same bytes in blocks, one after the other; what fills the last
    blocks is zero."""
    n, groups = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -groups % GROUPS, 0, -n % ROWS))
    blocks = padded.view(-1, ROWS // 32, 32, padded.shape[1] // GROUPS, GROUPS).permute(
        0, 3, 2, 1, 4
    )
    return blocks.reshape(-1).view(torch.float8_e4m3fn)


def packed(codes: Tensor) -> Tensor:
    """uint8 [N, K] of codes 0..15 -> float4_e2m1fn_x2 [N, K/2], the even feature in the low half of
    a byte."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).view(torch.float4_e2m1fn_x2)


def rounded_to_nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] -> codes uint8 [M, K], scales float8_e4m3fn [M, K/16], and what all are multiplied
    with, float32 [].

    The largest number of x gets the largest code and scale. Codes are rounded to nearest, halves to
    the even code.
    """
    groups = x.float().unflatten(1, (-1, 16))
    largest = groups.abs().amax(dim=-1)
    whole = largest.amax().clamp_min(1e-30) / (E2M1_MOST * E4M3_MOST)
    scales = (largest / (E2M1_MOST * whole)).to(torch.float8_e4m3fn)
    step = scales.float() * whole
    values = torch.where(step > 0, 1 / step, torch.zeros_like(step)).unsqueeze(-1) * groups
    bounds = torch.tensor(_HALFWAY, device=x.device)
    magnitudes = values.abs()
    # Of a number halfway between two codes, the even one: the lower for bounds between an even code
    # and the odd one after it.
    codes = (
        torch.bucketize(magnitudes, bounds)
        + ((magnitudes.unsqueeze(-1) == bounds[1::2]).any(-1)).long()
    )
    return (codes.to(torch.uint8) | ((groups < 0).to(torch.uint8) << 3)).flatten(1), scales, whole
