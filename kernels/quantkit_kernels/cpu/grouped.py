"""Attention on a CPU. Grouped queries of a decode step by the project's own C++ (gqa.cpp): pages are read where they lie, in float32.
Prompts by the blocks that calibration uses, in torch."""

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.codes import KeyValues
from quantkit_kernels.cpu.build import library
from quantkit_kernels.latents import Latents
from quantkit_kernels.paged import PagedKeys, Rotation
from quantkit_kernels.prompts import Prompts
from quantkit_kernels.reference import prompts as plain
from quantkit_kernels.reference.functional import turned

_KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
"""What gqa.cpp calls the types of keys and values."""


def gqa_decode(q: Tensor, pages: PagedKeys, scale: float, window: int, sinks: Tensor | None = None) -> Tensor:
    keys, values, block_table, seq_lens = pages[:4]
    if keys.dtype not in _KINDS or not all(side.is_contiguous() for side in pages.cache) or q.numel() == 0:
        return reference.gqa_decode(q, pages, scale, window, sinks)
    (rows, heads, width), (block_size, kv_heads) = q.shape, keys.shape[1:3]
    queries, table, seen = (q.float() * scale).contiguous(), block_table.int().contiguous(), seq_lens.int().contiguous()
    out = torch.empty(rows, heads, width)
    sizes = (rows, kv_heads, heads // kv_heads, width, block_size, table.shape[1], window, torch.get_num_threads())
    extra = None if sinks is None else sinks.contiguous()
    operands = (queries, keys, values, table, seen, extra, out, *(pages.scales or (None, None)))
    library("gqa").qk_gqa_decode(*(None if one is None else one.data_ptr() for one in operands), _KINDS[keys.dtype], *sizes)
    return out.to(q.dtype)


def gqa_prefill(q: Tensor, cache: KeyValues, prompts: Prompts, scale: float, window: int, sinks: Tensor | None = None) -> Tensor:
    return plain.gqa_prefill(q, cache, prompts, scale, window, sinks, _attend_whole)


def mla_prefill(q: Tensor, kv_b: Tensor, rotation: Rotation, cache: Latents, prompts: Prompts, scale: float) -> Tensor:
    q_pe = turned(q[..., -2 * rotation.cos.shape[1] :], rotation)
    return plain.attend_expanded(q, q_pe, kv_b, cache, prompts, scale, rotation.interleaved, _attend_whole)


def _attend_whole(q: Tensor, slots: Tensor, width: int, expand: plain.Expand, scale: float, window: int) -> Tensor:
    """As `plain.attend_one`, where the keys are few: whole, with some queries at a time."""
    if window or len(slots) > plain.AT_ONCE:
        return plain.attend_one(q, slots, width, expand, scale, window)
    k, v = (side.to(q.dtype) for side in expand(slots))
    return plain.attend_by_blocks(q, k, v, scale)
