# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Triton kernels for the Ascend 910B: W4A16 int4 and FP4, and INT8 A8W8, of one linear or over the
experts of a layer. What computes the experts of few tokens in two launches is in few_tokens.py.

Two families, for the chip has two kinds of core:
  *_rows     on the vector cores alone, one row of x at a time: for batches so small that the cube's 16 rows would be empty.
  *_blocks   vector cores decode a tile, cube cores multiply up to BM rows with it: for everything else. `assign` says which rows.
A program takes the items pid, pid + programs, ...: launch one program per core. An item is one row
(or block of rows) times one column tile; its expert is read from `experts`, and weights are offset
by whole experts. layout.py holds the layouts: every load of a weight or scale is one run without
gaps. Weights come in int8 containers, for the chip's compiler has no unsigned loads and no uint8
product.

Decoding is integer arithmetic, never a look-up (a gather becomes a scalar loop here). A container c
of two nibbles, widened to int16:
  int4   low (c << 12) >> 12, high c >> 4
  E2M1   low ((c << 12) >> 3) & 0x8E00, high (c << 5) & 0x8E00, read as fp16: sign, two exponent and one mantissa bit are where fp16 has
         them, and the value is 2^-14 of the code's (the code for 0.5 becomes a subnormal fp16;
         published kernels rely on the chip keeping those, `quantkit kernels --check` would show it
         if not)
  e4m3   scale << 7 read as fp16: 2^-8 of the scale's value
The powers of two are in `global_scale` already (`layout.FP4_RESCALE`), so decoding an FP4 weight
costs one multiply, by its scale. What the kernels share is functions that the front end inlines:
the lowered code is the kernel's own.
"""

import triton
import triton.language as tl

HALF = tl.constexpr(64)
"""Input features in each half of a span: the low nibbles of a container tile, and the high ones."""
FP4_GROUP = tl.constexpr(16)


@triton.jit
def nibbles(tile_weight, span, BN: tl.constexpr):
    """The containers of a span, int16 [HALF, BN]."""
    half = tl.arange(0, HALF)
    column = tl.arange(0, BN)
    return tl.load(tile_weight + span * HALF * BN + half[:, None] * BN + column[None, :]).to(
        tl.int16
    )


@triton.jit
def int4_values(container):
    """Both halves of a span, float32 [HALF, BN] each."""
    return ((container << 12) >> 12).to(tl.float32), (container >> 4).to(tl.float32)


@triton.jit
def e2m1_values(container):
    """Both halves of a span times 2^-14, float32 [HALF, BN] each."""
    low = (((container << 12) >> 3) & -29184).to(tl.float16, bitcast=True).to(tl.float32)
    high = ((container << 5) & -29184).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def e4m3_values(address):
    """Scales times 2^-8, float32."""
    return (tl.load(address).to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def group_offsets(span, GROUP: tl.constexpr, BN: tl.constexpr):
    """Where the scales of a span's two halves lie within those of a tile, [groups in a half, BN]
    each; a group of 128 serves both."""
    PER_HALF: tl.constexpr = HALF // GROUP if GROUP < HALF else 1
    part = tl.arange(0, PER_HALF)
    column = tl.arange(0, BN)
    first = span * (2 * HALF // GROUP) * BN + part[:, None] * BN + column[None, :]
    second = first if GROUP == 2 * HALF else first + PER_HALF * BN
    return first, second


@triton.jit
def by_group(values, GROUP: tl.constexpr, BN: tl.constexpr):
    """[HALF, BN] -> [groups in a half, features in a group, BN]."""
    RUN: tl.constexpr = GROUP if GROUP < HALF else HALF
    return tl.reshape(values, (HALF // RUN, RUN, BN))


@triton.jit
def group_sums(x_half, GROUP: tl.constexpr):
    """The sum of x over each group of half a span: [groups in a half]."""
    RUN: tl.constexpr = GROUP if GROUP < HALF else HALF
    return tl.sum(tl.reshape(x_half, (HALF // RUN, RUN)), axis=1)


@triton.jit
def row_halves(x_row, span):
    """What one row of x has for the halves of a span, float32 [HALF] each."""
    half = tl.arange(0, HALF)
    return tl.load(x_row + span * 2 * HALF + half).to(tl.float32), tl.load(
        x_row + span * 2 * HALF + HALF + half
    ).to(tl.float32)


@triton.jit
def multiplied(acc, x_block, span, row, m, low, high, BN: tl.constexpr):
    """acc [BM, BN] plus a block of rows of x times the decoded halves of a span, which the cube
    takes in x's dtype."""
    x_low = tl.load(x_block + span * 2 * HALF, mask=row[:, None] < m, other=0.0)
    x_high = tl.load(x_block + span * 2 * HALF + HALF, mask=row[:, None] < m, other=0.0)
    acc = tl.dot(x_low, tl.reshape(low, (HALF, BN)).to(x_low.dtype), acc)
    return tl.dot(x_high, tl.reshape(high, (HALF, BN)).to(x_low.dtype), acc)


