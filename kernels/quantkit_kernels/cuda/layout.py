"""Weights in the order in which the lanes of a warp consume them (the layouts stand at the top of stream_gemm.cu).

Everything here is plain torch and runs on any device. N is padded to whole tiles of 64 rows with zeros.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.weights import Fp4, Int4, Int8, Weight, group_size, shape

ROW_TILE = 64
_FP4_SCALE_BIAS = 16
_FP4_FACTOR = 2.0**13  # what decode_fp4 leaves out: 2^(126 - 97 - bias)


class Packed(NamedTuple):
    """One weight in the device layout. words int32; scales int32 or None; zeros uint8 or None; row_scale float32 [padded N]."""

    words: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    row_scale: Tensor


def pack(weight: Weight) -> Packed:
    """K must be a multiple of 128."""
    n, k = shape(weight)
    assert k % 128 == 0, k
    padding = -n % ROW_TILE
    if isinstance(weight, Int4):
        return _pack_int4(weight, padding)
    if isinstance(weight, Fp4):
        return _pack_fp4(weight, padding)
    assert isinstance(weight, Int8), type(weight)
    codes = _pad(weight.codes, padding)
    # rows (tile, h, g), columns (tile, q, j, b, e): byte e of word 4j + h + 2b of lane 4g + q; a lane's words 4j.. are 16 bytes
    bytes_ = codes.view(-1, 2, 8, k // 64, 4, 2, 2, 4).permute(0, 3, 5, 2, 4, 6, 1, 7)  # tile, kt, j, g, q, b, h, e
    return Packed(bytes_.flatten().view(torch.int32), None, None, _pad(weight.scale.reshape(-1), padding))


def interleave_rows(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up as the fused activation wants them: 8 of gate, 8 of up, and so on. I is a multiple of 8."""
    return torch.stack([gate.unflatten(0, (-1, 8)), up.unflatten(0, (-1, 8))], dim=1).flatten(0, 2)


def _pad(tensor: Tensor, rows: int) -> Tensor:
    if rows == 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])])


def _pair_fields(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [N, K] -> int32 [tile, kt, g, q, j, b, h, e]: the eight codes of a word last."""
    n, k = codes.shape
    return codes.view(n // 16, 2, 8, k // 64, 2, 4, 2, 2, 2).permute(0, 3, 2, 5, 4, 6, 7, 1, 8).flatten(4, 5).to(torch.int32)


def _pack_int4(weight: Int4, padding: int) -> Packed:
    codes = _pair_fields(_pad((weight.codes + 8).to(torch.uint8), padding))
    words = torch.zeros_like(codes[..., 0, 0, 0])
    for b in range(2):
        for h in range(2):
            for e in range(2):
                words |= codes[..., b, h, e] << (4 * (h + 2 * b) + 16 * e)
    # float16 holds the scales of fp16 and bf16 checkpoints exactly once a power of two per row has brought them into its range.
    exponent = torch.frexp(weight.scale.amax(dim=1, keepdim=True)).exponent
    scale = _pad(torch.ldexp(weight.scale, 12 - exponent).to(torch.float16), padding)
    row_scale = _pad(torch.ldexp(torch.ones_like(weight.scale[:, 0]), exponent[:, 0] - 12), padding)
    return Packed(words.reshape(-1), _row_pairs(scale).flatten().view(torch.int32), _pack_zeros(weight, padding), row_scale)


def _row_pairs(values: Tensor) -> Tensor:
    """[N, G] -> [tile, G, 8, 2]: the values of rows g and 8 + g side by side."""
    return values.view(-1, 2, 8, values.shape[1]).permute(0, 3, 2, 1).contiguous()


def _pack_zeros(weight: Int4, padding: int) -> Tensor | None:
    if weight.zero_point is None:
        return None
    pairs = _row_pairs(_pad((weight.zero_point + 8).to(torch.uint8), padding))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).reshape(-1)


def _pack_fp4(weight: Fp4, padding: int) -> Packed:
    n, k = shape(weight)
    scale = weight.scale.float()
    # A scale of zero has no normal number to stand for it: its codes become zeros instead.
    alive = (scale > 0).repeat_interleave(16, dim=1)
    codes = _pair_fields(_pad(torch.where(alive, weight.codes, torch.zeros_like(weight.codes)), padding))
    words = torch.zeros_like(codes[..., 0, 0, 0])
    for b in range(2):
        for h in range(2):
            for e in range(2):
                code, pair = codes[..., b, h, e], h + 2 * b
                sign, magnitude = code >> 3, code & 7
                if pair < 3:
                    field = (sign << (15 - 3 * pair)) | (magnitude << (6 - 3 * pair))
                else:
                    field = ((magnitude >> 1) << 13) | ((magnitude & 1) << 11) | (sign << 10)
                words |= field << (16 * e)
    mantissa, exponent = torch.frexp(torch.where(scale > 0, scale, torch.ones_like(scale)))
    e5m3 = ((exponent - 1 + _FP4_SCALE_BIAS) << 3) | ((mantissa * 2 - 1) * 8).to(torch.int32)
    # rows (tile, h, g), groups (kt, half, q/2): bytes (h, half) of word (g, q/2)
    bytes_ = _pad(e5m3.to(torch.uint8), padding).view(-1, 2, 8, k // 64, 2, 2).permute(0, 3, 2, 5, 1, 4).contiguous()
    row_scale = _pad((weight.global_scale * _FP4_FACTOR).expand(n), padding)
    return Packed(words.reshape(-1), bytes_.flatten().view(torch.int32), None, row_scale)


def group_of(weight: Weight) -> int:
    """The group size that the kernel is compiled for."""
    return group_size(weight) if isinstance(weight, Int4) else 16 if isinstance(weight, Fp4) else 0


def interleaved(gate: Weight, up: Weight) -> Weight:
    """gate and up as one weight whose rows come as the fused activation wants them: 8 of gate, 8 of up, and so on."""
    parts: list[Tensor | None] = []
    for one, other in zip(gate, up, strict=True):
        if one is None or other is None:
            parts.append(None)
        elif one.dim() == 0:  # a global scale
            rows = shape(gate)[0]
            parts.append(interleave_rows(one.expand(rows), other.expand(rows)))
        elif one.dtype == torch.float8_e4m3fn:
            parts.append(interleave_rows(one.view(torch.uint8), other.view(torch.uint8)).view(torch.float8_e4m3fn))
        else:
            parts.append(interleave_rows(one, other))
    return type(gate)._make(parts)
