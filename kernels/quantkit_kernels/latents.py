"""How latents are cached: as the backend that reads them wants.

One tensor [num_blocks, block_size, kv_lora + R] holds of each token the normed latent, then the turned rotary key. Operators that read the
two apart get two tensors, [num_blocks, block_size, kv_lora] and [num_blocks, block_size, R]; in these the first channel of every rotary
pair comes before the second of every pair, as torch_npu's fused operators write them, and angles are given as `doubled_angles` makes them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels import backends

Latents = Tensor | tuple[Tensor, Tensor]
"""The cache of one layer, in one tensor or in two."""


def parts_of(cache: Latents) -> tuple[Tensor, ...]:
    return (cache,) if isinstance(cache, Tensor) else cache


class CacheLayout(NamedTuple):
    """widths: of the tensors that hold a token, one or two; block_size: tokens of a block."""

    widths: tuple[int, ...]
    block_size: int


def cache_layout(kv_lora: int, rope_dim: int, dtype: torch.dtype, device: torch.device, *, backend: str = "auto") -> CacheLayout:
    """What the backend of `mla_decode` reads fastest. dtype: of activations, and of the cache where they have 16 bits."""
    layout: CacheLayout = backends.find("mla_decode", backend, device).cache_layout(kv_lora, rope_dim, dtype)
    return layout


def pairs_apart(x: Tensor) -> Tensor:
    """x [.., R] of neighbouring pairs -> the first channel of every pair, then the second of every pair."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def pairs_together(x: Tensor) -> Tensor:
    """The inverse of `pairs_apart`."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def doubled_angles(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin float32 [T, R/2] -> [T, R] of `dtype`: of the first channels of all pairs, then of the second."""
    return cos.repeat(1, 2).to(dtype), sin.repeat(1, 2).to(dtype)


def split_latents(cache: Tensor, kv_lora: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """A cache in one tensor as one in two."""
    latent, key = cache.split([kv_lora, cache.shape[2] - kv_lora], dim=-1)
    return latent.contiguous(), (pairs_apart(key) if interleaved else key).contiguous()
