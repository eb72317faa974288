"""e4m3 values with a float32 scale per block of 128 x 128: how DeepSeek-V3 and R1 are published.

The scale is a multiplier although it is stored under the name weight_scale_inv (DeepSeek-V3 README_WEIGHTS.md).
"""

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.quant.weights import FP8_BLOCK, Fp8BlockWeight

E4M3_MAX = 448.0


def quantize_fp8_block(w: Tensor) -> Fp8BlockWeight:
    """Round W float32 [N, K] to the nearest e4m3 values, scale = amax / 448 of each block, 1 for a block of zeros."""
    rows, columns = w.shape
    w = w.float()
    padded = functional.pad(w, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))  # [row block, 128, column block, 128]
    scale = blocks.abs().amax(dim=(1, 3)) / E4M3_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = (blocks / scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Fp8BlockWeight(codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scale)
