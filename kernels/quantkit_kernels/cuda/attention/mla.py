"""Latent attention of a decode step: mla_prepare.cu, or mla_queries.cu, and mla_decode.cu or
mla_decode_codes.cu at DeepSeek-V3's sizes. Other sizes Triton computes.

No launch depends on the sequences' lengths, which a captured step finds on the device.
"""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.codes import CodedLatents
from quantkit_kernels.cuda.abi import MlaCodes, MlaCodesOut, MlaDecode, MlaPrepare
from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.launch import CODES, DTYPES, FORMATS, checked, stream_of
from quantkit_kernels.cuda.linears.linear import CudaLinear
from quantkit_kernels.cuda.operators import rope as rope_of
from quantkit_kernels.cuda.plans import CLUSTERS_AT_ONCE, TokensInSharedPlan, linear_plan
from quantkit_kernels.paged import Latents, Norms, PagedLatents, Rotation, parts_of
from quantkit_kernels.triton.attention import decode

_LATENT, _ROPE, _NOPE, _VALUE = 512, 64, 128, 128
_TILE = 32
"""Tokens by which a row is shared out over blocks (kTile)."""
_CODE_TILE = 64
"""And of a cache in 8 bits (kCodeTile)."""
_MOST_SPLITS = 256
_MANY_ROWS = 128
"""From which on products with W_UK and W_UV are the vendor's library's, as of prompts over selected
tokens: of 128 rows of 128 heads the launches of few rows take 31 and 162 us on an H200."""
_MOST_QUERIES, _MOST_NORMED = 16, 2048
"""Rows and their widths of mla_queries.cu."""


def mla_prepare(
    qkv_a: Tensor, norms: Norms, rotation: Rotation, cache: Latents, slots: Tensor
) -> Tensor:
    if not _preparable(qkv_a, norms, rotation, cache):
        return reference.mla_prepare(qkv_a, norms, rotation, cache, slots)
    q_a = torch.empty(qkv_a.shape[0], norms.q.shape[0], dtype=qkv_a.dtype, device=qkv_a.device)
    tensors = _operands(qkv_a, norms, rotation, slots)
    params = _prepare_params(tensors, q_a, norms, rotation, cache)
    how = (DTYPES[qkv_a.dtype], stream_of(qkv_a.device))
    if isinstance(cache, CodedLatents):
        to = MlaCodesOut(*(part.data_ptr() for part in cache))
        checked(
            library().qk_mla_prepare_codes(
                ctypes.byref(params), ctypes.byref(to), how[0], CODES[cache.codes.dtype], how[1]
            )
        )
    else:
        checked(library().qk_mla_prepare(ctypes.byref(params), *how))
    return q_a


