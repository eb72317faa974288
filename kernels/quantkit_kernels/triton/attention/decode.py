"""Attention of a decode step. What the kernel cannot take, float32 queries above all, the reference
computes."""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.paged import PagedKeys, PagedLatents, Rotation, parts_of
from quantkit_kernels.reference.functional import absorbed, values
from quantkit_kernels.triton.attention.heads import heads_by_kernel, multiply_heads
from quantkit_kernels.triton.cards import DecodeCut, decode_cut, multiprocessors, overlapped
from quantkit_kernels.triton.operators import codes_of, key_sides, latent_parts
from quantkit_kernels.triton.rows import power_of_two

_LOG2E = 1.4426950408889634
_HALF = (torch.bfloat16, torch.float16)
_MOST_SPLITS = 128
_HEADS, _FEW_HEADS = 32, 16
"""Of a program that attends to latents, which all its heads read."""
_LARGE, _FEW_CUT = 128, DecodeCut(16, 4, 2, least=1)
"""The tokens of a large program, and how small ones are launched: the fastest of ten on an H200."""
_AT_ONCE, _COLUMNS = 32, 128
"""Shares that the second launch has in registers, and columns of a program."""
_SHARES, _LATENT_AT_ONCE, _LATENT_COLUMNS = 16, 64, 64
"""The same of latents cut in so many shares or more, which have few rows: more programs, and all of
their loads at once."""


class RotaryQueries(NamedTuple):
    """The rotary part of queries, not yet rotated: [rows, heads, R]."""

    pe: Tensor
    rotation: Rotation


class Cached(NamedTuple):
    """What the kernel reads of a cache: keys and values [blocks, page, kv_heads, D], rotary keys
    [blocks, page, R] where a latent has them, scales [blocks, page, kv_heads] of codes."""

    keys: Tensor
    values: Tensor
    k_pe: Tensor
    key_scales: Tensor
    value_scales: Tensor
    codes: int


def gqa_decode(
    q: Tensor, pages: PagedKeys, scale: float, window: int, sinks: Tensor | None = None
) -> Tensor:
    keys, codes = pages.keys, codes_of(pages.cache)
    fits = (
        q.dtype in _HALF
        and (keys.dtype == q.dtype or codes > 0)
        and all(side.is_contiguous() for side in pages.cache)
    )
    if not fits or q.shape[2] > 256 or q.numel() == 0:
        return reference.gqa_decode(q, pages, scale, window, sinks)
    sides = key_sides(pages.cache)
    shared = q.shape[1] // keys.shape[2]
    heads = min(64, max(16, power_of_two(shared)))
    cached = Cached(sides[0], sides[1], q, sides[2], sides[3], codes)
    return _attend(q.contiguous(), cached, pages, scale, window, shared, heads, sinks=sinks)


def mla_decode(
    q: Tensor, kv_b: Tensor, rotation: Rotation, pages: PagedLatents, scale: float
) -> Tensor:
    heads, width, rotary, cache = *q.shape[1:], 2 * rotation.cos.shape[1], pages.cache
    nope, codes = width - rotary, codes_of(cache)
    typed = parts_of(cache)[-2 if codes else 0].dtype == q.dtype and all(
        part.is_contiguous() for part in parts_of(cache)
    )
    if (
        q.dtype not in _HALF
        or not typed
        or (rotary and (power_of_two(rotary) != rotary or rotary < 16))
        or q.numel() == 0
    ):
        return reference.mla_decode(q, kv_b, rotation, pages, scale)
    latents, k_pe, scales = latent_parts(cache, kv_b.shape[2])
    q, one_head = q.contiguous(), latents.unsqueeze(2)
    unrotated = RotaryQueries(
        q[..., nope:],
        Rotation(rotation.cos.contiguous(), rotation.sin.contiguous(), rotation.interleaved),
    )
    cached = Cached(one_head, one_head, k_pe, scales.unsqueeze(2), scales.unsqueeze(2), codes)
    block, cut = _latent_cut(q, pages)
    by_torch = not heads_by_kernel(len(q), kv_b)
    query = (
        absorbed(q[..., :nope], kv_b)
        if by_torch
        else multiply_heads(q[..., :nope], kv_b[:, :nope], across=False)
    )
    attended = _attend(query, cached, pages, scale, 0, heads, block, unrotated, cut=cut)
    return (
        values(attended, kv_b, nope)
        if by_torch
        else multiply_heads(attended, kv_b[:, nope:], across=True)
    )


