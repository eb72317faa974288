"""Keys, values and latents in 8 bits: codes of int8 or FP8 (E4M3), and a float32 scale for each
token, of keys and values for each head.

A value is scale * code. The scale is max|x| / 127 or / 448, so that no code overflows; codes are rounded to nearest, halves to even. A
latent's rotary key stays in 16 bits, divided by the scale: one factor then holds for all that a
token keeps, and operators multiply by it once, after the product. A product's operands are codes,
which 16 bits hold exactly.

Engines for NPUs know steps beforehand instead, which calibration found: one for a layer's latents,
whose scale is then that step for every token; one for each channel of keys and of values, which are
divided by it, and have scales of 1. What lies beyond 127 steps is cut off.
"""

from typing import NamedTuple

import torch
from torch import Tensor

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""By name: the dtypes of codes."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_LEAST_SCALE = 1e-10
"""Of tokens that are all zeros, or nearly: what is smaller than a step of it is stored as zero."""


class CodedLatents(NamedTuple):
    """codes [num_blocks, block_size, kv_lora]; keys of 16 bits [num_blocks, block_size, R], the
    rotated rotary keys divided by their token's scale; scales float32 [num_blocks, block_size]."""

    codes: Tensor
    keys: Tensor
    scales: Tensor


class CodedKeys(NamedTuple):
    """keys and values: codes [num_blocks, block_size, kv_heads, D]; their scales float32
    [num_blocks, block_size, kv_heads]."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        return self.key_scales, self.value_scales


class CodedIndexKeys(NamedTuple):
    """Index keys of sparse attention: codes of FP8 [num_blocks, block_size, D], scales float32,
    powers of two [num_blocks, block_size]."""

    codes: Tensor
    scales: Tensor


class KeySteps(NamedTuple):
    """What a code is worth in each channel of keys and of values, alike for all tokens: float32
    [kv_heads, D] each."""

    keys: Tensor
    values: Tensor


CodeSteps = Tensor | KeySteps
"""What is known beforehand of a layer: of latents float32 [], or of keys and values."""
IndexKeys = Tensor | CodedIndexKeys
"""A layer's index keys, float [num_blocks, block_size, D] or codes."""
KeyValues = tuple[Tensor, Tensor] | CodedKeys
"""A layer's keys and values, each [num_blocks, block_size, kv_heads, D]: floats, or codes with
their scales."""


def empty_latents(
    blocks: tuple[int, int],
    kv_lora: int,
    rope_dim: int,
    codes: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> CodedLatents:
    """Room for num_blocks of block_size tokens. dtype: of rotary keys."""
    found, keys = (
        torch.empty(*blocks, size, dtype=kind, device=device)
        for size, kind in ((kv_lora, codes), (rope_dim, dtype))
    )
    return CodedLatents(found, keys, torch.empty(blocks, dtype=torch.float32, device=device))


def empty_keys(shape: tuple[int, ...], codes: torch.dtype, device: torch.device) -> CodedKeys:
    """Room for keys and values of shape [num_blocks, block_size, kv_heads, D] each."""
    keys, values = torch.empty(2, *shape, dtype=codes, device=device).unbind()
    return CodedKeys(
        keys, values, *torch.empty(2, *shape[:3], dtype=torch.float32, device=device).unbind()
    )


def empty_index_keys(blocks: tuple[int, int], width: int, device: torch.device) -> CodedIndexKeys:
    """Room for num_blocks of block_size tokens."""
    return CodedIndexKeys(
        torch.empty(*blocks, width, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(blocks, dtype=torch.float32, device=device),
    )


def encode(
    x: Tensor, dtype: torch.dtype, least: Tensor | float = _LEAST_SCALE
) -> tuple[Tensor, Tensor]:
    """x [..., D] -> codes of `dtype` [..., D], scales float32 [...]. least: of the scales, [...] or
    one for all."""
    scales = torch.maximum(_largest_over(x, dtype), torch.as_tensor(least, device=x.device))
    return encode_by(x, scales.unsqueeze(-1), dtype), scales


def encode_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes of index keys or their queries x [..., D], and scales float32 [...]: `encode`'s
    raised to a power of two, as DeepSeek-V3.2's inference code has them (`scale_fmt` ue8m0)."""
    dtype = torch.float8_e4m3fn
    bits = _largest_over(x, dtype).view(torch.int32)
    scales = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return encode_by(x, scales.unsqueeze(-1), dtype), scales


def _largest_over(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest |x| of each row [...] over the largest code, float32."""
    return (x.float().abs().amax(dim=-1) / LARGEST[dtype]).clamp_min(_LEAST_SCALE)


def encode_by(x: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of x [..., D] where a code is worth `step`, of x's last dimensions, whatever x is."""
    scaled = (x.float() / step).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The values float32 [..., D] of codes [..., D] and scales [...]."""
    return codes.float() * scales.unsqueeze(-1)


def store_latents(
    cache: CodedLatents, slots: Tensor, latents: Tensor, keys: Tensor, step: Tensor | None = None
) -> None:
    """Keep latents [T, kv_lora] and rotated rotary keys [T, R] of the tokens at slots [T]. step
    float32 []: of codes, where it is known."""
    if step is None:
        # A key over its scale must be a number of its dtype, which of float16 only unusual ones
        # would not be.
        largest = torch.finfo(cache.keys.dtype).max
        least = keys.float().abs().amax(dim=-1) / largest if keys.shape[1] else 0.0
        codes, scales = encode(latents, cache.codes.dtype, least)
    else:
        codes, scales = encode_by(latents, step, cache.codes.dtype), step.expand(len(latents))
    _put(cache.codes, slots, codes)
    _put(cache.keys, slots, keys.float() / scales.unsqueeze(-1))
    _put(cache.scales, slots, scales)


def store_keys(
    cache: CodedKeys, slots: Tensor, keys: Tensor, values: Tensor, steps: KeySteps | None = None
) -> None:
    """Keep keys and values [T, kv_heads, D] of the tokens at slots [T], or what they are over known
    steps."""
    sides = ((cache.keys, cache.key_scales, keys), (cache.values, cache.value_scales, values))
    for (codes, scales, side), step in zip(sides, steps or (None, None)):
        if step is None:
            encoded, found = encode(side, codes.dtype)
        else:
            encoded, found = encode_by(side, step, codes.dtype), scales.new_ones(side.shape[:2])
        _put(codes, slots, encoded)
        _put(scales, slots, found)


def store_index_keys(cache: IndexKeys, slots: Tensor, keys: Tensor) -> None:
    """Keep index keys [T, D] of the tokens at slots [T]."""
    if isinstance(cache, CodedIndexKeys):
        for side, rows in zip(cache, encode_index(keys)):
            _put(side, slots, rows)
    else:
        _put(cache, slots, keys)


def decoded(cache: CodedLatents) -> Tensor:
    """Latents and rotary keys side by side, float32 [..., kv_lora + R], of a cache or of entries
    picked from it."""
    return torch.cat([decode(cache.codes, cache.scales), decode(cache.keys, cache.scales)], dim=-1)


def _put(stored: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Rows [T, ...] to the slots of [num_blocks, block_size, ...]. FP8 goes as bytes: torch copies
    no rows of it."""
    flat, rows = stored.flatten(0, 1), rows.to(stored.dtype)
    if stored.dtype == torch.float8_e4m3fn:
        flat, rows = flat.view(torch.uint8), rows.view(torch.uint8)
    flat.index_copy_(0, slots, rows)