def mla_queries(
    qkv_a: Tensor,
    norms: Norms,
    rotation: Rotation,
    cache: Latents,
    slots: Tensor,
    q_b: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """`q_b` of `mla_prepare`, to the last bit, in one launch (mla_queries.cu); None where they are
    two."""
    rows, (q_lora, kv_lora) = qkv_a.shape[0], (norms.q.shape[0], norms.k.shape[0])
    if (
        not isinstance(q_b, CudaLinear)
        or not isinstance(cache, Tensor)
        or not _preparable(qkv_a, norms, rotation, cache)
    ):
        return None
    fits = (
        q_b.in_features == q_lora
        and q_b.dtype == qkv_a.dtype
        and q_lora <= _MOST_NORMED
        and kv_lora <= _MOST_NORMED
    )
    if not fits or rows > _MOST_QUERIES:
        return None
    plan = linear_plan(q_b.kind, q_b.padded, q_lora, rows)
    # A block more for each token: with more blocks than multiprocessors they would wait for one
    # another.
    if (
        not isinstance(plan, TokensInSharedPlan)
        or plan.split > 1
        or -(-q_b.padded // (32 * plan.wn)) + rows > CLUSTERS_AT_ONCE[1]
    ):
        return None
    tensors = _operands(qkv_a, norms, rotation, slots)
    prepare, queries = (
        _prepare_params(tensors, None, norms, rotation, cache),
        qkv_a.new_empty(rows, q_b.out_features),
    )
    product = q_b.params(rows, queries)
    product.wn, product.split = plan.wn, 1
    layout = (FORMATS[q_b.kind], DTYPES[q_b.dtype], q_b.group)
    checked(
        library().qk_mla_queries(
            ctypes.byref(prepare), ctypes.byref(product), *layout, stream_of(qkv_a.device)
        )
    )
    return queries


def _preparable(qkv_a: Tensor, norms: Norms, rotation: Rotation, cache: Latents) -> bool:
    """Whether the kernels take such tensors."""
    alike = (
        qkv_a.dtype == norms.q.dtype == norms.k.dtype == _float_dtype(cache)
        and qkv_a.dtype in DTYPES
    )
    widths = (norms.q.shape[0], norms.k.shape[0], 2 * rotation.cos.shape[1])
    whole = widths[2] > 0 and not any(width % 8 for width in widths)
    return alike and whole and qkv_a.shape[0] > 0


def _operands(qkv_a: Tensor, norms: Norms, rotation: Rotation, slots: Tensor) -> list[Tensor]:
    return [
        one.contiguous() for one in (qkv_a, norms.q, norms.k, rotation.cos, rotation.sin, slots)
    ]


def _prepare_params(
    operands: list[Tensor], q_a: Tensor | None, norms: Norms, rotation: Rotation, cache: Latents
) -> MlaPrepare:
    """operands: as `_operands` gives them, which the caller keeps until the launch."""
    whole = cache.data_ptr() if isinstance(cache, Tensor) else None
    sizes = (len(operands[0]), norms.q.shape[0], norms.k.shape[0], 2 * rotation.cos.shape[1])
    to = (None if q_a is None else q_a.data_ptr(), whole)
    return MlaPrepare(
        *(one.data_ptr() for one in operands), *to, *sizes, rotation.interleaved, norms.eps
    )


def mla_decode(
    q: Tensor, kv_b: Tensor, rotation: Rotation, pages: PagedLatents, scale: float
) -> Tensor:
    (rows, heads, width), rope, cache = q.shape, 2 * rotation.cos.shape[1], pages.cache
    parts = parts_of(cache)
    sizes = (width - rope, rope, kv_b.shape[1] - (width - rope), kv_b.shape[2])
    fits = (
        sizes == (_NOPE, _ROPE, _VALUE, _LATENT)
        and q.dtype in DTYPES
        and _float_dtype(cache) == q.dtype
    )
    if not fits or q.numel() == 0 or not all(part.is_contiguous() for part in parts):
        return decode.mla_decode(q, kv_b, rotation, pages, scale)
    operands = [one.contiguous() for one in (q, kv_b, rotation.cos, rotation.sin)]
    table, seq_lens = pages.block_table.contiguous(), pages.seq_lens.contiguous()
    block_size, table_width = parts[0].shape[1], table.shape[1]
    splits = _splits(
        rows,
        heads,
        -(-table_width * block_size // (_CODE_TILE if isinstance(cache, CodedLatents) else _TILE)),
        q.device,
    )
    many = rows >= _MANY_ROWS and isinstance(cache, Tensor)
    splits = 1 if many else splits
    absorbed = torch.empty(rows, heads, _LATENT + _ROPE, dtype=q.dtype, device=q.device)
    weighted = torch.empty(rows, heads, splits, _LATENT, dtype=q.dtype, device=q.device)
    found = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, heads, _VALUE, dtype=q.dtype, device=q.device)
    params = MlaDecode(
        *(one.data_ptr() for one in operands),
        parts[0].data_ptr() if isinstance(cache, Tensor) else None,
        *(one.data_ptr() for one in (table, seq_lens, absorbed, weighted, found, out)),
        *(table.element_size() // 4, seq_lens.element_size() // 4, table_width, block_size),
        *(rows, heads, splits, rotation.interleaved, scale),
    )
    how = (DTYPES[q.dtype], stream_of(q.device))
    if many:
        of_heads, parts_of_kv = operands[0].transpose(0, 1), operands[1].split([_NOPE, _VALUE], 1)
        latent = absorbed[..., :_LATENT].transpose(0, 1)
        torch.bmm(of_heads[..., :_NOPE], parts_of_kv[0], out=latent)
        tokens = torch.arange(rows, device=q.device)
        absorbed[..., _LATENT:] = rope_of(operands[0][..., _NOPE:], tokens, *rotation)
        checked(library().qk_mla_attend(ctypes.byref(params), *how))
        means = weighted[:, :, 0].transpose(0, 1)
        torch.bmm(means, parts_of_kv[1].transpose(1, 2), out=out.transpose(0, 1))
        out.masked_fill_((seq_lens == 0)[:, None, None], 0.0)  # their means are whatever lay there
    elif isinstance(cache, CodedLatents):
        coded = MlaCodes(*(part.data_ptr() for part in parts))
        checked(
            library().qk_mla_decode_codes(
                ctypes.byref(params), ctypes.byref(coded), how[0], CODES[cache.codes.dtype], how[1]
            )
        )
    else:
        checked(library().qk_mla_decode(ctypes.byref(params), *how))
    return out


def _float_dtype(cache: Latents) -> torch.dtype:
    """Of what is cached in 16 bits: all of it, or the rotary keys."""
    return cache.keys.dtype if isinstance(cache, CodedLatents) else parts_of(cache)[0].dtype


def _splits(rows: int, heads: int, tiles: int, device: torch.device) -> int:
    """Into how many parts each row's tokens are divided at most: as fill the device once, no more
    than the longest row has tiles."""
    blocks = rows * -(-heads // 32)
    return max(1, min(_multiprocessors(device) // blocks, tiles, _MOST_SPLITS))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
