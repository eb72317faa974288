"""Attention over a window of recent tokens and compressed KV entries (DeepSeek-V4): keys and values
are one vector, shared by all heads; an entry pools the vectors of `rate` tokens.

Symbols: T tokens, D head_dim, R channels rotated, the last ones, E entries, r rate.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import FLOAT_DTYPES, INDEX_DTYPES, check_tensor, require
from quantkit_kernels.paged import Rotation, check_rotation


class RecentTokens(NamedTuple):
    """Vectors of the tokens of each window. kv float [S, D]; first int64 [T]; period: the vector at
    position p of a token's sequence is kv[first + p % period]. window: tokens that each sees,
    itself included."""

    kv: Tensor
    first: Tensor
    period: int
    window: int


class EntryPages(NamedTuple):
    """Compressed KV entries. kv float [rows, D]; table int [T, n], or [1, n] of one sequence:
    blocks of block_size tokens, which have `rows_per_block` rows each. An entry lies in the
    block of its last token."""

    kv: Tensor
    table: Tensor
    block_size: int
    rate: int

    @property
    def rows_per_block(self) -> int:
        return -(-self.block_size // self.rate)

    @property
    def most(self) -> int:
        """Entries of a row of the table."""
        return self.table.shape[1] * self.block_size // self.rate

    def rows(self, numbers: Tensor) -> Tensor:
        """numbers int64 [T, E] of entries -> rows of kv [T, E], any for one beyond the table."""
        block = ((numbers + 1) * self.rate - 1) // self.block_size
        table = self.table.long().expand(len(numbers), -1)
        blocks = table.gather(1, block.clamp(max=table.shape[1] - 1))
        return blocks * self.rows_per_block + numbers - block * self.block_size // self.rate


class ChosenEntries(NamedTuple):
    """The entries that each token reads: rows int32 [T, k] of EntryPages.kv, and how many of them,
    from the first on, int32 [T]."""

    rows: Tensor
    counts: Tensor


class EntryPool(NamedTuple):
    """How entries of some pages are pooled. bias float32 [r, D]: of the tokens' weights; [r, 2 D]
    with overlap, where a token contributes two halves, to the group after its own and to its own.
    gain [D] and eps of the norm after it; None where entries are neither normed nor rotated, of
    all pools of a call or of none."""

    bias: Tensor
    gain: Tensor | None
    eps: float
    pages: EntryPages

    @property
    def overlap(self) -> bool:
        return self.bias.shape[1] > self.pages.kv.shape[1]

    @property
    def reach(self) -> int:
        """Tokens pooled to one entry."""
        return self.pages.rate * (1 + self.overlap)


class HeadNorm(NamedTuple):
    """RMSNorm over each head's channels, with gain [D] or without."""

    gain: Tensor | None
    eps: float


def rotate_heads(
    x: Tensor,
    rotation: Rotation,
    norm: HeadNorm | None = None,
    *,
    back: bool = False,
    backend: str = "auto",
) -> Tensor:
    """x float [T, heads, D], normed where there is a norm, its last R channels rotated, or rotated
    back. cos, sin of rotation: [T, R / 2]."""
    _check_heads("x", x, rotation, norm=norm)
    found = backends.find("rotate_heads", backend, x.device)
    result: Tensor = found.rotate_heads(x, rotation, norm, back)
    return result


