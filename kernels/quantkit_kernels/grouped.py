"""Grouped-query attention over the paged cache: before it, and of a decode step. Prompts are in
prompts.py.

Keys and values lie apart, each [num_blocks, block_size, kv_heads, D]; a sequence's token t is in
block block_table[t // block_size], at t % block_size. They are read where they lie. Query heads h *
shared .. (h + 1) * shared - 1 read key head h. In 8 bits they are codes with scales (codes.py).
"""

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import FLOAT_DTYPES, check_tensor, require
from quantkit_kernels.codes import LARGEST, CodedKeys, KeySteps, KeyValues
from quantkit_kernels.paged import Norms, PagedKeys, Rotation, check_pages, check_rotation


def gqa_prepare(
    qkv: Tensor,
    norms: Norms | None,
    rotation: Rotation,
    cache: KeyValues,
    slots: Tensor,
    *,
    code_steps: KeySteps | None = None,
    backend: str = "auto",
) -> Tensor:
    """GQA before attention: norms and turns the queries, which are returned, and the keys; caches
    keys and values.

    qkv float [T, (heads + 2 * kv_heads) * D]: queries, keys and values of each token. norms: gains
    [D] of the norms over a head, or None where the model has none. The rotation turns a head's
    first R channels. cache: keys and values as in `PagedKeys`, contiguous; slots
    int64 [T]: token t is stored in row slots[t] of all their slots. Returns [T, heads, D] of qkv's
    dtype. Codes are of what was rounded to qkv's dtype. code_steps: what a code of each channel is
    worth, where that is known: keys and values are divided by it, and who reads them multiplies
    queries, and what comes of values; plain torch computes that, whatever the backend.
    """
    kv_heads, width = check_sides(cache)
    require(all(side.is_contiguous() for side in cache), "keys, values: not contiguous")
    check_tensor("qkv", qkv, (None, None), FLOAT_DTYPES)
    heads, rest = divmod(qkv.shape[1] - 2 * kv_heads * width, width)
    require(
        rest == 0 and heads > 0 and heads % kv_heads == 0,
        f"qkv: {qkv.shape[1]} columns are not heads next to {kv_heads} of {width}",
    )
    if norms is not None:
        check_tensor("norms.q", norms.q, (width,), FLOAT_DTYPES)
        check_tensor("norms.k", norms.k, (width,), FLOAT_DTYPES)
    rope_dim = check_rotation(rotation, qkv.shape[0])
    require(rope_dim <= width, f"cos: {rope_dim // 2} angles for heads of {width}")
    check_tensor("slots", slots, (qkv.shape[0],), (torch.int64,))
    found = backends.find("gqa_prepare", backend if code_steps is None else "reference", qkv.device)
    known = {}
    if code_steps is not None:
        require(isinstance(cache, CodedKeys), "code_steps: the cache holds no codes")
        for step in code_steps:
            check_tensor("code_steps", step, (kv_heads, width), (torch.float32,))
        known["code_steps"] = code_steps
    result: Tensor = found.gqa_prepare(qkv, norms, rotation, cache, slots, **known)
    return result


def gqa_decode(
    q: Tensor,
    pages: PagedKeys,
    *,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """GQA of one query token per row: softmax(scale * q . keys) values, heads sharing keys.

    q float [B, heads, D], heads a multiple of kv_heads. window: a token sees itself and at most
    window - 1 before it; 0 for all.
    sinks float32 [heads]: the score of one more key of each head, which every token sees and whose
    value is zero (gpt-oss). A row of length 0 gives zeros. Returns [B, heads, D] of q's dtype, to
    which probabilities may be rounded.

    Several query tokens of one sequence are several rows with the same table and rising seq_lens.
    """
    check_cache(q, pages.cache, window)
    check_pages(pages, q.shape[0])
    result: Tensor
    if sinks is None:
        result = backends.find("gqa_decode", backend, q.device).gqa_decode(q, pages, scale, window)
    else:
        check_sinks(sinks, q)
        result = backends.find_with_sinks("gqa_decode", backend, q.device).gqa_decode(
            q, pages, scale, window, sinks
        )
    return result


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    check_tensor("sinks", sinks, (q.shape[1],), (torch.float32,))


def check_cache(q: Tensor, cache: KeyValues, window: int) -> None:
    check_tensor("q", q, (None, None, None), FLOAT_DTYPES)
    kv_heads, _ = check_sides(cache, q.shape[2])
    require(
        q.shape[1] % kv_heads == 0,
        f"q: {q.shape[1]} heads do not share {kv_heads} key heads evenly",
    )
    require(window >= 0, f"window: {window}, expected at least 0")


def check_sides(cache: KeyValues, width: int | None = None) -> tuple[int, int]:
    """Key heads and their width, which keys, values and scales agree on. width: which it must
    be."""
    keys, values = cache[:2]
    coded = isinstance(cache, CodedKeys)
    check_tensor("keys", keys, (None, None, None, width), tuple(LARGEST) if coded else FLOAT_DTYPES)
    check_tensor("values", values, tuple(keys.shape), (keys.dtype,))
    for scales in cache[2:]:
        check_tensor("scales", scales, tuple(keys.shape[:3]), (torch.float32,))
    return keys.shape[2], keys.shape[3]
