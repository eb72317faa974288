"""Attention on a CPU. A decode step by the project's own C++ (gqa.cpp): pages are read where they
lie, in float32. Prompts by prompts.cpp, in float32 too, or in torch."""

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.codes import KeyValues
from quantkit_kernels.cpu.build import once
from quantkit_kernels.cpu.functional import READ, rms_norm, rotated
from quantkit_kernels.paged import Latents, Norms, PagedKeys, PagedLatents, Rotation
from quantkit_kernels.prompts import Prompts
from quantkit_kernels.reference import prompts as reference_prompts
from quantkit_kernels.reference.functional import AttentionSteps, absorbed, values

_KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
"""What gqa.cpp calls the types of keys and values."""


_STEPS = AttentionSteps(rms_norm, rotated)


def gqa_prepare(
    qkv: Tensor, norms: Norms | None, rotation: Rotation, cache: KeyValues, slots: Tensor
) -> Tensor:
    loaded, (keys, values), width = once("norm"), cache[:2], cache[0].shape[3]
    gains = (None, None) if norms is None else norms[:2]
    sides = (rotation.cos, rotation.sin)
    readable = (
        qkv.dtype in READ
        and keys.dtype == qkv.dtype
        and (gains[0] is None or gains[0].dtype == gains[1].dtype in READ)
        and all(side.is_contiguous() for side in sides)
    )
    if loaded is None or rotation.interleaved or not readable:
        return reference.gqa_prepare(qkv, norms, rotation, cache, slots, _STEPS)
    (rows, columns), kv_heads = qkv.shape, keys.shape[2]
    heads, given = columns // width - 2 * kv_heads, qkv.contiguous()
    q = torch.empty(rows, heads, width, dtype=qkv.dtype)
    operands = (given, *gains, *sides, slots.contiguous(), q, keys, values)
    halves = (one is not None and one.dtype == torch.bfloat16 for one in (qkv, gains[0]))
    sizes = (rows, heads, kv_heads, width, sides[0].shape[1], torch.get_num_threads())
    pointers = (None if one is None else one.data_ptr() for one in operands)
    loaded.qk_gqa_prepare(*pointers, *halves, *sizes, 0.0 if norms is None else norms.eps)
    return q


def gqa_decode(
    q: Tensor, pages: PagedKeys, scale: float, window: int, sinks: Tensor | None = None
) -> Tensor:
    keys, values, block_table, seq_lens = pages[:4]
    if (
        keys.dtype not in _KINDS
        or not all(side.is_contiguous() for side in pages.cache)
        or q.numel() == 0
    ):
        return reference.gqa_decode(q, pages, scale, window, sinks)
    (rows, heads, width), (block_size, kv_heads) = q.shape, keys.shape[1:3]
    half = q.dtype == torch.bfloat16
    queries = (q if half else q.float()).contiguous()
    table, seen = block_table.int().contiguous(), seq_lens.long().contiguous()
    out = torch.empty(rows, heads, width, dtype=queries.dtype)
    sizes = (
        rows,
        kv_heads,
        heads // kv_heads,
        width,
        block_size,
        table.shape[1],
        window,
        torch.get_num_threads(),
    )
    extra = None if sinks is None else sinks.contiguous()
    operands = (queries, keys, values, table, seen, extra, out, *(pages.scales or (None, None)))
    loaded = once("gqa")
    assert loaded is not None, "it was there when the backend was chosen"
    loaded.qk_gqa_decode(
        *(None if one is None else one.data_ptr() for one in operands),
        half,
        _KINDS[keys.dtype],
        *sizes,
        scale,
    )
    return out.to(q.dtype)


def mla_decode(
    q: Tensor, kv_b: Tensor, rotation: Rotation, pages: PagedLatents, scale: float
) -> Tensor:
    """Latents are keys, and values, of one head that all queries share. Codes of latents, whose
    keys are not, are torch's."""
    cache, nope = pages.cache, q.shape[2] - 2 * rotation.cos.shape[1]
    if not isinstance(cache, Tensor) or cache.dtype not in _KINDS:
        return reference.mla_decode(q, kv_b, rotation, pages, scale)
    query = torch.cat([absorbed(q[..., :nope], kv_b), rotated(q[..., nope:], rotation)], dim=-1)
    shared = cache.unsqueeze(2)
    attended = gqa_decode(
        query, PagedKeys(shared, shared, pages.block_table, pages.seq_lens), scale, 0
    )
    return values(attended[..., : kv_b.shape[2]], kv_b, nope)


def gqa_prefill(
    q: Tensor,
    cache: KeyValues,
    prompts: Prompts,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    return reference_prompts.gqa_prefill(q, cache, prompts, scale, window, sinks, _attend_blocks)


def mla_prefill(
    q: Tensor, kv_b: Tensor, rotation: Rotation, cache: Latents, prompts: Prompts, scale: float
) -> Tensor:
    q_pe = rotated(q[..., q.shape[2] - 2 * rotation.cos.shape[1] :], rotation)
    return reference_prompts.attend_expanded(
        q, q_pe, kv_b, cache, prompts, scale, rotation.interleaved, _attend_blocks
    )


def _attend_blocks(
    q: Tensor,
    slots: Tensor,
    width: int,
    expand: reference_prompts.Expand,
    scale: float,
    window: int,
) -> Tensor:
    """As `plain.attend_one`."""
    loaded = once("prompts")
    if loaded is None:
        return reference_prompts.attend_one(q, slots, width, expand, scale, window)
    (new, heads, depth), seen = q.shape, len(slots)
    queries = (q.float() * scale).contiguous()
    best, total, out = (
        torch.full((new, heads), float("-inf")),
        torch.zeros(new, heads),
        torch.zeros(new, heads, width),
    )
    earliest = max(0, seen - new + 1 - window) if window else 0
    for first in range(earliest, seen, reference_prompts.AT_ONCE):
        k, v = (
            side.float().contiguous()
            for side in expand(slots[first : first + reference_prompts.AT_ONCE])
        )
        operands = (queries, k, v, best, total, out)
        sizes = (
            new,
            seen - new - first,
            len(k),
            k.shape[1],
            heads // k.shape[1],
            depth,
            width,
            window,
            torch.get_num_threads(),
        )
        loaded.qk_prompt_attend(*(one.data_ptr() for one in operands), *sizes)
    return out.div_(total[..., None]).to(q.dtype)
