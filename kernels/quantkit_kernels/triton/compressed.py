"""Launches of attention over a window and compressed KV entries. What the kernels cannot take,
float32 queries above all, the reference computes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.compressed import (
    ChosenEntries,
    EntryPages,
    EntryPool,
    HeadNorm,
    RecentTokens,
)
from quantkit_kernels.paged import Rotation
from quantkit_kernels.triton.attention.decode import merge_shares
from quantkit_kernels.triton.cards import (
    architecture,
    decode_cut,
    multiprocessors,
    overlapped,
    shared_bytes,
)
from quantkit_kernels.triton.rows import power_of_two

_LOG2E = 1.4426950408889634
_HALF = (torch.bfloat16, torch.float16)
_ROTATED = 2048
"""Numbers that a program rotates."""
_POOLED = 8
"""Tokens that a program pools at a time."""
_HEADS, _FEW_HEADS, _MOST_KEYS, _MOST_SPLITS = 64, 16, 32, 32
"""Heads of a program, where there are tokens for all multiprocessors and where not; keys that it
takes at a time, and programs that share those of a token."""


def rotate_heads(x: Tensor, rotation: Rotation, norm: HeadNorm | None, back: bool) -> Tensor:
    return _rotate(x, None, rotation, norm, None, back)[0]


def rotate_queries(
    q: Tensor, key: Tensor, rotation: Rotation, norm: HeadNorm | None, key_norm: HeadNorm
) -> tuple[Tensor, Tensor]:
    return _rotate(q, key, rotation, norm, key_norm, False)


def _rotate(
    x: Tensor,
    key: Tensor | None,
    rotation: Rotation,
    norm: HeadNorm | None,
    key_norm: HeadNorm | None,
    back: bool,
) -> tuple[Tensor, Tensor]:
    from quantkit_kernels.triton.compressed_kernel import rotate_heads as kernel

    tokens, heads, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device)
    keys = y if key is None else key if key.stride(-1) == 1 else key.contiguous()
    key_y = torch.empty(tokens, width, dtype=x.dtype, device=x.device) if keys is not y else y
    if tokens * heads == 0:
        return y, key_y
    padded = power_of_two(width)
    block = min(power_of_two(heads), max(1, _ROTATED // padded))
    gains = [x if one is None or one.gain is None else one.gain for one in (norm, key_norm)]
    kernel[(tokens, -(-heads // block) + (key is not None))](
        x, gains[0].contiguous(), keys, gains[1].contiguous(), rotation.cos.contiguous(),
        rotation.sin.contiguous(), y, key_y, heads, x.stride(0), x.stride(1), keys.stride(0),
        0.0 if norm is None else norm.eps, 0.0 if key_norm is None else key_norm.eps,
        D=width, R=2 * rotation.cos.shape[1], WIDTH=padded, HEADS=block, NORMED=norm is not None,
        GAINED=norm is not None and norm.gain is not None, BACK=back,
        INTERLEAVED=rotation.interleaved, KEYED=key is not None, **overlapped(x.device),
    )  # fmt: skip
    return y, key_y


def store_recent(
    x: Tensor, rings: Tensor, ends: Tensor, places: Tensor, positions: Tensor
) -> Tensor:
    from quantkit_kernels.triton.compressed_kernel import store_recent as kernel

    (rows, width), first = x.shape, torch.empty_like(positions)
    if x.dtype != rings.dtype or not rings.is_contiguous():
        return reference.store_recent(x, rings, ends, places, positions)
    if rows:
        x = x if x.stride(1) == 1 else x.contiguous()
        kernel[(rows,)](
            x, rings, ends, places.contiguous(), positions.contiguous(), first, x.stride(0),
            rings.shape[1], rings.shape[2], W=width, WIDTH=power_of_two(width),
            **overlapped(x.device),
        )  # fmt: skip
    return first


def pool_entries(
    raw: RecentTokens, positions: Tensor, pools: Sequence[EntryPool], rotation: Rotation
) -> None:
    from quantkit_kernels.triton.compressed_kernel import pool_entries as kernel

    first, last, whole = pools[0], pools[-1], all(one.pages.kv.is_contiguous() for one in pools)
    if raw.kv.dtype not in _HALF or len(pools) > 2 or not whole:
        return reference.pool_entries(raw, positions, pools, rotation)
    if len(positions) == 0:
        return None
    width, more = (one.pages.kv.shape[1] for one in (first, last))
    table = first.pages.table.contiguous()
    sides = [
        (
            one.bias.contiguous(),
            (one.bias if one.gain is None else one.gain).contiguous(),
            one.pages.kv,
        )
        for one in (first, last)
    ]
    kernel[(len(positions), len(pools))](
        raw.kv.contiguous(), raw.first.contiguous(), positions.contiguous(), table,
        rotation.cos.contiguous(), rotation.sin.contiguous(), *sides[0], *sides[1], raw.period,
        table.shape[1] if len(table) > 1 else 0, first.eps, last.eps,
        C=raw.kv.shape[1], D=width, WIDTH=power_of_two(width),
        MORE_D=more if len(pools) > 1 else 0, MORE_WIDTH=power_of_two(more),
        R=2 * rotation.cos.shape[1], RATE=first.pages.rate, REACH=first.reach,
        TOKENS=min(power_of_two(first.reach), _POOLED), BLOCK=first.pages.block_size,
        PER_BLOCK=first.pages.rows_per_block, INTERLEAVED=rotation.interleaved,
        NORMED=first.gain is not None, **overlapped(raw.kv.device),
    )  # fmt: skip
    return None


def compressed_attend(
    q: Tensor,
    positions: Tensor,
    recent: RecentTokens,
    pages: EntryPages | None,
    chosen: ChosenEntries | None,
    sinks: Tensor,
    scale: float,
) -> Tensor:
    from quantkit_kernels.triton.compressed_kernel import compressed_attend as kernel

    (tokens, heads, width), padded = q.shape, max(16, power_of_two(q.shape[2]))
    if q.dtype not in _HALF or padded > 512 or q.numel() == 0:
        return reference.compressed_attend(q, positions, recent, pages, chosen, sinks, scale)
    device, q = q.device, q if q.stride(-1) == 1 else q.contiguous()
    processors, kv = multiprocessors(device), recent.kv.contiguous()
    rate, most = 0, recent.window
    entries, table, rows, counts = kv, positions, positions, positions
    if pages is not None:
        rate, entries, table = pages.rate, pages.kv.contiguous(), pages.table.contiguous()
        most += pages.most
    if chosen is not None:
        rows, counts = chosen.rows.contiguous(), chosen.counts.contiguous()
        most = recent.window + rows.shape[1]
    roomy = shared_bytes(architecture(device)) >= 4 * _HEADS * padded
    many = tokens >= processors and heads > _FEW_HEADS and roomy
    block = _HEADS if many else _FEW_HEADS
    cut, head_blocks = decode_cut(device, block, padded, latent=True), -(-heads // block)
    step = min(cut.tokens, _MOST_KEYS)
    splits = min(2 * processors // (tokens * head_blocks), -(-most // step), _MOST_SPLITS)
    splits = max(1, splits)
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=device)
    partial, found = out, sinks
    if splits > 1:
        partial = torch.empty(tokens, heads, splits, width, dtype=torch.float32, device=device)
        found = torch.empty(tokens, heads, splits, dtype=torch.float32, device=device)
    kernel[(tokens, head_blocks, splits)](
        q, positions.contiguous(), kv, recent.first.contiguous(), entries, table, rows, counts,
        sinks, partial, found, q.stride(0), q.stride(1), heads, recent.period, recent.window,
        table.shape[-1] if pages is not None and len(table) > 1 else 0, rows.shape[-1], splits,
        scale * _LOG2E,
        HEADS=block, D=width, D_PADDED=padded, TOKENS=step, RATE=rate,
        BLOCK=1 if pages is None else pages.block_size,
        PER_BLOCK=1 if pages is None else pages.rows_per_block, CHOSEN=chosen is not None,
        SPLIT=splits > 1, STAGES=cut.stages, num_warps=8 if many else 4, **overlapped(device),
    )  # fmt: skip
    if splits > 1:
        merge_shares(partial, found, out)
    return out
