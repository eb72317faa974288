"""What the operators of attention share: norms, rotation, and the pages where keys, values or
latents are kept."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.arguments import INDEX_DTYPES, check_tensor, require
from quantkit_kernels.codes import CodedKeys, KeyValues
from quantkit_kernels.latents import Latents


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
    rotated rotary key; or two tensors, where the backend's `cache_layout` says so (latents.py), or
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
