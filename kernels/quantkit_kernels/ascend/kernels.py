# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Triton kernels for the Ascend 910B: W4A16 int4 and FP4, and INT8 A8W8, dense or over the experts of a layer.

Two families, for the chip has two kinds of core:
  *_rows     on the vector cores alone, one row of x at a time: for batches so small that the cube's 16 rows would be empty.
  *_blocks   vector cores decode a tile, cube cores multiply BM rows with it: for everything else.
A program takes the items pid, pid + programs, ...: launch one program per core. An item is one row (or block of rows) times one column
tile; its expert is read from `experts`, and weights are offset by whole experts. layout.py holds the layouts: every load of a weight or
scale is one dense run. Weights come in int8 containers, for the chip's compiler has no unsigned loads and no uint8 product.

Decoding is integer arithmetic, never a look-up (a gather becomes a scalar loop here). A container c of two nibbles, widened to int16:
  int4   low (c << 12) >> 12, high c >> 4
  E2M1   low ((c << 12) >> 3) & 0x8E00, high (c << 5) & 0x8E00, read as fp16: sign, two exponent and one mantissa bit are where fp16 has
         them, and the value is 2^-14 of the code's (the code for 0.5 becomes a subnormal fp16; published kernels rely on the chip
         keeping those, `quantkit kernels --check` would show it if not)
  e4m3   scale << 7 read as fp16: 2^-8 of the scale's value
