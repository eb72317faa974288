"""How latents are cached: as the backend that reads them wants.

One tensor [num_blocks, block_size, kv_lora + R] holds of each token the normed latent, then the
rotated rotary key. Operators that read the two apart get two tensors, [num_blocks, block_size,
kv_lora] and [num_blocks, block_size, R]; in these the first channel of every rotary pair comes
before the second of every pair, as torch_npu's fused operators write them, and angles are given as
`doubled_angles` makes them. In 8 bits a token's latent is codes (codes.py), its rotary key as it is
in one tensor.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.codes import CodedLatents, decoded

Latents = Tensor | tuple[Tensor, Tensor] | CodedLatents
"""The cache of one layer, in one tensor or in two, or in 8 bits."""


def parts_of(cache: Latents) -> tuple[Tensor, ...]:
    return (cache,) if isinstance(cache, Tensor) else cache


def entries(cache: Latents, index: Tensor) -> Tensor:
    """What the index picks of a cache's first dimension, a token's latent and rotary key side by
    side [..., kv_lora + R]."""
    if isinstance(cache, Tensor):
        return cache[index]
    picked = [part[index] for part in cache]
    return (
        decoded(CodedLatents(*picked))
        if isinstance(cache, CodedLatents)
        else torch.cat(picked, dim=-1)
    )


def by_slot(cache: Latents) -> Latents:
    """The cache with its blocks one after the other: of every part the first two dimensions as
    one."""
    if isinstance(cache, Tensor):
        return cache.flatten(0, 1)
    flat = [part.flatten(0, 1) for part in cache]
    return CodedLatents(*flat) if isinstance(cache, CodedLatents) else (flat[0], flat[1])


class CacheLayout(NamedTuple):
    """widths: of the tensors that hold a token, one or two; block_size: tokens of a block."""

    widths: tuple[int, ...]
    block_size: int


def cache_layout(
    kv_lora: int, rope_dim: int, dtype: torch.dtype, device: torch.device, *, backend: str = "auto"
) -> CacheLayout:
    """What the backend of `mla_decode` reads fastest. dtype: of activations, and of the cache where
    they have 16 bits."""
    layout: CacheLayout = backends.find("mla_decode", backend, device).cache_layout(
        kv_lora, rope_dim, dtype
    )
    return layout


def why_no_codes(device: torch.device, *, backend: str = "auto") -> str | None:
    """None where attention on `device` reads a cache in 8 bits (codes.py), else the reason in a few
    words."""
    return getattr(backends.find("mla_decode", backend, device), "NO_CODES", None)


def pairs_apart(x: Tensor) -> Tensor:
    """x [.., R] of neighbouring pairs -> the first channel of every pair, then the second of every
    pair."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def pairs_together(x: Tensor) -> Tensor:
    """The inverse of `pairs_apart`."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def doubled_angles(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin float32 [T, R/2] -> [T, R] of `dtype`: of the first channels of all pairs, then of
    the second."""
    return cos.repeat(1, 2).to(dtype), sin.repeat(1, 2).to(dtype)


def split_latents(cache: Tensor, kv_lora: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """A cache in one tensor as one in two."""
    latent, key = cache.split([kv_lora, cache.shape[2] - kv_lora], dim=-1)
    return latent.contiguous(), (pairs_apart(key) if interleaved else key).contiguous()
