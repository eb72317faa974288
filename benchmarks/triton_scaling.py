# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Scaling of int32 sums, which torch's product of int8 leaves to a kernel of its own
(triton_products.py)."""

import triton
import triton.language as tl


@triton.jit
def scale_sums(sums, x_scale, scale, y, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    value = tl.load(sums + row * n + column, mask=inside).to(tl.float32)
    value = value * tl.load(x_scale + row) * tl.load(scale + column, mask=inside)
    tl.store(y + row * n + column, value.to(y.dtype.element_ty), mask=inside)
