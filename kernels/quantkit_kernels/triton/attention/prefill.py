"""Attention of prompts: one Triton kernel over pages, or over latents that were expanded, and one
for Hopper (wgmma.py). What neither can take, the reference computes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.codes import CodedKeys, CodedLatents, KeyValues, decode
from quantkit_kernels.indexer import TopTokens
from quantkit_kernels.paged import Latents, Rotation, by_slot, entries, parts_of
from quantkit_kernels.prompts import PromptPart, Prompts
from quantkit_kernels.triton.attention.wgmma import attend, wgmma_cut
from quantkit_kernels.triton.cards import prefill_cut
from quantkit_kernels.triton.indexer import selected_bits
from quantkit_kernels.triton.operators import rope
from quantkit_kernels.triton.rows import power_of_two

_LOG2E = 1.4426950408889634
_EXPANDED_BYTES = 1 << 30
"""Of keys and values that are expanded at a time, whatever the length of the prompts."""

_HALF = (torch.bfloat16, torch.float16)
Rope = Callable[[Tensor, Tensor, Tensor, Tensor, bool], Tensor]


def gqa_prefill(
    q: Tensor,
    cache: KeyValues,
    prompts: Prompts,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    width, (keys, values) = q.shape[2], cache[:2]
    typed = isinstance(cache, CodedKeys) or keys.dtype == q.dtype
    fits = typed and q.dtype in _HALF and width % 8 == 0 and 16 <= width <= 256
    fits = fits and (sinks is None or not isinstance(cache, CodedKeys))
    if not fits or q.numel() == 0 or not all(side.is_contiguous() for side in cache):
        return reference.gqa_prefill(q, cache, prompts, scale, window, sinks)
    q = q.contiguous()
    if isinstance(cache, CodedKeys):
        return _prefill_codes(q, cache, prompts, scale, window)
    out = torch.empty_like(q)
    rows = {
        "k_token": keys.stride(1),
        "k_head": width,
        "v_token": values.stride(1),
        "v_head": width,
    }
    paged = {
        "table": prompts.block_table,
        "table_width": prompts.block_table.shape[1],
        "PAGE": keys.shape[1],
    }
    shared, sunk = q.shape[1] // keys.shape[2], {} if sinks is None else {"sinks": sinks}
    _launch(
        q,
        keys,
        values,
        out,
        prompts,
        scale,
        width,
        window=window,
        SHARED=shared,
        V=width,
        **rows,
        **paged,
        **sunk,
    )
    return out


def _prefill_codes(
    q: Tensor, cache: CodedKeys, prompts: Prompts, scale: float, window: int
) -> Tensor:
    """Over keys and values that are decoded to q's dtype first, some tokens at a time."""
    heads, width = cache.keys.shape[2:]
    flat = CodedKeys(*(side.flatten(0, 1) for side in cache))
    rows = {"k_token": heads * width, "k_head": width, "v_token": heads * width, "v_head": width}

    def attend(part: PromptPart, out: Tensor, lse: Tensor) -> None:
        sides = ((flat.keys, flat.key_scales), (flat.values, flat.value_scales))
        keys, values = (
            decode(codes[part.slots], scales[part.slots]).to(q.dtype) for codes, scales in sides
        )
        shared = q.shape[1] // heads
        _launch(
            q,
            keys,
            values,
            out,
            prompts,
            scale,
            width,
            window=window,
            SHARED=shared,
            V=width,
            **rows,
            **_limits(part, lse),
        )

    return _in_parts(
        q,
        width,
        prompts.parts(
            cache.keys.shape[1], _EXPANDED_BYTES // (2 * heads * width * q.element_size())
        ),
        attend,
    )


def mla_prefill(
    q: Tensor,
    kv_b: Tensor,
    rotation: Rotation,
    cache: Latents,
    prompts: Prompts,
    scale: float,
    selected: TopTokens | None = None,
    rope: Rope = rope,
) -> Tensor:
    """rope: another backend's, where it has one."""
    rotary, heads = 2 * rotation.cos.shape[1], q.shape[1]
    nope, latent = q.shape[2] - rotary, kv_b.shape[2]
    value = kv_b.shape[1] - nope
    typed = q.dtype in _HALF and (
        isinstance(cache, CodedLatents) or parts_of(cache)[0].dtype == q.dtype
    )
    fits = typed and (
        all(power_of_two(one) == one and 16 <= one <= 128 for one in (nope, rotary, value))
        if rotary
        else all(one % 8 == 0 and 16 <= one <= 256 for one in (nope, value))
    )
    if not fits or q.numel() == 0 or not all(part.is_contiguous() for part in parts_of(cache)):
        return reference.mla_prefill(q, kv_b, rotation, cache, prompts, scale)
    words = {}
    if selected is not None:
        seen = max(start + length for start, length in prompts.spans)
        bits = selected_bits(selected, seen)
        words = {"words": bits, "word_row": bits.shape[1]}
    tokens = torch.arange(len(q), device=q.device)
    rotated = rope(q[..., nope:], tokens, *rotation) if rotary else q[..., nope:]
    flat, of_head = by_slot(cache), nope + value
    rows = {
        "k_token": heads * of_head,
        "k_head": of_head,
        "v_token": heads * of_head,
        "v_head": of_head,
    }

    def attend(part: PromptPart, out: Tensor, lse: Tensor) -> None:
        cached = entries(flat, part.slots).to(q.dtype)
        expanded = F.linear(cached[:, :latent], kv_b.flatten(0, 1))
        pe = {
            "q_pe": rotated,
            "k_pe": cached[:, latent:],
            "pe_token": heads * rotary,
            "k_pe_token": latent + rotary,
            "R": rotary,
        }
        _launch(
            q,
            expanded,
            expanded[:, nope:],
            out,
            prompts,
            scale,
            nope,
            SHARED=1,
            V=value,
            **rows,
            **pe,
            **words,
            **_limits(part, lse),
        )

    parts = prompts.parts(parts_of(cache)[0].shape[1], _room(q, kv_b))
    return _in_parts(q, value, parts, attend)


