"""Grouped-query attention over the paged cache: before it, and of a decode step. Prompts are in prompts.py.

Keys and values lie apart, each [num_blocks, block_size, kv_heads, D]; a sequence's token t is in block block_table[t // block_size], at
t % block_size. They are read where they lie. Query heads h * shared .. (h + 1) * shared - 1 read key head h.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import FLOAT_DTYPES, INDEX_DTYPES, check_tensor, require


def gqa_prepare(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    *,
    eps: float = 0.0,
    interleaved: bool = False,
    backend: str = "auto",
) -> Tensor:
    """GQA before attention: norms and turns the queries, which are returned, and the keys; caches keys and values.

    qkv float [T, (heads + 2 * kv_heads) * D]: queries, keys and values of each token. q_norm, k_norm float [D]: gains of the norms over a
    head, or None for none; eps of both. cos, sin float32 [T, R/2]: angles of the tokens' positions, which turn a head's first R channels;
    interleaved as for `rope`. keys, values float [num_blocks, block_size, kv_heads, D], contiguous; slots int64 [T]: token t is stored in
    row slots[t] of all their slots. Returns [T, heads, D] of qkv's dtype.
    """
    check_tensor("keys", keys, (None, None, None, None), FLOAT_DTYPES)
    check_tensor("values", values, tuple(keys.shape), (keys.dtype,))
    require(keys.is_contiguous() and values.is_contiguous(), "keys, values: not contiguous")
    kv_heads, width = keys.shape[2:]
    check_tensor("qkv", qkv, (None, None), FLOAT_DTYPES)
    heads, rest = divmod(qkv.shape[1] - 2 * kv_heads * width, width)
    require(rest == 0 and heads > 0 and heads % kv_heads == 0, f"qkv: {qkv.shape[1]} columns are no heads beside {kv_heads} of {width}")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_tensor(name, norm, (width,), FLOAT_DTYPES)
    require((q_norm is None) == (k_norm is None), "q_norm, k_norm: one without the other")
    check_tensor("cos", cos, (qkv.shape[0], None), (torch.float32,))
    check_tensor("sin", sin, tuple(cos.shape), (torch.float32,))
    require(2 * cos.shape[1] <= width, f"cos: {cos.shape[1]} angles for heads of {width}")
    check_tensor("slots", slots, (qkv.shape[0],), (torch.int64,))
    found = backends.find("gqa_prepare", backend, qkv.device)
    result: Tensor = found.gqa_prepare(qkv, q_norm, k_norm, cos, sin, keys, values, slots, eps, interleaved)
    return result


def gqa_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    lengths: Sequence[int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """GQA of one query token per row: softmax(scale * q . keys) values, heads sharing keys.

    q float [B, heads, D]; keys, values float [num_blocks, block_size, kv_heads, D], heads a multiple of kv_heads. block_table int [B, n];
    entries past the sequence must name some block; what is stored there does not matter, not even NaN. seq_lens int [B]: tokens cached,
    the newest included; a row of length 0 gives zeros. window: a token sees itself and at most window - 1 before it; 0 for all.
    lengths: seq_lens on the host, as for `mla_decode`. Returns [B, heads, D] of q's dtype, to which probabilities may be rounded.

    Several query tokens of one sequence are several rows with the same table and rising seq_lens.
    """
    check_cache(q, keys, values, window)
    check_tensor("block_table", block_table, (q.shape[0], None), INDEX_DTYPES)
    check_tensor("seq_lens", seq_lens, (q.shape[0],), INDEX_DTYPES)
    require(lengths is None or len(lengths) == len(q), f"lengths: not one for each of {len(q)} rows")
    found = backends.find("gqa_decode", backend, q.device)
    result: Tensor = found.gqa_decode(q, keys, values, block_table, seq_lens, scale, window, lengths)
    return result


def check_cache(q: Tensor, keys: Tensor, values: Tensor, window: int) -> None:
    check_tensor("q", q, (None, None, None), FLOAT_DTYPES)
    check_tensor("keys", keys, (None, None, None, q.shape[2]), FLOAT_DTYPES)
    check_tensor("values", values, tuple(keys.shape), (keys.dtype,))
    require(q.shape[1] % keys.shape[2] == 0, f"q: {q.shape[1]} heads do not share {keys.shape[2]} key heads evenly")
    require(window >= 0, f"window: {window}, expected at least 0")
