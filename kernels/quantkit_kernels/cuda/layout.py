"""Weights in the order in which the lanes of a warp consume them (the layouts are described at the
top of packed.cuh).

Everything here is plain torch and runs on any device. N is padded to whole strips of 64 rows with
zeros.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.weights import Fp4, Int4, Int8, Weight, group_size, shape

STRIP = 64
_FP4_SCALE_BIAS = 16
_FP4_FACTOR = 2.0**13  # what decode_fp4 leaves out: 2^(126 - 97 - bias)


class PackedStrips(NamedTuple):
    """One weight in the device layout. words int32; scales uint8 or None; zeros uint8 or None;
    row_scale float32 [padded N]."""

    words: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    row_scale: Tensor


def pointers(packed: PackedStrips) -> dict[str, int]:
    """Addresses of the tensors by name, as the C structures want them."""
    return {
        name: tensor.data_ptr() for name, tensor in packed._asdict().items() if tensor is not None
    }


def pack(weight: Weight) -> PackedStrips:
    """K must be a multiple of 128."""
    n, k = shape(weight)
    assert k % 128 == 0, k
    padding = -n % STRIP
    if isinstance(weight, Int4):
        return _pack_int4(weight, padding)
    if isinstance(weight, Fp4):
        return _pack_fp4(weight, padding)
    assert isinstance(weight, Int8), type(weight)
    codes = _pad(weight.codes, padding)
    # rows (strip, row), columns (step, chunk of 16): chunk c of a row at place c ^ (row / 2 % 4)
    chunks = codes.view(-1, STRIP, k // 64, 4, 16).transpose(1, 2)
    place = torch.arange(STRIP, device=codes.device)[:, None] // 2 % 4 ^ torch.arange(
        4, device=codes.device
    )
    swizzled = chunks.gather(3, place[None, None, :, :, None].expand(chunks.shape))
    return PackedStrips(
        swizzled.flatten().view(torch.int32), None, None, _pad(weight.scale.reshape(-1), padding)
    )


def interleave_rows(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up as the fused activation wants them: 8 of gate, 8 of up, and so on. I is a
    multiple of 8."""
    return torch.stack([gate.unflatten(0, (-1, 8)), up.unflatten(0, (-1, 8))], dim=1).flatten(0, 2)


def _pad(tensor: Tensor, rows: int) -> Tensor:
    if rows == 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])])


def _fields(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [N, K] -> int64 [field h + 2b, e, ...words in order]: the eight codes of
    each word."""
    n, k = codes.shape
    # rows (strip, tile, h, g), columns (kt, j/2, q, j%2, b, e) -> b, h, e, strip, kt, tile, g, q,
    # j/2, j%2
    split = codes.view(n // 64, 4, 2, 8, k // 64, 2, 4, 2, 2, 2).permute(
        8, 2, 9, 0, 4, 1, 3, 6, 5, 7
    )
    return split.reshape(4, 2, -1).to(torch.int64)


def _signed(words: Tensor) -> Tensor:
    """int64 words 0..2^32-1 -> the same bits as int32."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _pack_int4(weight: Int4, padding: int) -> PackedStrips:
    codes = _fields(_pad((weight.codes + 8).to(torch.uint8), padding))
    words = torch.zeros_like(codes[0, 0])
    for field in range(4):
        for e in range(2):
            words |= codes[field, e] << (16 * e + 3 + 4 * field)
    words = (words | (words >> 32)) & 0xFFFFFFFF  # the shifts are rotations of 32 bits
    # float16 holds the scales of fp16 and bf16 checkpoints exactly once a power of two per row has
    # brought them into its range.
    exponent = torch.frexp(weight.scale.amax(dim=1, keepdim=True)).exponent
    scale = _pad(torch.ldexp(weight.scale, 12 - exponent).to(torch.float16), padding)
    row_scale = _pad(torch.ldexp(torch.ones_like(weight.scale[:, 0]), exponent[:, 0] - 12), padding)
    return PackedStrips(
        _signed(words),
        _lane_order(scale).flatten().view(torch.uint8),
        _pack_zeros(weight, padding),
        row_scale,
    )


def _lane_order(values: Tensor) -> Tensor:
    """[N, G] -> [strip, G, g, tile, h]: what lane g needs of each group side by side."""
    return values.view(-1, 4, 2, 8, values.shape[1]).permute(0, 4, 3, 1, 2).contiguous()


def _pack_zeros(weight: Int4, padding: int) -> Tensor | None:
    if weight.zero_point is None:
        return None
    pairs = _lane_order(_pad((weight.zero_point + 8).to(torch.uint8), padding))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).flatten()


def _pack_fp4(weight: Fp4, padding: int) -> PackedStrips:
    n, k = shape(weight)
    scale = weight.scale.float()
    # A scale of zero has no normal number to represent it: its codes become zeros instead.
    alive = (scale > 0).repeat_interleave(16, dim=1)
    codes = _fields(_pad(torch.where(alive, weight.codes, torch.zeros_like(weight.codes)), padding))
    sign, magnitude = codes >> 3, codes & 7
    words = torch.zeros_like(codes[0, 0])
    for e in range(2):
        for field in range(3):
            words |= (
                (sign[field, e] << (15 - 3 * field)) | (magnitude[field, e] << (6 - 3 * field))
            ) << (16 * e)
        # Field 3 of words 2i and 2i + 1: signs and mantissa bits in the first, exponents in the
        # second.
        (sign0, sign1), (magnitude0, magnitude1) = (
            sign[3, e].view(-1, 2).T,
            magnitude[3, e].view(-1, 2).T,
        )
        first = (sign0 << 14) | ((magnitude0 & 1) << 13) | (sign1 << 11) | ((magnitude1 & 1) << 10)
        second = ((magnitude0 >> 1) << 13) | ((magnitude1 >> 1) << 10)
        words |= torch.stack([first, second], dim=-1).flatten() << (16 * e)
    mantissa, exponent = torch.frexp(torch.where(scale > 0, scale, torch.ones_like(scale)))
    e5m3 = ((exponent - 1 + _FP4_SCALE_BIAS) << 3) | ((mantissa * 2 - 1) * 8).to(torch.int32)
    # rows (strip, tile, h, g), groups (kt, half, q/2) -> byte (h, half) of word [q/2][g][tile]
    bytes_ = (
        _pad(e5m3.to(torch.uint8), padding)
        .view(-1, 4, 2, 8, k // 64, 2, 2)
        .permute(0, 4, 6, 3, 1, 2, 5)
    )
    row_scale = _pad((weight.global_scale * _FP4_FACTOR).expand(n), padding)
    return PackedStrips(_signed(words), bytes_.flatten(), None, row_scale)


def group_of(weight: Weight) -> int:
    """The group size that the kernel is compiled for."""
    return group_size(weight) if isinstance(weight, Int4) else 16 if isinstance(weight, Fp4) else 0


def interleaved(gate: Weight, up: Weight) -> Weight:
    """gate and up as one weight whose rows come as the fused activation wants them: 8 of gate, 8 of
    up, and so on."""
    parts: list[Tensor | None] = []
    for one, other in zip(gate, up, strict=True):
        if one is None or other is None:
            parts.append(None)
        elif one.dim() == 0:  # a global scale
            rows = shape(gate)[0]
            parts.append(interleave_rows(one.expand(rows), other.expand(rows)))
        elif one.dtype == torch.float8_e4m3fn:
            parts.append(
                interleave_rows(one.view(torch.uint8), other.view(torch.uint8)).view(
                    torch.float8_e4m3fn
                )
            )
        else:
            parts.append(interleave_rows(one, other))
    return type(gate)._make(parts)