def takes_selected(q: Tensor, kv_b: Tensor, rotary: int, cached: int) -> bool:
    """Whether `mla_prefill` reads a selection: on Hopper, over keys in blocks of 128, of as many
    tokens as are expanded at once."""
    nope = q.shape[2] - rotary
    sizes = (nope, rotary, kv_b.shape[1] - nope)
    fits = all(power_of_two(one) == one and 16 <= one <= 128 for one in sizes)
    if q.dtype not in _HALF or not fits or cached > _room(q, kv_b):
        return False
    cut = wgmma_cut(q.device, *sizes, 0, 0)
    return cut is not None and cut.keys == 128


def _room(q: Tensor, kv_b: Tensor) -> int:
    """Tokens whose latents are expanded at a time."""
    return _EXPANDED_BYTES // (kv_b.shape[0] * kv_b.shape[1] * q.element_size())


def _in_parts(
    q: Tensor,
    width: int,
    parts: list[PromptPart],
    attend: Callable[[PromptPart, Tensor, Tensor], None],
) -> Tensor:
    """q [T, heads, ..] over all parts of the keys -> [T, heads, width] of q's dtype. attend: fills
    a part's result, in float32 where there are several, and its log-sum-exp [T, heads]."""
    found = []
    for part in parts:
        out = torch.empty(
            *q.shape[:2],
            width,
            dtype=q.dtype if len(parts) == 1 else torch.float32,
            device=q.device,
        )
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        attend(part, out, lse)
        found.append((out, lse))
    return _merged(found).to(q.dtype)


def _limits(part: PromptPart, lse: Tensor) -> dict[str, Tensor]:
    return {"firsts": part.firsts, "lasts": part.lasts, "key_rows": part.rows, "lse": lse}


def _merged(found: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Results over parts of the keys as one, by their log-sum-exp."""
    (out, lse), *others = found
    for more, its in others:
        both = torch.logaddexp2(lse, its)
        seen = both.masked_fill(
            both == float("-inf"), 0.0
        )  # a sequence whose tokens are all in later parts has seen nothing yet
        out = out * (lse - seen).exp2_()[..., None] + more * (its - seen).exp2_()[..., None]
        lse = both
    return out


def _launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    prompts: Prompts,
    scale: float,
    width: int,
    **given: Any,
) -> None:
    sunk = "sinks" in given
    selection = {"words": given.pop("words", prompts.starts), "word_row": given.pop("word_row", 0)}
    names = ("q_pe", "k_pe", "sinks", "lse", "table", "firsts", "lasts", "key_rows")
    pointers = {name: given.pop(name, prompts.starts) for name in names}
    numbers = {
        name: given.pop(name, 0) for name in ("pe_token", "k_pe_token", "table_width", "window")
    }
    rotary, page = given.pop("R", 0), given.pop("PAGE", 0)
    padded = {
        "D_PADDED": power_of_two(max(16, width)),
        "V_PADDED": power_of_two(max(16, given["V"])),
    }
    by_wgmma = wgmma_cut(
        q.device, padded["D_PADDED"], rotary, padded["V_PADDED"], page, numbers["window"]
    )
    if by_wgmma is not None:
        launched = {
            **pointers,
            **numbers,
            **given,
            **padded,
            **selection,
            "R": rotary,
            "PAGE": page,
            "SUNK": sunk,
        }
        attend(q, keys, values, out, prompts, scale * _LOG2E, width, by_wgmma, **launched)
        return
    from quantkit_kernels.triton.attention.prefill_kernel import attend_prompts

    cut = prefill_cut(q.device, padded["D_PADDED"] + rotary)
    grid = (-(-prompts.longest // cut.queries), q.shape[1], len(prompts.spans))
    attend_prompts[grid](
        q=q,
        keys=keys,
        values=values,
        out=out,
        starts=prompts.starts,
        seq_lens=prompts.seq_lens,
        q_token=q.stride(0),
        q_head=q.stride(1),
        heads=q.shape[1],
        scale=scale * _LOG2E,
        D=width,
        R=rotary,
        PAGE=page,
        WINDOWED=numbers["window"] > 0,
        SUNK=sunk,
        BLOCK_M=cut.queries,
        BLOCK_N=cut.keys,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **pointers,
        **numbers,
        **given,
        **padded,
    )
