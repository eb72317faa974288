"""Grouped-query attention of a decode step: gqa_prepare.cu, and gqa_decode.cu or its like for
codes. Unusual types and widths the Triton backend or the reference computes.

No launch depends on the sequences' lengths, which a captured step finds on the device.
"""

import ctypes
import functools

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.codes import CodedKeys, KeyValues
from quantkit_kernels.cuda.abi import GqaDecode, GqaPrepare
from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.launch import CODES, DTYPES, checked, stream_of
from quantkit_kernels.paged import Norms, PagedKeys, Rotation
from quantkit_kernels.triton import operators as triton
from quantkit_kernels.triton.attention.decode import gqa_decode as decode_by_triton
from quantkit_kernels.workspace import workspace

_HEADS = 16
"""The most heads of a unit (kHeads of gqa_schedule.cuh), which all share keys."""
_TILE = 64
"""Tokens of a tile (kTile)."""
_LEAST_TILES = 2
"""The fewest tiles of a block's share: to merge one more part costs about as much as reading two
tiles."""
_FEW_ROWS, _SHORT = 8, 1024
"""Rows, and tokens of the tables."""
_MOST_ROWS, _MOST_UNITS = 1024, 1 << 16


def gqa_prepare(
    qkv: Tensor, norms: Norms | None, rotation: Rotation, cache: KeyValues, slots: Tensor
) -> Tensor:
    kv_heads, width = cache[0].shape[2:]
    tokens, heads = qkv.shape[0], qkv.shape[1] // width - 2 * kv_heads
    gains = (None, None) if norms is None else (norms.q, norms.k)
    floats = () if isinstance(cache, CodedKeys) else cache
    alike = (
        all(one is None or one.dtype == qkv.dtype for one in (*gains, *floats))
        and qkv.dtype in DTYPES
    )
    if not alike or width % 8 or tokens == 0:
        return triton.gqa_prepare(qkv, norms, rotation, cache, slots)
    q = torch.empty(tokens, heads, width, dtype=qkv.dtype, device=qkv.device)
    tensors = [
        None if one is None else one.contiguous()
        for one in (qkv, *gains, rotation.cos, rotation.sin, slots)
    ]
    scales = cache.scales if isinstance(cache, CodedKeys) else (None, None)
    pointers = [
        None if one is None else one.data_ptr() for one in (*tensors, q, *cache[:2], *scales)
    ]
    sizes = (tokens, heads, kv_heads, width, 2 * rotation.cos.shape[1])
    params = GqaPrepare(
        *pointers, *sizes, rotation.interleaved, 0.0 if norms is None else norms.eps
    )
    how = (DTYPES[qkv.dtype], stream_of(qkv.device))
    if isinstance(cache, CodedKeys):
        checked(
            library().qk_gqa_prepare_codes(
                ctypes.byref(params), how[0], CODES[cache.keys.dtype], how[1]
            )
        )
    else:
        checked(library().qk_gqa_prepare(ctypes.byref(params), *how))
    return q


def gqa_decode(q: Tensor, pages: PagedKeys, scale: float, window: int) -> Tensor:
    keys, values, block_table, seq_lens = pages[:4]
    (rows, heads, width), (block_size, kv_heads) = q.shape, keys.shape[1:3]
    units = rows * kv_heads * -(-(heads // kv_heads) // _HEADS)
    typed = width % 8 == 0 if keys.dtype == q.dtype else keys.dtype in CODES and width % 16 == 0
    fits = (
        typed and q.dtype in DTYPES and width <= 256 and rows <= _MOST_ROWS and units <= _MOST_UNITS
    )
    fits = fits and all(side.is_contiguous() for side in pages.cache)
    if not fits or q.numel() == 0:
        return reference.gqa_decode(q, pages, scale, window)
    if keys.dtype == q.dtype and rows <= _FEW_ROWS and _is_faster_in_triton(width, pages):
        return decode_by_triton(q, pages, scale, window)
    q, table, seq_lens = q.contiguous(), block_table.contiguous(), seq_lens.contiguous()
    out = torch.empty_like(q)
    most_tiles = units * -(-block_table.shape[1] * block_size // _TILE)
    blocks = max(1, min(_blocks(width, q.device), most_tiles // _LEAST_TILES))
    partial, arrived = workspace(q.device, blocks * 2 * _HEADS * (width + 2))
    scales = (None, None) if pages.scales is None else tuple(one.data_ptr() for one in pages.scales)
    params = GqaDecode(
        *(one.data_ptr() for one in (q, keys, values)),
        *scales,
        *(one.data_ptr() for one in (table, seq_lens, out, partial, arrived)),
        *(table.element_size() // 4, seq_lens.element_size() // 4, table.shape[1], block_size),
        *(
            rows,
            kv_heads,
            heads // kv_heads,
            width,
            window,
            blocks,
            _LEAST_TILES,
            scale * 1.4426950408889634,
        ),
    )
    functions = {
        torch.int8: library().qk_gqa_decode_int8,
        torch.float8_e4m3fn: library().qk_gqa_decode_fp8,
    }
    decode = functions.get(keys.dtype, library().qk_gqa_decode)
    checked(decode(ctypes.byref(params), DTYPES[q.dtype], stream_of(q.device)))
    return out


def _is_faster_in_triton(width: int, pages: PagedKeys) -> bool:
    """Of few rows, where merging a block's parts costs more than a second launch: on an H200 10.5
    us for 15.5 with heads of 256 and 900 tokens, 18.3 for 27.8 with 8192; 5.9 for 8.0 with heads of
    64 and 900 tokens."""
    most = pages.block_table.shape[1] * pages.keys.shape[1]
    return width > 192 or (width <= 64 and most <= _SHORT)


@functools.cache
def _blocks(width: int, device: torch.device) -> int:
    """As many as the device holds at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count * (
        2 if width <= 128 else 1
    )
