"""The operators of a decode step that hold no packed weight: norms, activation, rotary embedding, latent attention.

Each checks its arguments, picks a backend ("auto": the fastest usable on the tensors' device) and returns new tensors. Arithmetic is
float32 whatever the dtype of the tensors; results are rounded once.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import FLOAT_DTYPES, INDEX_DTYPES, check_tensor, require
from quantkit_kernels.latents import Latents, parts_of


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps). x float [..., H]; weight float [H]; returns [..., H] of x's dtype."""
    check_tensor("weight", weight, (x.shape[-1],), FLOAT_DTYPES)
    require(x.dtype in FLOAT_DTYPES, f"x: dtype {x.dtype}, expected a float dtype")
    result: Tensor = backends.find("rms_norm", backend, x.device).rms_norm(x, weight, eps)
    return result


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum. x, residual float [..., H], one dtype; weight float [H]; returns two of x's shape and dtype.

    The sum is rounded to x's dtype before it is normed, so both results agree on what the residual stream holds.
    """
    check_tensor("residual", residual, tuple(x.shape), (x.dtype,))
    check_tensor("weight", weight, (x.shape[-1],), FLOAT_DTYPES)
    require(x.dtype in FLOAT_DTYPES, f"x: dtype {x.dtype}, expected a float dtype")
    normed, total = backends.find("add_rms_norm", backend, x.device).add_rms_norm(x, residual, weight, eps)
    return normed, total


def silu_and_mul(x: Tensor, *, backend: str = "auto") -> Tensor:
    """silu(gate) * up of x = [gate, up]. x float [..., 2I]; returns [..., I] of x's dtype."""
    require(x.dtype in FLOAT_DTYPES, f"x: dtype {x.dtype}, expected a float dtype")
    require(x.shape[-1] % 2 == 0, f"x: last dimension {x.shape[-1]} is odd, expected gate and up side by side")
    result: Tensor = backends.find("silu_and_mul", backend, x.device).silu_and_mul(x)
    return result


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = True, backend: str = "auto") -> Tensor:
    """Rotary embedding: pairs (x[2i], x[2i+1]), or (x[i], x[i + D/2]) where not interleaved, turned by the angle of pair i at the token's
    position.

    x float [T, heads, D]; positions int [T]; cos, sin float32 [max_positions, D/2], the table of angles. Returns [T, heads, D] of x's
    dtype, in the same order. A position outside the table is refused on the CPU and undefined on a device.
    """
    check_tensor("x", x, (None, None, None), FLOAT_DTYPES)
    require(x.shape[2] % 2 == 0, f"x: head dimension {x.shape[2]} is odd")
    check_tensor("positions", positions, (x.shape[0],), INDEX_DTYPES)
    check_tensor("cos", cos, (None, x.shape[2] // 2), (torch.float32,))
    check_tensor("sin", sin, tuple(cos.shape), (torch.float32,))
    result: Tensor = backends.find("rope", backend, x.device).rope(x, positions, cos, sin, interleaved)
    return result


def mla_prepare(
    qkv_a: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Latents,
    slots: Tensor,
    *,
    eps: float,
    interleaved: bool = True,
    backend: str = "auto",
) -> Tensor:
    """MLA before attention: norms the query part of the low-rank projection and caches the rest, the latent normed, the rotary key turned.

    qkv_a float [T, q_lora + kv_lora + R]: query part, latent, rotary key of each token. q_norm [q_lora], kv_norm [kv_lora] float: gains.
    cos, sin float32 [T, R/2]: angles of the tokens' positions; interleaved as for `rope`.
    cache float [num_blocks, block_size, kv_lora + R], contiguous; slots int64 [T]: token t is stored in row slots[t] of all its slots.
    For a backend with such a `cache_layout`, two tensors and doubled angles (latents.py).
    Returns the normed query part [T, q_lora] of qkv_a's dtype. What is cached was rounded to qkv_a's dtype first.
    """
    tokens, latent = qkv_a.shape[0], kv_norm.shape[0]
    found = backends.find("mla_prepare", backend, qkv_a.device)
    rope_dim = _check_latents(found, cache, cos, sin, latent, tokens, qkv_a.dtype)
    check_tensor("qkv_a", qkv_a, (None, q_norm.shape[0] + latent + rope_dim), FLOAT_DTYPES)
    check_tensor("q_norm", q_norm, (None,), FLOAT_DTYPES)
    check_tensor("kv_norm", kv_norm, (None,), FLOAT_DTYPES)
    require(all(part.is_contiguous() for part in parts_of(cache)), "cache: not contiguous")
    check_tensor("slots", slots, (tokens,), (torch.int64,))
    result: Tensor = found.mla_prepare(qkv_a, q_norm, kv_norm, cos, sin, cache, slots, eps, interleaved)
    return result


def mla_decode(
    q: Tensor,
    kv_b: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Latents,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    interleaved: bool = True,
    lengths: Sequence[int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """MLA of one query token per row over the cached latents, absorbed: softmax(scale * [q_nope W_UK, q_pe] . cached) . latents W_UV.

    q float [B, heads, N + R]: of each head the part without a position, then the rotary part, not yet turned.
    kv_b of q's dtype [heads, N + V, kv_lora]: of each head W_UK, then W_UV. cos, sin float32 [B, R/2]; interleaved as for `rope`.
    cache float [num_blocks, block_size, kv_lora + R]: the normed latent, then the rotary key, of one token per slot.
    For a backend with such a `cache_layout`, two tensors and doubled angles (latents.py).
    block_table int [B, max_blocks]: token t of row b is in cache[block_table[b, t // block_size], t % block_size]. Entries past the
    sequence must name some block; what is stored there does not matter, not even NaN.
    seq_lens int [B]: tokens to attend to, the newest included; a row of length 0 gives zeros. lengths: the same on the host, which one
    backend's operator wants there; it reads them from the device where they are not given, and so waits for it.
    Returns [B, heads, V] of q's dtype, to which the absorbed query, probabilities and what they add up to may be rounded on the way.

    A contiguous cache [B, max_len, D] is the case of one block per row: block_table = arange(B)[:, None]. Several query tokens of one
    sequence are several rows with the same table and rising seq_lens.
    """
    check_tensor("q", q, (None, None, None), FLOAT_DTYPES)
    rows, heads, width = q.shape
    check_tensor("kv_b", kv_b, (heads, None, None), (q.dtype,))
    found = backends.find("mla_decode", backend, q.device)
    rope_dim = _check_latents(found, cache, cos, sin, kv_b.shape[2], rows, q.dtype)
    require(0 < width - rope_dim < kv_b.shape[1], f"kv_b: {kv_b.shape[1]} rows a head, expected more than the {width - rope_dim} of W_UK")
    check_tensor("block_table", block_table, (rows, None), INDEX_DTYPES)
    check_tensor("seq_lens", seq_lens, (rows,), INDEX_DTYPES)
    require(lengths is None or len(lengths) == rows, f"lengths: not one for each of {rows} rows")
    result: Tensor = found.mla_decode(q, kv_b, cos, sin, cache, block_table, seq_lens, scale, interleaved, lengths)
    return result


def _check_latents(found: ModuleType, cache: Latents, cos: Tensor, sin: Tensor, kv_lora: int, tokens: int, dtype: torch.dtype) -> int:
    """The rotary width that cache and angles agree on."""
    if isinstance(cache, Tensor):
        check_tensor("cos", cos, (tokens, None), (torch.float32,))
        check_tensor("sin", sin, tuple(cos.shape), (torch.float32,))
        rope_dim = 2 * cos.shape[1]
        check_tensor("cache", cache, (None, None, kv_lora + rope_dim), FLOAT_DTYPES)
        return rope_dim
    rope_dim = cache[1].shape[-1]
    if found.cache_layout(kv_lora, rope_dim, dtype).widths != (kv_lora, rope_dim):
        raise ValueError(f"cache: in two tensors, which {found.__name__.rpartition('.')[2]} does not read at these sizes")
    check_tensor("cos", cos, (tokens, rope_dim), (dtype,))
    check_tensor("sin", sin, (tokens, rope_dim), (dtype,))
    for part, size in zip(cache, (kv_lora, rope_dim)):
        check_tensor("cache", part, (cache[0].shape[0], cache[0].shape[1], size), (dtype,))
    return rope_dim