def rotate_queries(
    q: Tensor,
    key: Tensor,
    rotation: Rotation,
    norm: HeadNorm | None,
    key_norm: HeadNorm,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`rotate_heads` of q float [T, heads, D], and of key [T, D] of q's dtype as of one head, which
    is normed by a gain."""
    _check_heads("q", q, rotation, norm=norm, key_norm=key_norm)
    check_tensor("key", key, (len(q), q.shape[2]), (q.dtype,))
    require(key_norm.gain is not None, "key_norm: without a gain")
    found = backends.find("rotate_queries", backend, q.device)
    queries, keys = found.rotate_queries(q, key, rotation, norm, key_norm)
    return queries, keys


def _check_heads(name: str, x: Tensor, rotation: Rotation, **norms: HeadNorm | None) -> None:
    check_tensor(name, x, (None, None, None), FLOAT_DTYPES)
    tokens, _, width = x.shape
    rotary = check_rotation(rotation, tokens)
    require(rotary <= width, f"cos: {rotary} channels to rotate, {name} has {width}")
    for of, norm in norms.items():
        if norm is not None and norm.gain is not None:
            check_tensor(f"{of}.gain", norm.gain, (width,), FLOAT_DTYPES)


def store_recent(
    x: Tensor,
    rings: Tensor,
    ends: Tensor,
    places: Tensor,
    positions: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Store x float [B, W] of tokens at positions int64 [B] of the sequences at places int64 [B];
    rows of one sequence have rising positions. rings float [2, P, L, W]: the last tokens of each
    sequence, at their position modulo L, held twice; ends int64 [2, P]: how many tokens each copy
    is of, of which the larger is read and written here. Returns int64 [B]: where the ring of each
    row begins among all 2 P L."""
    check_tensor("x", x, (len(positions), None), FLOAT_DTYPES)
    check_tensor("rings", rings, (2, None, None, x.shape[1]), FLOAT_DTYPES)
    check_tensor("ends", ends, (2, rings.shape[1]), (torch.int64,))
    check_tensor("places", places, (len(x),), (torch.int64,))
    check_tensor("positions", positions, (len(x),), (torch.int64,))
    found = backends.find("store_recent", backend, x.device)
    first: Tensor = found.store_recent(x, rings, ends, places, positions)
    return first


def pool_entries(
    raw: RecentTokens,
    positions: Tensor,
    pools: Sequence[EntryPool],
    rotation: Rotation,
    *,
    backend: str = "auto",
) -> None:
    """Write the entries of groups that end at positions int64 [T] to their pages; a position that
    ends none may write to block 0. raw.kv float [S, C]: values and weights of each pool, one after
    the other; its window is not used. rotation: of the groups' first tokens, by which the last R
    channels of an entry are rotated. All pools have one rate and one table."""
    check_tensor("positions", positions, (None,), (torch.int64,))
    check_rotation(rotation, len(positions))
    width = sum(2 * pool.bias.shape[1] for pool in pools)
    check_tensor("raw.kv", raw.kv, (None, width), FLOAT_DTYPES)
    check_tensor("raw.first", raw.first, (len(positions),), (torch.int64,))
    for pool in pools:
        dim = pool.pages.kv.shape[1]
        wide = dim * (1 + pool.overlap)
        check_tensor("bias", pool.bias, (pool.pages.rate, wide), (torch.float32,))
        check_tensor("pages.kv", pool.pages.kv, (None, dim), (raw.kv.dtype,))
        require(pool.reach == pools[0].reach, "pools: of different groups")
        require((pool.gain is None) == (pools[0].gain is None), "pools: normed and not")
    backends.find("pool_entries", backend, raw.kv.device).pool_entries(
        raw, positions, pools, rotation
    )


def compressed_attend(
    q: Tensor,
    positions: Tensor,
    recent: RecentTokens,
    pages: EntryPages | None,
    chosen: ChosenEntries | None,
    sinks: Tensor,
    *,
    scale: float,
    backend: str = "auto",
) -> Tensor:
    """q float [T, heads, D] of tokens at positions int64 [T], over their windows and, of pages, the
    entries of groups that end at them or before, or the chosen ones. sinks float32 [heads]: score
    of a virtual key without a value -> [T, heads, D]."""
    check_tensor("q", q, (None, None, None), FLOAT_DTYPES)
    tokens, heads, width = q.shape
    check_tensor("positions", positions, (tokens,), (torch.int64,))
    check_tensor("recent.kv", recent.kv, (None, width), (q.dtype,))
    check_tensor("recent.first", recent.first, (tokens,), (torch.int64,))
    check_tensor("sinks", sinks, (heads,), (torch.float32,))
    if pages is not None:
        check_tensor("pages.kv", pages.kv, (None, width), (q.dtype,))
        check_tensor("pages.table", pages.table, (None, None), INDEX_DTYPES)
        rows = len(pages.table)
        require(rows in (1, tokens), f"pages.table: {rows} rows, expected 1 or {tokens}")
    if chosen is not None:
        require(pages is not None, "chosen: entries without pages")
        check_tensor("chosen.rows", chosen.rows, (tokens, None), (torch.int32,))
        check_tensor("chosen.counts", chosen.counts, (tokens,), (torch.int32,))
    found = backends.find("compressed_attend", backend, q.device)
    result: Tensor = found.compressed_attend(q, positions, recent, pages, chosen, sinks, scale)
    return result
