# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Triton kernels for the Ascend 910B that save launches where a layer has few tokens, on the vector
cores alone.

  *_gate_up   gate and up of every token's experts, and SwiGLU of them
  *_down      down of every token's experts, and their weighted sum
  router      the router's product, float32, of rows in 16 bits
  join        what gating gives, with the columns of experts that every token goes to
The products are those of kernels.py, layouts too: gate's column tiles lie before up's. Rows of int8
products are quantized where they are read, as npu_dynamic_quant does it: the largest of the row
over 127, halves to even.
"""

import triton
import triton.language as tl

from quantkit_kernels.ascend.kernels import HALF, fp4_row, int4_row, store_row

CHUNK = tl.constexpr(128)
"""Values of x that are looked at together, and int8 input features in a tile."""
PART = tl.constexpr(32)
"""Input features of an int8 tile that are multiplied together: as float32 and int32 they fit the
buffer twice."""
ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to a float32 of at most 2^22 and taken away, it leaves the nearest whole
number, of two the even one."""


@triton.jit
def swiglu(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def row_scale(x_row, k):
    """The scale of a row's int8 codes, 1 for a row of zeros."""
    largest = tl.zeros((CHUNK,), dtype=tl.float32)
    for chunk in range(0, k // CHUNK):
        largest = tl.maximum(
            largest, tl.abs(tl.load(x_row + chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.float32))
        )
    scale = tl.max(largest, axis=0) / 127.0
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def int8_row(x_row, scale_of_row, weight, scale, slot, k, BN: tl.constexpr):
    """A row of x, quantized, times a column tile, float32 [BN]; products of int8 are added in
    int32."""
    inner = tl.arange(0, PART)
    column = tl.arange(0, BN)
    acc = tl.zeros((BN,), dtype=tl.int32)
    for part in range(0, k // PART):
        values = tl.load(x_row + part * PART + inner).to(tl.float32) / scale_of_row
        codes = (values + ROUNDING - ROUNDING).to(tl.int32)
        tile = tl.load(
            weight + slot * k * BN + part * PART * BN + inner[:, None] * BN + column[None, :]
        ).to(tl.int32)
        acc += tl.sum(tile * codes[:, None], axis=0)
    return acc.to(tl.float32) * scale_of_row * tl.load(scale + slot * BN + column)


@triton.jit
def int4_gate_up(
    x, weight, scale, zero_point, experts, out, items, n, k, groups, top_k,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[r] = SwiGLU(x[r // top_k] @ W[experts[r]].T); x [R / top_k, k]; out [R, n / 2]; items = R
    * column tiles of n / 2."""
    tiles = n // 2 // BN
    spans = k // (2 * HALF)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // tiles
        tile = item % tiles
        slot = tl.load(experts + row).to(tl.int64) * tiles * 2 + tile
        x_row = x + (row // top_k) * k
        gate = int4_row(x_row, weight, scale, zero_point, slot, spans, groups, GROUP, HAS_ZERO, BN)
        up = int4_row(
            x_row, weight, scale, zero_point, slot + tiles, spans, groups, GROUP, HAS_ZERO, BN
        )
        store_row(out, swiglu(gate, up), row, tile, n // 2, BN)


@triton.jit
def int4_down(
    x, weight, scale, zero_point, experts, weights, out, items, n, k, groups, top_k,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum over t's rows r of weights[r] * x[r] @ W[experts[r]].T; x [T * top_k, k];
    out [T, n]; items = T * column tiles."""
    tiles = tl.cdiv(n, BN)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token = item // tiles
        tile = item % tiles
        total = tl.zeros((BN,), dtype=tl.float32)
        for row in range(token * top_k, token * top_k + top_k):
            slot = tl.load(experts + row).to(tl.int64) * tiles + tile
            product = int4_row(
                x + row * k,
                weight,
                scale,
                zero_point,
                slot,
                k // (2 * HALF),
                groups,
                GROUP,
                HAS_ZERO,
                BN,
            )
            total += product * tl.load(weights + row)
        store_row(out, total, token, tile, n, BN)


@triton.jit
def fp4_gate_up(x, weight, scale, global_scale, experts, out, items, n, k, top_k, BN: tl.constexpr):
    """As int4_gate_up."""
    tiles = n // 2 // BN
    spans = k // (2 * HALF)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // tiles
        tile = item % tiles
        slot = tl.load(experts + row).to(tl.int64) * tiles * 2 + tile
        x_row = x + (row // top_k) * k
        gate = fp4_row(x_row, weight, scale, global_scale, slot, spans, BN)
        up = fp4_row(x_row, weight, scale, global_scale, slot + tiles, spans, BN)
        store_row(out, swiglu(gate, up), row, tile, n // 2, BN)


@triton.jit
def fp4_down(
    x, weight, scale, global_scale, experts, weights, out, items, n, k, top_k, BN: tl.constexpr
):
    """As int4_down."""
    tiles = tl.cdiv(n, BN)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token = item // tiles
        tile = item % tiles
        total = tl.zeros((BN,), dtype=tl.float32)
        for row in range(token * top_k, token * top_k + top_k):
            slot = tl.load(experts + row).to(tl.int64) * tiles + tile
            total += fp4_row(
                x + row * k, weight, scale, global_scale, slot, k // (2 * HALF), BN
            ) * tl.load(weights + row)
        store_row(out, total, token, tile, n, BN)


@triton.jit
def int8_gate_up(x, weight, scale, experts, out, items, n, k, top_k, BN: tl.constexpr):
    """As int4_gate_up."""
    tiles = n // 2 // BN
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // tiles
        tile = item % tiles
        slot = tl.load(experts + row).to(tl.int64) * tiles * 2 + tile
        x_row = x + (row // top_k) * k
        scale_of_row = row_scale(x_row, k)
        gate = int8_row(x_row, scale_of_row, weight, scale, slot, k, BN)
        up = int8_row(x_row, scale_of_row, weight, scale, slot + tiles, k, BN)
        store_row(out, swiglu(gate, up), row, tile, n // 2, BN)


@triton.jit
def int8_down(x, weight, scale, experts, weights, out, items, n, k, top_k, BN: tl.constexpr):
    """As int4_down."""
    tiles = tl.cdiv(n, BN)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token = item // tiles
        tile = item % tiles
        total = tl.zeros((BN,), dtype=tl.float32)
        for row in range(token * top_k, token * top_k + top_k):
            slot = tl.load(experts + row).to(tl.int64) * tiles + tile
            x_row = x + row * k
            total += int8_row(x_row, row_scale(x_row, k), weight, scale, slot, k, BN) * tl.load(
                weights + row
            )
        store_row(out, total, token, tile, n, BN)


@triton.jit
def router(x, weight, out, items, n, k, BN: tl.constexpr, BK: tl.constexpr):
    """out[t] = x[t] @ weight.T, float32; x [T, k]; weight [n, k]; out [T, n]; items = T * row tiles
    of the weight."""
    tiles = tl.cdiv(n, BN)
    inner = tl.arange(0, BK)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token = item // tiles
        tile = item % tiles
        expert = tile * BN + tl.arange(0, BN)
        acc = tl.zeros((BN,), dtype=tl.float32)
        for step in range(0, k // BK):
            rows = tl.load(
                weight + expert[:, None] * k + (step * BK + inner)[None, :],
                mask=(expert < n)[:, None],
                other=0.0,
            )
            acc += tl.sum(
                rows * tl.load(x + token * k + step * BK + inner).to(tl.float32)[None, :], axis=1
            )
        tl.store(out + token * n + expert, acc, mask=expert < n)


@triton.jit
def join(ids, weights, joined_ids, joined_weights, tokens, top_k, columns, first, BK: tl.constexpr):
    """Rows of ids [tokens, top_k] and weights, with `columns` - `top_k` experts after them: numbers
    from `first` on, weight 1."""
    column = tl.arange(0, BK)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        chosen = column < top_k
        number = tl.load(ids + token * top_k + column, mask=chosen, other=0)
        weight = tl.load(weights + token * top_k + column, mask=chosen, other=0.0)
        kept = column < columns
        tl.store(
            joined_ids + token * columns + column,
            tl.where(chosen, number, first + column - top_k),
            mask=kept,
        )
        tl.store(
            joined_weights + token * columns + column, tl.where(chosen, weight, 1.0), mask=kept
        )
