"""Attention of prompts: one Triton kernel over pages, or over latents that were expanded. What it cannot take, the reference computes."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.cuda.launch import DTYPES
from quantkit_kernels.cuda.operators import rope
from quantkit_kernels.paged import Rotation
from quantkit_kernels.prompts import Prompts

_LOG2E = 1.4426950408889634
_EXPANDED_BYTES = 1 << 29
"""Of keys and values that are expanded at a time, whatever the length of the prompts."""


class Blocks(NamedTuple):
    """How a launch is cut: BLOCK_M queries, BLOCK_N keys; warps; stages of copies in flight."""

    m: int
    n: int
    warps: int
    stages: int


def gqa_prefill(q: Tensor, cache: tuple[Tensor, Tensor], prompts: Prompts, scale: float, window: int) -> Tensor:
    width, (keys, values) = q.shape[2], cache
    fits = q.dtype in DTYPES and keys.dtype == q.dtype and width % 8 == 0 and 16 <= width <= 256
    if not fits or q.numel() == 0 or not (keys.is_contiguous() and values.is_contiguous()):
        return reference.gqa_prefill(q, cache, prompts, scale, window)
    q = q.contiguous()
    out = torch.empty_like(q)
    rows = {"k_token": keys.stride(1), "k_head": width, "v_token": values.stride(1), "v_head": width}
    paged = {"table": prompts.block_table, "table_width": prompts.block_table.shape[1], "PAGE": keys.shape[1]}
    shared = q.shape[1] // keys.shape[2]
    _launch(q, keys, values, out, prompts, scale, width, window=window, SHARED=shared, V=width, **rows, **paged)
    return out


def mla_prefill(q: Tensor, kv_b: Tensor, rotation: Rotation, cache: Tensor, prompts: Prompts, scale: float) -> Tensor:
    rotary, heads = 2 * rotation.cos.shape[1], q.shape[1]
    nope, latent = q.shape[2] - rotary, kv_b.shape[2]
    value = kv_b.shape[1] - nope
    fits = q.dtype in DTYPES and cache.dtype == q.dtype and all(_power_of_two(one) and 16 <= one <= 128 for one in (nope, rotary, value))
    if not fits or q.numel() == 0 or not cache.is_contiguous():
        return reference.mla_prefill(q, kv_b, rotation, cache, prompts, scale)
    tokens = torch.arange(len(q), device=q.device)
    turned = rope(q[..., nope:], tokens, *rotation)
    parts = prompts.parts(cache.shape[1], _EXPANDED_BYTES // (kv_b.shape[0] * kv_b.shape[1] * q.element_size()))
    of_head = nope + value
    rows = {"k_token": heads * of_head, "k_head": of_head, "v_token": heads * of_head, "v_head": of_head}
    found = []
    for part in parts:
        cached = cache.view(-1, latent + rotary).index_select(0, part.slots)
        expanded = F.linear(cached[:, :latent], kv_b.flatten(0, 1))
        out = torch.empty(len(q), heads, value, dtype=q.dtype if len(parts) == 1 else torch.float32, device=q.device)
        lse = torch.empty(len(q), heads, dtype=torch.float32, device=q.device)
        pe = {"q_pe": turned, "k_pe": cached[:, latent:], "pe_token": heads * rotary, "k_pe_token": latent + rotary, "R": rotary}
        limits = {"firsts": part.firsts, "lasts": part.lasts, "key_rows": part.rows, "lse": lse}
        _launch(q, expanded, expanded[:, nope:], out, prompts, scale, nope, SHARED=1, V=value, **rows, **pe, **limits)
        found.append((out, lse))
    return _merged(found).to(q.dtype)


def _merged(found: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Results over parts of the keys as one, by their log-sum-exp."""
    (out, lse), *others = found
    for more, its in others:
        both = torch.logaddexp2(lse, its)
        seen = both.masked_fill(both == float("-inf"), 0.0)  # a sequence whose tokens are all in later parts has seen nothing yet
        out = out * (lse - seen).exp2_()[..., None] + more * (its - seen).exp2_()[..., None]
        lse = both
    return out


def _launch(q: Tensor, keys: Tensor, values: Tensor, out: Tensor, prompts: Prompts, scale: float, width: int, **given: Any) -> None:
    from quantkit_kernels.cuda.attention.prefill_kernel import attend_prompts

    names = ("q_pe", "k_pe", "lse", "table", "firsts", "lasts", "key_rows")
    pointers = {name: given.pop(name, prompts.starts) for name in names}
    numbers = {name: given.pop(name, 0) for name in ("pe_token", "k_pe_token", "table_width", "window")}
    rotary, page = given.pop("R", 0), given.pop("PAGE", 0)
    padded = {"D_PADDED": _padded(width), "V_PADDED": _padded(given["V"])}
    cut = blocks(padded["D_PADDED"] + rotary)
    grid = (-(-max(length for _, length in prompts.spans) // cut.m), q.shape[1], len(prompts.spans))
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
        BLOCK_M=cut.m,
        BLOCK_N=cut.n,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **pointers,
        **numbers,
        **given,
        **padded,
    )


def blocks(width: int) -> Blocks:
    """For keys of `width`: what was fastest on an H200 and fits its shared memory."""
    if width <= 128:
        return Blocks(128, 128, 8, 3)
    return Blocks(128, 64, 8, 3) if width <= 192 else Blocks(128, 64, 8, 2)


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _power_of_two(count: int) -> bool:
    return count & (count - 1) == 0
