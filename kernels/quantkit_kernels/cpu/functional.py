"""Operators without packed weights on a CPU: the project's C++ (silu.cpp), or torch, some rows at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.cpu.build import library, why_no_library

_ROWS_BYTES = 4 << 20
"""Of a piece's values in float32, gate and up. All of 512 x 9728 at once are 20 MB, which the allocator gives back to the system each time:
new pages cost more than the arithmetic, 20 ms where pieces take 5 (a prompt of a model of 0.5B, one core)."""


def silu_and_mul(x: Tensor) -> Tensor:
    width = x.shape[-1]
    out = x.new_empty(*x.shape[:-1], width // 2)
    if x.dtype in (torch.bfloat16, torch.float32) and why_no_library("silu") is None:
        rows = x.contiguous()
        sizes = (x.dtype == torch.bfloat16, out.numel() // max(1, width // 2), width // 2, torch.get_num_threads())
        library("silu").qk_silu_and_mul(rows.data_ptr(), out.data_ptr(), *sizes)
        return out
    rows_at_once = max(1, _ROWS_BYTES // (4 * width))
    for piece, found in zip(x.reshape(-1, width).split(rows_at_once), out.view(-1, width // 2).split(rows_at_once)):
        gate, up = piece.chunk(2, dim=-1)
        found.copy_(F.silu(gate.float()).mul_(up))
    return out
