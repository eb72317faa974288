"""Launches of the kernels with a program per row, and the expansion of weights."""

import torch
from torch import Tensor

from quantkit_kernels.triton.cards import overlapped
from quantkit_kernels.triton.launch import COLUMNS, KINDS, Packed, by_assembly, decoded_type
from quantkit_kernels.triton.layout import SPAN, STRIP

_WIDEST, _PART = 1 << 15, 1 << 12
"""Activations of a token that a program holds while they are quantized, 64 a thread; of more it
takes so many at a time, twice."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantkit_kernels.quantize_rows` in one launch; the scale comes as [M]."""
    from quantkit_kernels.triton.rows_kernel import quantize_rows as kernel

    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    width = x.shape[1]
    whole = width <= _WIDEST
    block = 1 << (width.bit_length() - 1) if whole else _PART
    rest = power_of_two(width - block) if whole and width > block else 0
    how = {
        "num_warps": warps_for(power_of_two(min(width, block + rest)) // 2),
        **overlapped(x.device),
    }
    kernel[(x.shape[0],)](x, codes, scale, width, BLOCK=block, REST=rest, WHOLE=whole, **how)
    return codes, scale


def sum_pairs(weighed: Tensor, y: Tensor) -> None:
    """y[T, H] = the sum in float32 over each token's k rows of weighed [T * k, H], float32 or of
    y's type."""
    from quantkit_kernels.triton.rows_kernel import sum_pairs as kernel

    width = y.shape[1]
    block = min(power_of_two(width), 1024)
    kernel[(y.shape[0], -(-width // block))](
        weighed, y, width, TOP_K=weighed.shape[0] // y.shape[0], BLOCK=block, **overlapped(y.device)
    )


def expanded(packed: Packed, dtype: torch.dtype) -> Tensor:
    """A 4-bit or weight-only int8 weight [N, K] in `dtype`."""
    full = torch.empty(packed.n, packed.k, dtype=dtype, device=packed.steps.codes.device)
    expand_rows(packed, 0, full[None])
    return full


def expand_rows(packed: Packed, first: int, out: Tensor) -> None:
    """Write rows `first`, a multiple of STRIP, and on of each expert into out [E, rows, K], whose
    last two dimensions are contiguous; E is 1 for a linear. 4 bits or weight-only int8."""
    from quantkit_kernels.triton.expand_kernel import expand, expand_w8a16

    codes, scales, row_scale = packed.steps
    experts, count, k = out.shape
    rows = row_scale.shape[-1]
    assert first % STRIP == 0, first
    assert first + count <= rows, (first, count, rows)
    grid = (-(-k // SPAN), -(-count // STRIP), experts)
    where = (rows, k, first, count, out.stride(0))
    if packed.kind == "w8a16":
        expand_w8a16[grid](
            codes, scales, out, *where,
            GROUP=packed.group, BN=STRIP, DTYPE=decoded_type(out.dtype),
        )  # fmt: skip
        return
    expand[grid](
        codes, scales, row_scale, out, *where,
        KIND=KINDS[packed.kind], GROUP=packed.group, COLUMNS=COLUMNS[packed.kind], BN=STRIP,
        NVIDIA=by_assembly(out.device), DTYPE=decoded_type(out.dtype),
    )  # fmt: skip


def power_of_two(count: int) -> int:
    """The smallest power of two that is no less than count."""
    return 1 << (count - 1).bit_length()


def warps_for(block: int) -> int:
    """Of a program that reads `block` numbers of a row at once."""
    return min(16, max(1, block // 512))
