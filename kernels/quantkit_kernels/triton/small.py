"""One row by a small weight, packed or not, with the norm or activation before it and the sum after
it: a launch of small_kernel.py."""

import torch
from torch import Tensor

from quantkit_kernels.triton.cards import OVERLAPPED, architecture, multiprocessors, overlapped
from quantkit_kernels.triton.launch import COLUMNS, KINDS, Packed, by_assembly
from quantkit_kernels.triton.rows import power_of_two

_TILE = 1 << 14
"""Numbers of a weight that a program holds."""
_MOST, _WIDTHS = 1 << 21, (1024, 2048)
"""Numbers of a packed weight that is small, and widths of its rows as they are held: on an H200
these were run."""
_UNPACKED = 4
PLAIN, GATED, NORMED = range(3)


def fits(n: int, k: int) -> bool:
    """Whether one row times a packed W[n, k] takes no longer than launches do."""
    return n * k <= _MOST and power_of_two(k) in _WIDTHS and k % 16 == 0


def is_small(packed: Packed, device: torch.device) -> bool:
    """Whether `multiply_small` takes a weight: small, and on a card where a weight can be read while
    the kernel before ends."""
    return fits(packed.n, packed.k) and architecture(device) in OVERLAPPED


def multiply_small(
    x: Tensor,
    weight: Tensor | Packed,
    gain: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """As `Linear.fused`: x [1, K], or [1, 2K] of which silu_and_mul is read, without gaps. weight
    [N, K], 16 or 32 bits, or packed. Returns [1, N]."""
    from quantkit_kernels.triton.small_kernel import multiply_small as kernel

    if isinstance(weight, Packed):
        (codes, scales, factors), n, k, dtype = weight.steps, weight.n, weight.k, x.dtype
        kind, group = KINDS[weight.kind], weight.group
        columns = {"int8": 128, "w8a16": group}.get(weight.kind, COLUMNS[weight.kind])
    else:
        codes, scales, factors, (n, k), dtype = weight, weight, weight, weight.shape, weight.dtype
        kind, group, columns = _UNPACKED, 0, 128
    y = torch.empty(1, n, dtype=dtype, device=x.device)
    width = max(128, power_of_two(k))
    rows, warps = programs(n, width, codes.dtype, columns, x.device)
    kernel[(-(-n // rows),)](
        x, x if gain is None else gain.contiguous(), codes, scales, factors,
        x if residual is None else residual.contiguous(), y, n, len(factors), k, eps,
        KIND=kind, GROUP=group, COLUMNS=columns,
        BEFORE=NORMED if gain is not None else GATED if x.shape[1] == 2 * k else PLAIN,
        ADD=residual is not None, BN=rows, BLOCK=width, NVIDIA=by_assembly(x.device),
        num_warps=warps, **overlapped(x.device),
    )  # fmt: skip
    return y


def programs(
    n: int, width: int, dtype: torch.dtype, columns: int, device: torch.device
) -> tuple[int, int]:
    """Rows of W[n, k] and warps of a program. width: of a row as it is held; dtype, columns: of
    codes. Of SmolLM2 eight rows are the fastest on an H200, four where 32 codes of a byte lie side
    by side (docs/lab/linears.md); float32, of gates, is for all multiprocessors to read."""
    if dtype == torch.float32 or width not in _WIDTHS:
        rows = power_of_two(max(1, n // (4 * multiprocessors(device))))
        return min(rows, max(1, _TILE // width)), 4
    return 4 if dtype == torch.int8 and columns == 32 else 8, 8
