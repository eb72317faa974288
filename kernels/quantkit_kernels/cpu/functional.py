"""Operators without packed weights on a CPU: the project's C++ (norm.cpp, silu.cpp, dense.cpp), or
torch, of the activation some rows at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.cpu import dense
from quantkit_kernels.cpu.build import once
from quantkit_kernels.gating import SILU, Gating
from quantkit_kernels.paged import Rotation
from quantkit_kernels.reference import functional as reference
from quantkit_kernels.routing import Routing, route

_ROWS_BYTES = 4 << 20
"""Of a piece's values in float32, gate and up. All of 512 x 9728 at once are 20 MB, which the
allocator gives back to the system each time: new pages cost more than the arithmetic, 20 ms where
pieces take 5 (a prompt of a model of 0.5B, one core)."""


READ = (torch.bfloat16, torch.float32)
"""What norm.cpp reads."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    found = _normed(x, None, weight, eps)
    return reference.rms_norm(x, weight, eps) if found is None else found[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _normed(x, residual, weight, eps) or reference.add_rms_norm(x, residual, weight, eps)


def _normed(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor] | None:
    """The norm of x [.., width], or of x + residual, and that sum; None where norm.cpp is not for
    these."""
    loaded, width = once("norm"), x.shape[-1]
    if (
        loaded is None
        or x.dtype not in READ
        or weight.dtype not in READ
        or (residual is not None and residual.dtype != x.dtype)
    ):
        return None
    rows, gains, added = (
        x.contiguous(),
        weight.contiguous(),
        None if residual is None else residual.contiguous(),
    )
    out, total = torch.empty_like(rows), rows if added is None else torch.empty_like(rows)
    pointers = (None if one is None else one.data_ptr() for one in (rows, added, gains, out, total))
    halves = (x.dtype == torch.bfloat16, weight.dtype == torch.bfloat16)
    loaded.qk_rms_norm(
        *pointers, *halves, rows.numel() // max(1, width), width, torch.get_num_threads(), eps
    )
    return out, total


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """As `plain.rotated`: x [T, heads, D] by the angles of its tokens [T, D/2]."""
    loaded, sides = once("norm"), (rotation.cos, rotation.sin)
    readable = (
        x.dtype in READ
        and x.stride(-1) == 1
        and all(side.dtype == torch.float32 and side.is_contiguous() for side in sides)
    )
    if loaded is None or rotation.interleaved or not readable:
        return reference.rotated(x, rotation)
    out = torch.empty(x.shape, dtype=x.dtype)
    sizes = (x.dtype == torch.bfloat16, *x.shape, *x.stride()[:2], torch.get_num_threads())
    loaded.qk_rotate(x.data_ptr(), *(side.data_ptr() for side in sides), out.data_ptr(), *sizes)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    width = x.shape[-1]
    out = x.new_empty(*x.shape[:-1], width // 2)
    loaded = once("silu")
    if x.dtype in READ and loaded is not None:
        rows = x.contiguous()
        sizes = (
            x.dtype == torch.bfloat16,
            out.numel() // max(1, width // 2),
            width // 2,
            torch.get_num_threads(),
        )
        loaded.qk_silu_and_mul(rows.data_ptr(), out.data_ptr(), *sizes)
        return out
    rows_at_once = max(1, _ROWS_BYTES // (4 * width))
    for piece, found in zip(
        x.reshape(-1, width).split(rows_at_once), out.view(-1, width // 2).split(rows_at_once)
    ):
        gate, up = piece.chunk(2, dim=-1)
        found.copy_(F.silu(gate.float()).mul_(up))
    return out


_ROTATED_BLOCKS = range(16, 1025)
"""Rows of the Hadamard matrices of silu.cpp."""


def gate_and_rotate(x: Tensor, gating: Gating, block: int) -> Tensor:
    loaded, width = once("silu"), x.shape[-1] // 2
    if loaded is None or gating != SILU or x.dtype not in READ or block not in _ROTATED_BLOCKS:
        return reference.gate_and_rotate(x, gating, block)
    rows, out = x.contiguous(), x.new_empty(*x.shape[:-1], width)
    sizes = (x.dtype == torch.bfloat16, out.numel() // width, width, block)
    loaded.qk_silu_and_rotate(rows.data_ptr(), out.data_ptr(), *sizes, torch.get_num_threads())
    return out


def moe_gate(
    x: Tensor, router: Tensor, bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    return route(float32_linear(x, router), bias, routing)


def float32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """By the C++ for any number of rows, so that a token's experts do not depend on the others. It
    takes up to 2.6 times as long as torch's product (256 x 7168, 2,048 rows, one thread, AVX-512:
    150 for 60 ms), where the experts of these rows take more than 100 times as long."""
    return dense.multiply(x.float(), weight.contiguous())
