"""The packed layouts of the CUDA kernels, read back by the addressing that stands at the top of stream_gemm.cu."""

import pytest
import torch
from quantkit_kernels import Fp4, Int4, Int8, dequantize
from quantkit_kernels.cuda.layout import Packed, interleaved, pack
from quantkit_kernels.samples import random_weight
from torch import Tensor

N, K = 80, 256
PADDED = 128


def unsigned(words: Tensor) -> list[int]:
    return [word & 0xFFFFFFFF for word in words.tolist()]


def bf16(bits: int) -> float:
    return torch.tensor(bits - 65536 if bits > 32767 else bits, dtype=torch.int16).view(torch.bfloat16).item()


def fp16(bits: int) -> float:
    return torch.tensor(bits - 65536 if bits > 32767 else bits, dtype=torch.int16).view(torch.float16).item()


def read_int8(packed: Packed, words: list[int], tile: int, h: int, g: int, column: int) -> float:
    q, j, b, e = column // 16, column % 16 // 8, column % 8 // 4, column % 4
    byte = (words[(tile * 64 + j * 32 + 4 * g + q) * 4 + h + 2 * b] >> (8 * e)) & 255
    return byte - 256 if byte > 127 else byte


def read_int4(packed: Packed, words: list[int], tile: int, h: int, g: int, column: int, group: int) -> float:
    half, q, b, e = column // 32, column % 32 // 8, column % 4 // 2, column % 2
    code = (words[(tile * 32 + 4 * g + q) * 4 + 2 * half + column % 8 // 4] >> (4 * (h + 2 * b) + 16 * e)) & 15
    at = (tile * 2 + half if group == 32 else tile if group == 64 else tile // 2) * 8 + g
    assert packed.scales is not None
    scale = fp16((unsigned(packed.scales[at : at + 1])[0] >> (16 * h)) & 0xFFFF)
    zero = 8 if packed.zeros is None else (int(packed.zeros[at]) >> (4 * h)) & 15
    return (code - zero) * scale


def read_fp4(packed: Packed, words: list[int], tile: int, h: int, g: int, column: int) -> float:
    half, q, b, e = column // 32, column % 32 // 8, column % 4 // 2, column % 2
    bits = (words[(tile * 32 + 4 * g + q) * 4 + 2 * half + column % 8 // 4] >> (16 * e)) & 0xFFFF
    pair = h + 2 * b
    code = (bits << (3 * pair)) & 0x81C0 if pair < 3 else ((bits >> 6) & 0x180) | ((bits >> 5) & 0x40) | ((bits << 5) & 0x8000)
    assert packed.scales is not None
    scale = (unsigned(packed.scales[tile * 16 + g * 2 + q // 2 : tile * 16 + g * 2 + q // 2 + 1])[0] >> (8 * (2 * h + half))) & 255
    return bf16(code) * bf16((scale << 4) | 0x7000)


@pytest.mark.parametrize("grid", ["int4-asym-32", "int4-asym-64", "int4-asym-128", "int4-sym-128", "int8", "fp4"])
def test_every_value_is_where_the_kernel_looks(grid: str) -> None:
    weight = random_weight(grid, N, K, torch.Generator().manual_seed(11))
    if isinstance(weight, Fp4):  # the extremes of e4m3: zero, the smallest subnormal, the largest number
        scale = weight.scale.view(torch.uint8).clone()
        scale[:, 0], scale[:, 1], scale[:, 2] = 0, 1, 0x7E
        weight = weight._replace(scale=scale.view(torch.float8_e4m3fn))
    packed = pack(weight)
    assert packed.row_scale.shape == (PADDED,)
    words, exact = unsigned(packed.words), dequantize(weight, torch.float64)
    generator = torch.Generator().manual_seed(12)
    for row, column in zip(torch.randint(N, (600,), generator=generator).tolist(), torch.randint(K, (600,), generator=generator).tolist()):
        place = (packed, words, row // 16 * (K // 64) + column // 64, row % 16 // 8, row % 8, column % 64)
        if isinstance(weight, Int4):
            value = read_int4(*place, group=int(grid.split("-")[-1]))
        else:
            value = read_int8(*place) if isinstance(weight, Int8) else read_fp4(*place)
        # The scales of these samples are float32: float16 holds them to 2^-11.
        assert value * packed.row_scale[row].item() == pytest.approx(exact[row, column].item(), rel=2**-11, abs=0), (row, column)


def test_gate_and_up_alternate_by_eight_rows() -> None:
    generator = torch.Generator().manual_seed(13)
    for grid in ("int4-asym-128", "int8", "fp4"):
        gate, up = random_weight(grid, 32, 128, generator), random_weight(grid, 32, 128, generator)
        both = dequantize(interleaved(gate, up)).view(4, 2, 8, 128)
        assert torch.equal(both[:, 0].reshape(32, 128), dequantize(gate))
        assert torch.equal(both[:, 1].reshape(32, 128), dequantize(up))
