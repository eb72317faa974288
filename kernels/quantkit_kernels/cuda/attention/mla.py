"""Latent attention of a decode step: mla_prepare.cu, and mla_decode.cu at DeepSeek-V3's sizes. Other sizes the reference computes.

No launch depends on the sequences' lengths, which a captured step finds on the device.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.launch import DTYPES, checked, stream_of

_LATENT, _ROPE, _NOPE, _VALUE = 512, 64, 128, 128
_TILE = 32  # tokens that a block takes at a time
_MOST_SPLITS = 256


def mla_prepare(
    qkv_a: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    eps: float,
    interleaved: bool,
) -> Tensor:
    tokens, q_lora, kv_lora, rope = qkv_a.shape[0], q_norm.shape[0], kv_norm.shape[0], 2 * cos.shape[1]
    alike = qkv_a.dtype == q_norm.dtype == kv_norm.dtype == cache.dtype and qkv_a.dtype in DTYPES
    if not alike or q_lora % 8 or kv_lora % 8 or rope % 8 or tokens == 0:
        return reference.mla_prepare(qkv_a, q_norm, kv_norm, cos, sin, cache, slots, eps, interleaved)
    q_a = torch.empty(tokens, q_lora, dtype=qkv_a.dtype, device=qkv_a.device)
    tensors = (
        qkv_a.contiguous(),
        q_norm.contiguous(),
        kv_norm.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        slots.contiguous(),
        q_a,
        cache,
    )
    sizes = (DTYPES[qkv_a.dtype], tokens, q_lora, kv_lora, rope, interleaved, eps)
    checked(library().qk_mla_prepare(*(tensor.data_ptr() for tensor in tensors), *sizes, stream_of(qkv_a.device)))
    return q_a


def mla_decode(
    q: Tensor,
    kv_b: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    interleaved: bool,
    lengths: Sequence[int] | None,
) -> Tensor:
    rows, heads, width = q.shape
    rope = 2 * cos.shape[1]
    sizes = (width - rope, rope, kv_b.shape[1] - (width - rope), kv_b.shape[2])
    fits = sizes == (_NOPE, _ROPE, _VALUE, _LATENT) and q.dtype in DTYPES and cache.dtype == q.dtype
    if not fits or q.numel() == 0 or not cache.is_contiguous():
        return reference.mla_decode(q, kv_b, cos, sin, cache, block_table, seq_lens, scale, interleaved, lengths)
    block_size, table_width = cache.shape[1], block_table.shape[1]
    splits = _splits(rows, heads, table_width * block_size, q.device)
    absorbed = torch.empty(rows, heads, _LATENT + _ROPE, dtype=q.dtype, device=q.device)
    weighted = torch.empty(rows, heads, splits, _LATENT, dtype=torch.float32, device=q.device)
    found = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, heads, _VALUE, dtype=q.dtype, device=q.device)
    operands = [tensor.contiguous() for tensor in (q, kv_b, cos, sin)]
    table, seq_lens = block_table.contiguous(), seq_lens.contiguous()
    checked(
        library().qk_mla_decode(
            *(tensor.data_ptr() for tensor in operands),
            *(cache.data_ptr(), table.data_ptr(), table.element_size() // 4, table_width),
            *(seq_lens.data_ptr(), seq_lens.element_size() // 4),
            *(tensor.data_ptr() for tensor in (absorbed, weighted, found, out)),
            *(DTYPES[q.dtype], rows, heads, block_size, splits, interleaved, scale, stream_of(q.device)),
        )
    )
    return out


def _splits(rows: int, heads: int, slots: int, device: torch.device) -> int:
    """Into how many parts each row's tokens are divided: as many as fill the device once, none without work in the longest row."""
    blocks = rows * -(-heads // 32)
    return max(1, min(_multiprocessors(device) // blocks, -(-slots // _TILE), _MOST_SPLITS))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