@triton.jit
def store_row(out, acc, row, tile, n, BN: tl.constexpr):
    target = tile * BN + tl.arange(0, BN)
    tl.store(out + row * n + target, acc.to(out.dtype.element_ty), mask=target < n)


@triton.jit
def store_block(out, acc, row, tile, m, n, BN: tl.constexpr):
    target = tile * BN + tl.arange(0, BN)
    mask = (row[:, None] < m) & (target[None, :] < n)
    tl.store(out + row[:, None] * n + target[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def int4_row(
    x_row, weight, scale, zero_point, slot, spans, groups,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A row of x times a column tile, float32 [BN]; slot: which tile of all experts'."""
    tile_scale = scale + slot * groups * BN
    tile_zero = zero_point + slot * groups * BN
    acc = tl.zeros((BN,), dtype=tl.float32)
    for span in range(0, spans):
        low, high = int4_values(nibbles(weight + slot * spans * HALF * BN, span, BN))
        x_low, x_high = row_halves(x_row, span)
        first, second = group_offsets(span, GROUP, BN)
        low_sum = tl.sum(by_group(low * x_low[:, None], GROUP, BN), axis=1)
        high_sum = tl.sum(by_group(high * x_high[:, None], GROUP, BN), axis=1)
        if HAS_ZERO:
            # sum of x * (code - zero) = sum of x * code - zero * sum of x: once per group, not per
            # weight.
            low_sum -= tl.load(tile_zero + first).to(tl.float32) * group_sums(x_low, GROUP)[:, None]
            high_sum -= (
                tl.load(tile_zero + second).to(tl.float32) * group_sums(x_high, GROUP)[:, None]
            )
        low_sum *= tl.load(tile_scale + first)
        high_sum *= tl.load(tile_scale + second)
        acc += tl.sum(low_sum + high_sum, axis=0)
    return acc


@triton.jit
def fp4_row(x_row, weight, scale, global_scale, slot, spans, BN: tl.constexpr):
    """A row of x times a column tile, float32 [BN]; slot: which tile of all experts'."""
    tile_scale = scale + slot * spans * (2 * HALF // FP4_GROUP) * BN
    acc = tl.zeros((BN,), dtype=tl.float32)
    for span in range(0, spans):
        low, high = e2m1_values(nibbles(weight + slot * spans * HALF * BN, span, BN))
        x_low, x_high = row_halves(x_row, span)
        first, second = group_offsets(span, FP4_GROUP, BN)
        low_sum = tl.sum(by_group(low * x_low[:, None], FP4_GROUP, BN), axis=1) * e4m3_values(
            tile_scale + first
        )
        high_sum = tl.sum(by_group(high * x_high[:, None], FP4_GROUP, BN), axis=1) * e4m3_values(
            tile_scale + second
        )
        acc += tl.sum(low_sum + high_sum, axis=0)
    return acc * tl.load(global_scale + slot * BN + tl.arange(0, BN))


@triton.jit
def int4_rows(
    x, weight, scale, zero_point, experts, out, items, n, k, groups,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[r] = x[r] @ W[experts[r]].T; x [R, k]; out [R, n]; items = R * column tiles."""
    tiles = tl.cdiv(n, BN)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // tiles
        tile = item % tiles
        slot = tl.load(experts + row).to(tl.int64) * tiles + tile
        acc = int4_row(
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
        store_row(out, acc, row, tile, n, BN)


@triton.jit
def fp4_rows(x, weight, scale, global_scale, experts, out, items, n, k, BN: tl.constexpr):
    """out[r] = x[r] @ W[experts[r]].T; x [R, k]; out [R, n]; items = R * column tiles."""
    tiles = tl.cdiv(n, BN)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // tiles
        tile = item % tiles
        slot = tl.load(experts + row).to(tl.int64) * tiles + tile
        acc = fp4_row(x + row * k, weight, scale, global_scale, slot, k // (2 * HALF), BN)
        store_row(out, acc, row, tile, n, BN)


@triton.jit
def int4_blocks(
    x, weight, scale, zero_point, experts, begin, end, out, items, n, k, groups,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[r] = x[r] @ W[experts[b]].T for the rows r of blocks b: begin[b] to end[b], at most BM. x
    [m, k]; out [m, n]; a block with expert -1 is left alone."""
    tiles = tl.cdiv(n, BN)
    spans = k // (2 * HALF)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile = item % tiles
        block = item // tiles
        expert = tl.load(experts + block)
        if expert >= 0:
            slot = expert.to(tl.int64) * tiles + tile
            tile_scale = scale + slot * groups * BN
            tile_zero = zero_point + slot * groups * BN
            row = tl.load(begin + block) + tl.arange(0, BM)
            m = tl.load(end + block)
            x_block = x + row[:, None] * k + tl.arange(0, HALF)[None, :]
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            for span in range(0, spans):
                low, high = int4_values(nibbles(weight + slot * spans * HALF * BN, span, BN))
                first, second = group_offsets(span, GROUP, BN)
                low = by_group(low, GROUP, BN)
                high = by_group(high, GROUP, BN)
                if HAS_ZERO:
                    low -= tl.load(tile_zero + first).to(tl.float32)[:, None, :]
                    high -= tl.load(tile_zero + second).to(tl.float32)[:, None, :]
                low *= tl.load(tile_scale + first)[:, None, :]
                high *= tl.load(tile_scale + second)[:, None, :]
                acc = multiplied(acc, x_block, span, row, m, low, high, BN)
            store_block(out, acc, row, tile, m, n, BN)


@triton.jit
def fp4_blocks(
    x, weight, scale, global_scale, experts, begin, end, out, items, n, k,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """As int4_blocks.

    The product of a code and its e4m3 scale has six significant bits: the bf16 tile that the cube
    reads is exact.
    """
    tiles = tl.cdiv(n, BN)
    spans = k // (2 * HALF)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile = item % tiles
        block = item // tiles
        expert = tl.load(experts + block)
        if expert >= 0:
            slot = expert.to(tl.int64) * tiles + tile
            tile_scale = scale + slot * spans * (2 * HALF // FP4_GROUP) * BN
            row = tl.load(begin + block) + tl.arange(0, BM)
            m = tl.load(end + block)
            x_block = x + row[:, None] * k + tl.arange(0, HALF)[None, :]
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            for span in range(0, spans):
                low, high = e2m1_values(nibbles(weight + slot * spans * HALF * BN, span, BN))
                first, second = group_offsets(span, FP4_GROUP, BN)
                low = by_group(low, FP4_GROUP, BN) * e4m3_values(tile_scale + first)[:, None, :]
                high = by_group(high, FP4_GROUP, BN) * e4m3_values(tile_scale + second)[:, None, :]
                acc = multiplied(acc, x_block, span, row, m, low, high, BN)
            acc *= tl.load(global_scale + slot * BN + tl.arange(0, BN))[None, :]
            store_block(out, acc, row, tile, m, n, BN)


@triton.jit
def int8_blocks(
    x, row_scale, weight, scale, experts, begin, end, out, items, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """As int4_blocks, times row_scale[r] and scale; x int8 [m, k]; the cube adds int8 products in
    int32, exactly."""
    tiles = tl.cdiv(n, BN)
    steps = k // BK
    inner = tl.arange(0, BK)
    column = tl.arange(0, BN)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile = item % tiles
        block = item // tiles
        expert = tl.load(experts + block)
        if expert >= 0:
            slot = expert.to(tl.int64) * tiles + tile
            tile_weight = weight + slot * steps * BK * BN
            row = tl.load(begin + block) + tl.arange(0, BM)
            m = tl.load(end + block)
            x_block = x + row[:, None] * k + inner[None, :]
            acc = tl.zeros((BM, BN), dtype=tl.int32)
            for step in range(0, steps):
                a = tl.load(x_block + step * BK, mask=row[:, None] < m, other=0)
                b = tl.load(tile_weight + step * BK * BN + inner[:, None] * BN + column[None, :])
                acc = tl.dot(a, b, acc, out_dtype=tl.int32)
            rows = tl.load(row_scale + row, mask=row < m, other=0.0)
            columns = tl.load(scale + slot * BN + column)
            store_block(
                out, acc.to(tl.float32) * rows[:, None] * columns[None, :], row, tile, m, n, BN
            )


@triton.jit
def assign(counts, experts, first, last, num_experts, blocks, BM: tl.constexpr):
    """Blocks of at most BM rows of one expert, of rows sorted by expert; counts int64
    [num_experts]. What is left over gets expert -1. One program."""
    block = 0
    start = 0
    for expert in range(0, num_experts):
        end = start + tl.load(counts + expert).to(tl.int32)
        for row in range(start, end, BM):
            tl.store(experts + block, expert)
            tl.store(first + block, row)
            tl.store(last + block, tl.minimum(row + BM, end))
            block += 1
        start = end
    for rest in range(block, blocks):
        tl.store(experts + rest, -1)