def _latent_cut(q: Tensor, pages: PagedLatents) -> tuple[int, DecodeCut | None]:
    """Heads of a program, and how many tokens it takes at a time; None: as `decode_cut` says. Where
    large programs would leave most of the device without work, as with one row of a short context,
    they are made small."""
    rows, heads = q.shape[:2]
    most = pages.block_table.shape[1] * parts_of(pages.cache)[0].shape[1]
    programs = rows * -(-heads // _HEADS) * -(-most // _LARGE)
    if programs <= multiprocessors(q.device):
        return _FEW_HEADS, _FEW_CUT
    return min(_HEADS, power_of_two(max(_FEW_HEADS, heads))), None


def _attend(
    q: Tensor,
    cached: Cached,
    pages: PagedKeys | PagedLatents,
    scale: float,
    window: int,
    shared: int,
    block: int,
    unrotated: RotaryQueries | None = None,
    sinks: Tensor | None = None,
    cut: DecodeCut | None = None,
) -> Tensor:
    """q [rows, heads, D], its last dimension without gaps -> [rows, heads, D]. block: heads of a
    program; cut: if not the card's."""
    from quantkit_kernels.triton.attention.decode_kernel import attend_cached

    (rows, heads, width), keys = q.shape, cached.keys
    page, kv_heads = keys.shape[1:3]
    pe, (cos, sin, interleaved) = unrotated or RotaryQueries(
        q[..., :0], Rotation(q.new_empty(0), q.new_empty(0), False)
    )
    rotary = pe.shape[2]
    padded = power_of_two(max(16, width))
    table, lengths = pages.block_table.contiguous(), pages.seq_lens.contiguous()
    how, cut = (
        overlapped(q.device),
        cut or decode_cut(q.device, block, padded + rotary, latent=unrotated is not None),
    )
    head_blocks = kv_heads * -(-shared // block)
    most = table.shape[1] * page if not window else window + cut.tokens
    splits = max(
        1,
        min(
            2 * multiprocessors(q.device) // (rows * head_blocks),
            -(-most // (cut.least * cut.tokens)),
            _MOST_SPLITS,
        ),
    )
    out = torch.empty(rows, heads, width, dtype=q.dtype, device=q.device)
    partial, found = out, out
    if splits > 1:
        partial = torch.empty(rows, heads, splits, width, dtype=torch.float32, device=q.device)
        found = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    attend_cached[(rows, head_blocks, splits)](
        q, pe, cos, sin, *cached[:5], found if sinks is None else sinks, table, lengths, partial,
        found,
        q.stride(0), q.stride(1), pe.stride(0), pe.stride(1), table.shape[1], heads,
        keys.stride(1), width, cached.k_pe.stride(1), kv_heads,
        splits, scale * _LOG2E, window,
        SHARED=shared, HEADS=block, D=width, D_PADDED=padded, R=rotary, PAGE=page,
        LATENT=unrotated is not None, TOKENS=cut.tokens, INTERLEAVED=interleaved,
        WINDOWED=window > 0, SUNK=sinks is not None, SPLIT=splits > 1, CODES=cached.codes,
        STAGES=cut.stages, num_warps=cut.warps, **how,
    )  # fmt: skip
    if splits > 1:
        merge_shares(partial, found, out, many=unrotated is not None)
    return out


def merge_shares(partial: Tensor, found: Tensor, out: Tensor, many: bool = True) -> None:
    """Write to out [rows, heads, D] the attention of shares partial float32 [rows, heads, splits,
    D], by the logarithms to base 2 of their sums [rows, heads, splits]. many: more programs where
    there are many shares."""
    from quantkit_kernels.triton.attention.decode_kernel import merge

    (rows, heads, splits), width = found.shape, out.shape[2]
    shares = power_of_two(splits)
    at_once, columns = (
        (_LATENT_AT_ONCE, _LATENT_COLUMNS) if many and shares >= _SHARES else (_AT_ONCE, _COLUMNS)
    )
    columns = min(columns, power_of_two(max(16, width)))
    merge[(rows * heads, -(-width // columns))](
        partial, found, out, splits,
        D=width, COLUMNS=columns, SPLITS=shares, AT_ONCE=min(at_once, shares),
        **overlapped(out.device),
    )  # fmt: skip
