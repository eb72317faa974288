"""The packed layouts of the CUDA kernels, read back by the addressing that stands at the top of
packed.cuh."""

import pytest
import torch
from quantkit_kernels import Fp4, Int4, Int8, dequantize
from quantkit_kernels.cuda.layout import interleaved, pack
from quantkit_kernels.samples import random_weight

N, K = 80, 256
PADDED = 128


def unsigned(words):
    return [word & 0xFFFFFFFF for word in words.tolist()]


def number(bits, dtype):
    """Of 16 bits."""
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype).item()


def place_of(row, column):
    """Of a code of four bits in its step of 64 columns: tile, h and g of its row; half, q, b and e of
    its column."""
    side = row // 16, row % 16 // 8, row % 8
    return *side, column // 32, column % 32 // 8, column % 4 // 2, column % 2


def read_int8(packed, words, step, row, column):
    chunk = column // 16 ^ (row // 2 % 4)
    byte = (
        words[(step * 64 + row) * 16 + chunk * 4 + column % 16 // 4] >> (8 * (column % 4))
    ) & 255
    return byte - 256 if byte > 127 else byte


def read_int4(packed, words, step, row, column, group):
    tile, h, g, half, q, b, e = place_of(row, column)
    word = words[((step * 4 + tile) * 32 + 4 * g + q) * 4 + 2 * half + column % 8 // 4]
    by = 4 * (h + 2 * b)
    code = (((word >> by) | (word << (32 - by))) >> (16 * e + 3)) & 15
    index = step * 2 + half if group == 32 else step if group == 64 else step // 2
    scale = float(packed.scales.view(torch.float16)[index * 64 + g * 8 + tile * 2 + h])
    zero = (
        8
        if packed.zeros is None
        else (int(packed.zeros[index * 32 + g * 4 + tile]) >> (4 * h)) & 15
    )
    return (code - zero) * scale


def read_fp4(packed, words, step, row, column):
    tile, h, g, half, q, b, e = place_of(row, column)
    j, field = column % 8 // 4, h + 2 * b
    first, second = (
        words[((step * 4 + tile) * 32 + 4 * g + q) * 4 + 2 * half + i] >> (16 * e) & 0xFFFF
        for i in range(2)
    )
    left = ((first << 1) & 0x9000) | ((first >> 7) & 0x48) | ((second >> 6) & 0x1B0)
    bits = left << (3 * j) if field == 3 else (second if j else first) << (3 * field)
    scale = int(packed.scales[step * 256 + (q // 2) * 128 + g * 16 + tile * 4 + 2 * h + half])
    return number(bits & 0x81C0, torch.bfloat16) * number((scale << 4) | 0x7000, torch.bfloat16)


@pytest.mark.parametrize(
    "grid", ["int4-asym-32", "int4-asym-64", "int4-asym-128", "int4-sym-128", "int8", "fp4"]
)
def test_every_value_is_where_the_kernel_looks(grid):
    weight = random_weight(grid, N, K, torch.Generator().manual_seed(11))
    if isinstance(
        weight, Fp4
    ):  # the extremes of e4m3: zero, the smallest subnormal, the largest number
        scale = weight.scale.view(torch.uint8).clone()
        scale[:, 0], scale[:, 1], scale[:, 2] = 0, 1, 0x7E
        weight = weight._replace(scale=scale.view(torch.float8_e4m3fn))
    packed = pack(weight)
    assert packed.row_scale.shape == (PADDED,)
    words, exact = unsigned(packed.words), dequantize(weight, torch.float64)
    generator = torch.Generator().manual_seed(12)
    for row, column in zip(
        torch.randint(N, (600,), generator=generator).tolist(),
        torch.randint(K, (600,), generator=generator).tolist(),
    ):
        place = (packed, words, row // 64 * (K // 64) + column // 64, row % 64, column % 64)
        if isinstance(weight, Int4):
            value = read_int4(*place, group=int(grid.split("-")[-1]))
        else:
            value = read_int8(*place) if isinstance(weight, Int8) else read_fp4(*place)
        # The scales of these samples are float32: float16 holds them to 2^-11.
        assert value * packed.row_scale[row].item() == pytest.approx(
            exact[row, column].item(), rel=2**-11, abs=0
        ), (row, column)


def test_gate_and_up_alternate_by_eight_rows():
    generator = torch.Generator().manual_seed(13)
    for grid in ("int4-asym-128", "int8", "fp4"):
        gate, up = random_weight(grid, 32, 128, generator), random_weight(grid, 32, 128, generator)
        both = dequantize(interleaved(gate, up)).view(4, 2, 8, 128)
        assert torch.equal(both[:, 0].reshape(32, 128), dequantize(gate))
        assert torch.equal(both[:, 1].reshape(32, 128), dequantize(up))