The powers of two are in `global_scale` already (`layout.FP4_RESCALE`), so decoding an FP4 weight costs one multiply, by its scale.
"""

import triton
import triton.language as tl


@triton.jit
def int4_rows(
    x, weight, scale, zero_point, experts, out, items, n, k, groups, rows_per_x,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[r] = x[r // rows_per_x] @ W[experts[r]].T; x [R, k]; out [R, n]; items = R * column tiles."""
    HALF: tl.constexpr = 64
    PER_HALF: tl.constexpr = HALF // GROUP if GROUP < HALF else 1
    RUN: tl.constexpr = HALF // PER_HALF
    tiles = tl.cdiv(n, BN)
    spans = k // (2 * HALF)
    half = tl.arange(0, HALF)
    column = tl.arange(0, BN)
    part = tl.arange(0, PER_HALF)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // tiles
        tile = item % tiles
        slot = tl.load(experts + row).to(tl.int64) * tiles + tile
        tile_weight = weight + slot * spans * HALF * BN
        tile_scale = scale + slot * groups * BN
        tile_zero = zero_point + slot * groups * BN
        x_row = x + (row // rows_per_x) * k
        acc = tl.zeros((BN,), dtype=tl.float32)
        for span in range(0, spans):
            container = tl.load(tile_weight + span * HALF * BN + half[:, None] * BN + column[None, :]).to(tl.int16)
            x_low = tl.load(x_row + span * 2 * HALF + half).to(tl.float32)
            x_high = tl.load(x_row + span * 2 * HALF + HALF + half).to(tl.float32)
            low = ((container << 12) >> 12).to(tl.float32) * x_low[:, None]
            high = (container >> 4).to(tl.float32) * x_high[:, None]
            first = span * (2 * HALF // GROUP) * BN + part[:, None] * BN + column[None, :]
            second = first if GROUP == 2 * HALF else first + PER_HALF * BN
            low_sum = tl.sum(tl.reshape(low, (PER_HALF, RUN, BN)), axis=1)
            high_sum = tl.sum(tl.reshape(high, (PER_HALF, RUN, BN)), axis=1)
            if HAS_ZERO:
                # sum of x * (code - zero) = sum of x * code - zero * sum of x: once per group, not per weight.
                x_low_sum = tl.sum(tl.reshape(x_low, (PER_HALF, RUN)), axis=1)
                x_high_sum = tl.sum(tl.reshape(x_high, (PER_HALF, RUN)), axis=1)
                low_sum -= tl.load(tile_zero + first).to(tl.float32) * x_low_sum[:, None]
                high_sum -= tl.load(tile_zero + second).to(tl.float32) * x_high_sum[:, None]
            low_sum *= tl.load(tile_scale + first)
            high_sum *= tl.load(tile_scale + second)
            acc += tl.sum(low_sum + high_sum, axis=0)
        target = tile * BN + column
        tl.store(out + row * n + target, acc.to(out.dtype.element_ty), mask=target < n)


@triton.jit
def fp4_rows(
    x, weight, scale, global_scale, experts, out, items, n, k, rows_per_x,
    BN: tl.constexpr,
):  # fmt: skip
    """out[r] = x[r // rows_per_x] @ W[experts[r]].T; x [R, k]; out [R, n]; items = R * column tiles."""
    HALF: tl.constexpr = 64
    PER_HALF: tl.constexpr = 4
    RUN: tl.constexpr = 16
    tiles = tl.cdiv(n, BN)
    spans = k // (2 * HALF)
    half = tl.arange(0, HALF)
    column = tl.arange(0, BN)
    part = tl.arange(0, PER_HALF)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // tiles
        tile = item % tiles
        slot = tl.load(experts + row).to(tl.int64) * tiles + tile
        tile_weight = weight + slot * spans * HALF * BN
        tile_scale = scale + slot * spans * 2 * PER_HALF * BN
        x_row = x + (row // rows_per_x) * k
        acc = tl.zeros((BN,), dtype=tl.float32)
        for span in range(0, spans):
            container = tl.load(tile_weight + span * HALF * BN + half[:, None] * BN + column[None, :]).to(tl.int16)
            x_low = tl.load(x_row + span * 2 * HALF + half).to(tl.float32)
            x_high = tl.load(x_row + span * 2 * HALF + HALF + half).to(tl.float32)
            low = (((container << 12) >> 3) & -29184).to(tl.float16, bitcast=True).to(tl.float32) * x_low[:, None]
            high = ((container << 5) & -29184).to(tl.float16, bitcast=True).to(tl.float32) * x_high[:, None]
            offset = span * 2 * PER_HALF * BN + part[:, None] * BN + column[None, :]
            low_scale = (tl.load(tile_scale + offset).to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)
            high_scale = (tl.load(tile_scale + offset + PER_HALF * BN).to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)
            low_sum = tl.sum(tl.reshape(low, (PER_HALF, RUN, BN)), axis=1) * low_scale
            high_sum = tl.sum(tl.reshape(high, (PER_HALF, RUN, BN)), axis=1) * high_scale
            acc += tl.sum(low_sum + high_sum, axis=0)
        acc *= tl.load(global_scale + slot * BN + column)
        target = tile * BN + column
        tl.store(out + row * n + target, acc.to(out.dtype.element_ty), mask=target < n)


@triton.jit
def int4_blocks(
    x, weight, scale, zero_point, experts, out, items, m, n, k, groups,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[b] = x[b] @ W[experts[b]].T for blocks b of BM rows; x [m, k]; out [m, n]; a block with expert -1 is left alone."""
    HALF: tl.constexpr = 64
    PER_HALF: tl.constexpr = HALF // GROUP if GROUP < HALF else 1
    RUN: tl.constexpr = HALF // PER_HALF
    tiles = tl.cdiv(n, BN)
    spans = k // (2 * HALF)
    half = tl.arange(0, HALF)
    column = tl.arange(0, BN)
    part = tl.arange(0, PER_HALF)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        block = item // tiles
        tile = item % tiles
        expert = tl.load(experts + block)
        if expert >= 0:
            slot = expert.to(tl.int64) * tiles + tile
            tile_weight = weight + slot * spans * HALF * BN
            tile_scale = scale + slot * groups * BN
            tile_zero = zero_point + slot * groups * BN
            row = block * BM + tl.arange(0, BM)
            x_low = x + row[:, None] * k + half[None, :]
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            for span in range(0, spans):
                container = tl.load(tile_weight + span * HALF * BN + half[:, None] * BN + column[None, :]).to(tl.int16)
                low = tl.reshape(((container << 12) >> 12).to(tl.float32), (PER_HALF, RUN, BN))
                high = tl.reshape((container >> 4).to(tl.float32), (PER_HALF, RUN, BN))
                first = span * (2 * HALF // GROUP) * BN + part[:, None] * BN + column[None, :]
                second = first if GROUP == 2 * HALF else first + PER_HALF * BN
                if HAS_ZERO:
                    low -= tl.load(tile_zero + first).to(tl.float32)[:, None, :]
                    high -= tl.load(tile_zero + second).to(tl.float32)[:, None, :]
                low *= tl.load(tile_scale + first)[:, None, :]
                high *= tl.load(tile_scale + second)[:, None, :]
                a_low = tl.load(x_low + span * 2 * HALF, mask=row[:, None] < m, other=0.0)
                a_high = tl.load(x_low + span * 2 * HALF + HALF, mask=row[:, None] < m, other=0.0)
                acc = tl.dot(a_low, tl.reshape(low, (HALF, BN)).to(x.dtype.element_ty), acc)
                acc = tl.dot(a_high, tl.reshape(high, (HALF, BN)).to(x.dtype.element_ty), acc)
            target = tile * BN + column
            mask = (row[:, None] < m) & (target[None, :] < n)
            tl.store(out + row[:, None] * n + target[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def fp4_blocks(
    x, weight, scale, global_scale, experts, out, items, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[b] = x[b] @ W[experts[b]].T for blocks b of BM rows; x [m, k]; out [m, n]; a block with expert -1 is left alone.

    The product of a code and its e4m3 scale has six significant bits: the bf16 tile that the cube reads is exact.
    """
    HALF: tl.constexpr = 64
    PER_HALF: tl.constexpr = 4
    RUN: tl.constexpr = 16
    tiles = tl.cdiv(n, BN)
    spans = k // (2 * HALF)
    half = tl.arange(0, HALF)
    column = tl.arange(0, BN)
    part = tl.arange(0, PER_HALF)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        block = item // tiles
        tile = item % tiles
        expert = tl.load(experts + block)
        if expert >= 0:
            slot = expert.to(tl.int64) * tiles + tile
            tile_weight = weight + slot * spans * HALF * BN
            tile_scale = scale + slot * spans * 2 * PER_HALF * BN
            row = block * BM + tl.arange(0, BM)
            x_low = x + row[:, None] * k + half[None, :]
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            for span in range(0, spans):
                container = tl.load(tile_weight + span * HALF * BN + half[:, None] * BN + column[None, :]).to(tl.int16)
                low = (((container << 12) >> 3) & -29184).to(tl.float16, bitcast=True).to(tl.float32)
                high = ((container << 5) & -29184).to(tl.float16, bitcast=True).to(tl.float32)
                offset = span * 2 * PER_HALF * BN + part[:, None] * BN + column[None, :]
                low_scale = (tl.load(tile_scale + offset).to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)
                high_scale = (tl.load(tile_scale + offset + PER_HALF * BN).to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)
                low = tl.reshape(low, (PER_HALF, RUN, BN)) * low_scale[:, None, :]
                high = tl.reshape(high, (PER_HALF, RUN, BN)) * high_scale[:, None, :]
                a_low = tl.load(x_low + span * 2 * HALF, mask=row[:, None] < m, other=0.0)
                a_high = tl.load(x_low + span * 2 * HALF + HALF, mask=row[:, None] < m, other=0.0)
                acc = tl.dot(a_low, tl.reshape(low, (HALF, BN)).to(x.dtype.element_ty), acc)
                acc = tl.dot(a_high, tl.reshape(high, (HALF, BN)).to(x.dtype.element_ty), acc)
            acc *= tl.load(global_scale + slot * BN + column)[None, :]
            target = tile * BN + column
            mask = (row[:, None] < m) & (target[None, :] < n)
            tl.store(out + row[:, None] * n + target[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def int8_blocks(
    x, row_scale, weight, scale, experts, out, items, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[b] = (x[b] @ W[experts[b]].T) * row_scale[b] * scale, x int8 [m, k]; the cube adds int8 products in int32, exactly."""
    tiles = tl.cdiv(n, BN)
    steps = k // BK
    inner = tl.arange(0, BK)
    column = tl.arange(0, BN)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        block = item // tiles
        tile = item % tiles
        expert = tl.load(experts + block)
        if expert >= 0:
            slot = expert.to(tl.int64) * tiles + tile
            tile_weight = weight + slot * steps * BK * BN
            row = block * BM + tl.arange(0, BM)
            x_block = x + row[:, None] * k + inner[None, :]
            acc = tl.zeros((BM, BN), dtype=tl.int32)
            for step in range(0, steps):
                a = tl.load(x_block + step * BK, mask=row[:, None] < m, other=0)
                b = tl.load(tile_weight + step * BK * BN + inner[:, None] * BN + column[None, :])
                acc = tl.dot(a, b, acc, out_dtype=tl.int32)
            rows = tl.load(row_scale + row, mask=row < m, other=0.0)
            columns = tl.load(scale + slot * BN + column)
            target = tile * BN + column
            mask = (row[:, None] < m) & (target[None, :] < n)
            result = acc.to(tl.float32) * rows[:, None] * columns[None, :]
            tl.store(out + row[:, None] * n + target[None, :], result.to(out.dtype.element_ty), mask=mask)
