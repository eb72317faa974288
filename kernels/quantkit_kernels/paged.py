"""Paged caches of keys and values or of latents, and what the attention operators share: norms,
rotation, block tables.

Latents of one layer are cached as the backend that reads them wants. One tensor [num_blocks,
block_size, kv_lora + R] holds of each token the normed latent, then the rotated rotary key.
Operators that read the two apart get two tensors, [num_blocks, block_size, kv_lora] and
[num_blocks, block_size, R]; in these the first channel of every rotary pair comes before the second
of every pair, as torch_npu's fused operators write them, and angles are given as `doubled_angles`
makes them. In 8 bits a token's latent is codes (codes.py), its rotary key as in one tensor.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import INDEX_DTYPES, check_tensor, require
from quantkit_kernels.codes import CodedKeys, CodedLatents, KeyValues, decoded

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


class Norms(NamedTuple):
    """Gains of two RMSNorms, and the eps of both. q float: of the queries, or of the query part. k
    float: of the keys, or of the latent."""

    q: Tensor
    k: Tensor
    eps: float


class Rotation(NamedTuple):
    """Angles of the tokens' positions. cos, sin float32 [T, R/2], a row a token; interleaved: pairs
    are as `rope` has them.

    For a cache of latents in two tensors: cos, sin [T, R] of the activations' dtype, as
    `doubled_angles` makes them.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = True


class PagedLatents(NamedTuple):
    """A layer's latents of many sequences.

    cache float [num_blocks, block_size, kv_lora + R]: of each token the normed latent, then the
    rotated rotary key; or two tensors, where the backend's `cache_layout` says so, or
    codes (codes.py).
    block_table int [B, n]: token t of row b is in block block_table[b, t // block_size], at t %
    block_size. Entries past the sequence must name some block; what is stored there does not
    matter, not even NaN.
    seq_lens int [B]: tokens to attend to, the newest included. lengths: the same numbers on the
    host, which one backend's operators want there; without them it reads seq_lens from the device,
    and waits for it.
    """

    cache: Latents
    block_table: Tensor
    seq_lens: Tensor
    lengths: Sequence[int] | None = None


class PagedKeys(NamedTuple):
    """A layer's keys and values of many sequences, each float [num_blocks, block_size, kv_heads,
    D], or codes with `scales` of keys and of values, float32 [num_blocks, block_size, kv_heads].
    The rest as `PagedLatents`."""

    keys: Tensor
    values: Tensor
    block_table: Tensor
    seq_lens: Tensor
    lengths: Sequence[int] | None = None
    scales: tuple[Tensor, Tensor] | None = None

    @property
    def cache(self) -> KeyValues:
        """As `gqa_prepare` and `gqa_prefill` take it."""
        return (
            (self.keys, self.values)
            if self.scales is None
            else CodedKeys(self.keys, self.values, *self.scales)
        )


def check_rotation(rotation: Rotation, tokens: int) -> int:
    """The width R that the angles turn."""
    check_tensor("cos", rotation.cos, (tokens, None), (torch.float32,))
    check_tensor("sin", rotation.sin, tuple(rotation.cos.shape), (torch.float32,))
    return 2 * rotation.cos.shape[1]


def check_pages(pages: PagedLatents | PagedKeys, rows: int) -> None:
    check_tensor("block_table", pages.block_table, (rows, None), INDEX_DTYPES)
    check_tensor("seq_lens", pages.seq_lens, (rows,), INDEX_DTYPES)
    require(
        pages.lengths is None or len(pages.lengths) == rows,
        f"lengths: not one for each of {rows} rows",
    )
