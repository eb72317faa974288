# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""What the kernels over packed weights share: 16-bit words of four codes to four planes of 16-bit
weights (layout.py has the layouts).

A plane is one code of every word. Neighbouring words lie in one register on NVIDIA's cards, where a
shift and one logical operation decode
two codes: inline assembly, because the compiler takes 16-bit integers one at a time. Elsewhere, and
in the interpreter, the same in Triton.
"""

import triton
import triton.language as tl

from quantkit_kernels.triton.cards import interpreted

INTERPRETED = tl.constexpr(interpreted())
SPAN = tl.constexpr(128)
"""Input features of a step."""
FROM_FLOAT16 = tl.constexpr(2.0**-112)
INT4, FP4, INT8, W8A16 = (tl.constexpr(kind) for kind in range(4))


def _int4_plane(shift, magic):
    source = f"shr.u32 $0, $1, {shift}; lop3.b32 $0, $0, 0x000F000F, 0x{magic}{magic}, 0xEA;"
    return tl.constexpr(
        source if shift else f"lop3.b32 $0, $1, 0x000F000F, 0x{magic}{magic}, 0xEA;"
    )


def _fp4_plane(shift):
    return tl.constexpr(
        f"shl.b32 $0, $1, {shift}; and.b32 $0, $0, 0x81C081C0;"
        if shift
        else "and.b32 $0, $1, 0x81C081C0;"
    )


INT4_BF16_0, INT4_BF16_1, INT4_BF16_2, INT4_BF16_3 = (
    _int4_plane(4 * plane, "4300") for plane in range(4)
)
INT4_FP16_0, INT4_FP16_1, INT4_FP16_2, INT4_FP16_3 = (
    _int4_plane(4 * plane, "6400") for plane in range(4)
)
FP4_0, FP4_1, FP4_2 = (_fp4_plane(3 * plane) for plane in range(3))
FP4_3 = tl.constexpr(
    "{.reg .b32 a, b; shl.b32 a, $1, 1; and.b32 a, a, 0x80008000; shr.u32 b, $1, 5; lop3.b32 a, b, "
    "0x01000100, a, 0xEA;"
    " shr.u32 b, $1, 4; lop3.b32 $0, b, 0x00C000C0, a, 0xEA;}"
)

FP4_FACTORS_0 = tl.constexpr("shl.b32 $0, $1, 4; lop3.b32 $0, $0, 0x0FF00FF0, 0x60006000, 0xEA;")
FP4_FACTORS_1 = tl.constexpr("shr.u32 $0, $1, 4; lop3.b32 $0, $0, 0x0FF00FF0, 0x60006000, 0xEA;")


@triton.jit
def wait_for_input(PDL: tl.constexpr):
    """Before anything is read that an earlier kernel wrote, or written. With PDL (programmatic
    dependent launch) the next kernel may begin as soon as all programs of this one have, and this
    one waits here until the one before it is done."""
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; // $0",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def fetch(address, SIZE: tl.constexpr):
    """SIZE bytes, a multiple of 128, into the last cache."""
    fetch_lines(address.to(tl.int64) + tl.arange(0, SIZE // 128) * 128)


@triton.jit
def fetch_lines(addresses):
    """What lies at these addresses, to the end of its line of 128 bytes, into the last cache."""
    at = addresses.to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def dot(a, b, acc):
    """acc + a b in float32. The interpreter knows no product of bfloat16."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def rounded(values, DTYPE: tl.constexpr):
    """float32 to DTYPE. The interpreter cuts bits off where bfloat16 is to be rounded, ties to
    even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True).to(DTYPE)
    else:
        return values.to(DTYPE)


@triton.jit
def from_int8(codes, DTYPE: tl.constexpr):
    """int8 codes as numbers of DTYPE, which holds them exactly. The interpreter multiplies bfloat16
    as float32."""
    if INTERPRETED:
        return codes.to(tl.float32)
    else:
        return codes.to(DTYPE)


@triton.jit
def in_pairs(words, SOURCE: tl.constexpr):
    return tl.inline_asm_elementwise(
        SOURCE, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def in_pairs_fp16(words, SOURCE: tl.constexpr):
    return tl.inline_asm_elementwise(
        SOURCE, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
    )


@triton.jit
def int4_plane(words, PLANE: tl.constexpr, DTYPE: tl.constexpr, NVIDIA: tl.constexpr):
    """Codes 0..15 of a plane, added to 128 in bfloat16 and to 1024 in float16: the code is in the
    lowest bits of such a number."""
    if NVIDIA and DTYPE == tl.bfloat16:
        if PLANE == 0:
            found = in_pairs(words, INT4_BF16_0)
        elif PLANE == 1:
            found = in_pairs(words, INT4_BF16_1)
        elif PLANE == 2:
            found = in_pairs(words, INT4_BF16_2)
        else:
            found = in_pairs(words, INT4_BF16_3)
    elif NVIDIA:
        if PLANE == 0:
            found = in_pairs_fp16(words, INT4_FP16_0)
        elif PLANE == 1:
            found = in_pairs_fp16(words, INT4_FP16_1)
        elif PLANE == 2:
            found = in_pairs_fp16(words, INT4_FP16_2)
        else:
            found = in_pairs_fp16(words, INT4_FP16_3)
    else:
        MAGIC: tl.constexpr = 0x4300 if DTYPE == tl.bfloat16 else 0x6400
        found = (((words >> (4 * PLANE)) & 15) | MAGIC).to(DTYPE, bitcast=True)
    return found


@triton.jit
def fp4_plane(words, PLANE: tl.constexpr, NVIDIA: tl.constexpr):
    """E2M1 codes of a plane times 2^-126: sign, exponent and mantissa are where bfloat16 has
    them. Elsewhere than on NVIDIA's cards times 2^-14, as float16 has them: who computes in float32
    may flush numbers as small as the code for 0.5."""
    if NVIDIA:
        if PLANE == 0:
            found = in_pairs(words, FP4_0)
        elif PLANE == 1:
            found = in_pairs(words, FP4_1)
        elif PLANE == 2:
            found = in_pairs(words, FP4_2)
        else:
            found = in_pairs(words, FP4_3)
    else:
        if PLANE < 3:
            sign = (words << (3 * PLANE)) & -32768
            magnitude = (words << (3 * PLANE)) & 448
        else:
            sign = (words << 1) & -32768
            magnitude = ((words >> 5) & 256) | ((words >> 4) & 192)
        found = (sign | (magnitude << 3)).to(tl.float16, bitcast=True)
    return found


@triton.jit
def int4_factors(scales, PART: tl.constexpr, DTYPE: tl.constexpr):
    """What a group's codes are decoded with, of each row: what to take away, and the scale,
    float32. PART: 32 bits of the scale word."""
    word = (scales >> (32 * PART)).to(tl.int32)
    MAGIC: tl.constexpr = 0x4300 if DTYPE == tl.bfloat16 else 0x6400
    less = ((word >> 16) | MAGIC).to(tl.int16).to(DTYPE, bitcast=True)
    return less, word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def fp4_factor(scales, PLANE: tl.constexpr, SUB: tl.constexpr, NVIDIA: tl.constexpr):
    """The scale of a group of 16, times 2^81: byte 2 PLANE + SUB. By assembly two bytes at once,
    which two planes share."""
    word = (scales >> (32 * (PLANE // 2))).to(tl.int32)
    if NVIDIA:
        if SUB == 0:
            both = tl.inline_asm_elementwise(
                FP4_FACTORS_0, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            both = tl.inline_asm_elementwise(
                FP4_FACTORS_1, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
            )
        found = both >> (16 * (PLANE % 2))
    else:
        found = (((word >> (8 * (2 * (PLANE % 2) + SUB))) & 255) << 4) | 0x6000
    return found.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_scales(scales, step, part, n, rows, KIND: tl.constexpr, GROUP: tl.constexpr):
    """The scale words of a step and, with groups of 32, of half a step."""
    PER: tl.constexpr = 2 if KIND == INT4 and GROUP == 32 else 1
    return tl.load(scales + (step * PER + part) * n + rows)


@triton.jit
def plane(words, first, second, PLANE: tl.constexpr, SUB: tl.constexpr, KIND: tl.constexpr,
GROUP: tl.constexpr, DTYPE: tl.constexpr,
          NVIDIA: tl.constexpr):  # fmt: skip
    """Weights [BN, columns] of DTYPE. first, second: scale words; SUB: which half of the columns,
    with FP4."""
    if KIND == FP4:
        return scaled(
            fp4_plane(words, PLANE, NVIDIA),
            0.0,
            fp4_factor(first, PLANE, SUB, NVIDIA),
            False,
            DTYPE,
            NVIDIA,
        )
    else:
        if GROUP == 32:
            if PLANE < 2:
                less, scale = int4_factors(first, PLANE, DTYPE)
            else:
                less, scale = int4_factors(second, PLANE - 2, DTYPE)
        else:
            less, scale = int4_factors(first, PLANE * 32 // GROUP, DTYPE)
        return scaled(
            int4_plane(words, PLANE, DTYPE, NVIDIA),
            less,
            rounded(scale, DTYPE),
            True,
            DTYPE,
            NVIDIA,
        )


@triton.jit
def scaled(values, less, scale, SHIFTED: tl.constexpr, DTYPE: tl.constexpr, NVIDIA: tl.constexpr):
    """(values - less) * scale by rows. NVIDIA's cards have such instructions of 16 bits, two
    numbers at a time; others work in float32."""
    if NVIDIA:
        if SHIFTED:
            values = values - less[:, None]
        return values * scale[:, None]
    else:
        wide = values.to(tl.float32)
        factor = scale.to(tl.float32)
        if SHIFTED:
            wide = wide - less.to(tl.float32)[:, None]
        else:
            factor = factor * FROM_FLOAT16
        return rounded(wide * factor[:, None], DTYPE)
