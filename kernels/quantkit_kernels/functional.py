"""The operators of a decode step that hold no packed weight: norms, activation, rotary embedding,
latent attention.

Each checks its arguments, picks a backend ("auto": the fastest usable on the tensors' device) and
returns new tensors. Arithmetic is float32 whatever the dtype of the tensors; results are rounded
once.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import FLOAT_DTYPES, INDEX_DTYPES, check_tensor, require
from quantkit_kernels.codes import LARGEST, CodedLatents
from quantkit_kernels.gating import SILU, Gating
from quantkit_kernels.hadamard import block_hadamard
from quantkit_kernels.paged import (
    Latents,
    Norms,
    PagedLatents,
    Rotation,
    check_pages,
    check_rotation,
    parts_of,
)
from quantkit_kernels.weights import MX_GROUP_SIZE


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps). x float [..., H]; weight float [H]; returns [..., H] of
    x's dtype."""
    check_tensor("weight", weight, (x.shape[-1],), FLOAT_DTYPES)
    require(x.dtype in FLOAT_DTYPES, f"x: dtype {x.dtype}, expected a float dtype")
    result: Tensor = backends.find("rms_norm", backend, x.device).rms_norm(x, weight, eps)
    return result


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum. x, residual float [..., H], one dtype; weight float
    [H]; returns two of x's shape and dtype.

    The sum is rounded to x's dtype before it is normed, so both results agree on what the residual
    stream holds.
    """
    check_tensor("residual", residual, tuple(x.shape), (x.dtype,))
    check_tensor("weight", weight, (x.shape[-1],), FLOAT_DTYPES)
    require(x.dtype in FLOAT_DTYPES, f"x: dtype {x.dtype}, expected a float dtype")
    normed, total = backends.find("add_rms_norm", backend, x.device).add_rms_norm(
        x, residual, weight, eps
    )
    return normed, total


def silu_and_mul(x: Tensor, *, backend: str = "auto") -> Tensor:
    """silu(gate) * up of x = [gate, up]. x float [..., 2I]; returns [..., I] of x's dtype."""
    require(x.dtype in FLOAT_DTYPES, f"x: dtype {x.dtype}, expected a float dtype")
    require(
        x.shape[-1] % 2 == 0,
        f"x: last dimension {x.shape[-1]} is odd, expected gate and up side by side",
    )
    result: Tensor = backends.find("silu_and_mul", backend, x.device).silu_and_mul(x)
    return result


def gate_and_mul(x: Tensor, gating: Gating, *, backend: str = "auto") -> Tensor:
    """gating(gate, up) of x = [gate, up]. x float [..., 2I]; returns [..., I] of x's dtype.

    A gating that is no formula is called, whatever the backend.
    """
    if gating == SILU:
        return silu_and_mul(x, backend=backend)
    require(x.dtype in FLOAT_DTYPES, f"x: dtype {x.dtype}, expected a float dtype")
    require(
        x.shape[-1] % 2 == 0,
        f"x: last dimension {x.shape[-1]} is odd, expected gate and up side by side",
    )
    if not gating.is_formula:
        return gating(*x.chunk(2, dim=-1))
    result: Tensor = backends.find("gate_and_mul", backend, x.device).gate_and_mul(x, gating)
    return result


def gate_and_rotate(x: Tensor, gating: Gating, block: int, *, backend: str = "auto") -> Tensor:
    """`gate_and_mul`, and every `block` consecutive values of that multiplied by a Hadamard matrix
    as `block_hadamard` does; rounded once.

    x float [..., 2I]; block a power of two that divides I; returns [..., I] of x's dtype.
    """
    require(x.dtype in FLOAT_DTYPES, f"x: dtype {x.dtype}, expected a float dtype")
    require(
        x.shape[-1] % (2 * block) == 0,
        f"x: last dimension {x.shape[-1]} is not gate and up in blocks of {block}",
    )
    if not gating.is_formula:
        return block_hadamard(gating(*x.chunk(2, dim=-1)), block)
    found = backends.find("gate_and_rotate", backend, x.device)
    result: Tensor = found.gate_and_rotate(x, gating, block)
    return result


def mx_rounded(x: Tensor, bits: int, *, backend: str = "auto") -> Tensor:
    """x float [..., K] as MXFP4 (bits 4) or MXFP8 (8) holds it, in x's dtype: the values of
    `round_to_mx`. K is a multiple of 32."""
    require(x.dtype in FLOAT_DTYPES, f"x: dtype {x.dtype}, expected a float dtype")
    require(bits in (4, 8), f"bits: {bits}, expected 4 or 8")
    require(
        x.shape[-1] % MX_GROUP_SIZE == 0,
        f"x: {x.shape[-1]} channels are not a multiple of {MX_GROUP_SIZE}",
    )
    result: Tensor = backends.find("mx_rounded", backend, x.device).mx_rounded(x, bits)
    return result


def likeliest(logits: Tensor, *, backend: str = "auto") -> Tensor:
    """The places int64 [B] of the largest of each row of logits float32 [B, V], the first of equal
    ones. A row with NaN has one, too."""
    require(
        logits.dim() == 2 and logits.shape[1] > 0,
        f"logits: shape {list(logits.shape)}, expected [B, V]",
    )
    require(logits.dtype == torch.float32, f"logits: dtype {logits.dtype}, expected float32")
    result: Tensor = backends.find("likeliest", backend, logits.device).likeliest(logits)
    return result


def float32_linear(x: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """x float [T, H] @ weight float32 [N, H].T -> float32 [T, N], as a router's logits and gates
    are computed."""
    check_tensor("x", x, (None, None), FLOAT_DTYPES)
    check_tensor("weight", weight, (None, x.shape[1]), (torch.float32,))
    found = backends.find("float32_linear", backend, x.device)
    result: Tensor = found.float32_linear(x, weight)
    return result


def rope(
    x: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Rotary embedding: pairs (x[2i], x[2i+1]), or (x[i], x[i + D/2]) where not interleaved,
    rotated by the angle of pair i at the token's position.

    x float [T, heads, D]; positions int [T]; cos, sin float32 [max_positions, D/2], the table of
    angles. Returns [T, heads, D] of x's dtype, in the same order. A position outside the table is
    refused on the CPU and undefined on a device.
    """
    check_tensor("x", x, (None, None, None), FLOAT_DTYPES)
    require(x.shape[2] % 2 == 0, f"x: head dimension {x.shape[2]} is odd")
    check_tensor("positions", positions, (x.shape[0],), INDEX_DTYPES)
    check_tensor("cos", cos, (None, x.shape[2] // 2), (torch.float32,))
    check_tensor("sin", sin, tuple(cos.shape), (torch.float32,))
    result: Tensor = backends.find("rope", backend, x.device).rope(
        x, positions, cos, sin, interleaved
    )
    return result


def rotary_angles(
    positions: Tensor,
    frequencies: Tensor,
    *,
    factor: float = 1.0,
    group: int = 1,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """cos and sin of a position times each frequency, both times `factor`: float32 [T, R/2].

    positions int64 [T]; frequencies float32 [R/2]. group: a position counts as the first of its
    group of so many.
    """
    check_tensor("positions", positions, (None,), (torch.int64,))
    check_tensor("frequencies", frequencies, (None,), (torch.float32,))
    require(group > 0, f"group: {group} positions, expected at least 1")
    found = backends.find("rotary_angles", backend, positions.device)
    cos, sin = found.rotary_angles(positions, frequencies, factor, group)
    return cos, sin


def mla_prepare(
    qkv_a: Tensor,
    norms: Norms,
    rotation: Rotation,
    cache: Latents,
    slots: Tensor,
    *,
    code_step: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """MLA before attention: norms the query part of the low-rank projection and caches the rest,
    the latent normed, the rotary key rotated.

    qkv_a float [T, q_lora + kv_lora + R]: query part, latent, rotary key of each token. norms:
    gains [q_lora] and [kv_lora]. cache as in `PagedLatents`, contiguous; slots int64 [T]: token t
    is stored in row slots[t] of all its slots.
    code_step float32 []: what a code of a latent is worth, where it is known (codes.py); plain
    torch computes that, whatever the backend. Returns the normed query part [T, q_lora] of qkv_a's
    dtype. What is cached was rounded to qkv_a's dtype first, codes too.
    """
    found, known = _checked_prepare(qkv_a, norms, rotation, cache, slots, code_step, backend)
    result: Tensor = found.mla_prepare(qkv_a, norms, rotation, cache, slots, **known)
    return result


def mla_queries(
    qkv_a: Tensor,
    norms: Norms,
    rotation: Rotation,
    cache: Latents,
    slots: Tensor,
    q_b: Callable[[Tensor], Tensor],
    *,
    code_step: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`q_b`, a linear or what calls one, of what `mla_prepare` returns: in one launch where the
    backend has one for both, which gives the same to the last bit. The other arguments are those of
    `mla_prepare`."""
    found, known = _checked_prepare(qkv_a, norms, rotation, cache, slots, code_step, backend)
    together = getattr(found, "mla_queries", None)
    queries: Tensor | None = (
        together(qkv_a, norms, rotation, cache, slots, q_b) if together else None
    )
    return (
        q_b(found.mla_prepare(qkv_a, norms, rotation, cache, slots, **known))
        if queries is None
        else queries
    )


def _checked_prepare(
    qkv_a: Tensor,
    norms: Norms,
    rotation: Rotation,
    cache: Latents,
    slots: Tensor,
    code_step: Tensor | None,
    backend: str,
) -> tuple[ModuleType, dict[str, Tensor]]:
    """The backend that runs `mla_prepare` with these arguments, and the arguments of the reference
    alone."""
    tokens, latent = qkv_a.shape[0], norms.k.shape[0]
    found = backends.find(
        "mla_prepare", backend if code_step is None else "reference", qkv_a.device
    )
    rope_dim = _check_latents(found, cache, rotation, latent, tokens, qkv_a.dtype)
    check_tensor("qkv_a", qkv_a, (None, norms.q.shape[0] + latent + rope_dim), FLOAT_DTYPES)
    check_tensor("norms.q", norms.q, (None,), FLOAT_DTYPES)
    check_tensor("norms.k", norms.k, (None,), FLOAT_DTYPES)
    require(all(part.is_contiguous() for part in parts_of(cache)), "cache: not contiguous")
    check_tensor("slots", slots, (tokens,), (torch.int64,))
    if code_step is None:
        return found, {}
    check_tensor("code_step", code_step, (), (torch.float32,))
    require(isinstance(cache, CodedLatents), "code_step: the cache holds no codes")
    return found, {"code_step": code_step}


def mla_decode(
    q: Tensor,
    kv_b: Tensor,
    rotation: Rotation,
    pages: PagedLatents,
    *,
    scale: float,
    backend: str = "auto",
) -> Tensor:
    """MLA of one query token per row over the cached latents, absorbed: softmax(scale * [q_nope
    W_UK, q_pe] . cached) . latents W_UV.

    q float [B, heads, N + R]: of each head the part without a position, then the rotary part, not
    yet rotated. kv_b of q's dtype [heads, N + V, kv_lora]: of each head W_UK, then W_UV. A row of
    length 0 gives zeros. Returns [B, heads, V] of q's dtype, to which the absorbed query,
    probabilities and what they add up to may be rounded on the way.

    A contiguous cache [B, max_len, D] is the case of one block per row: block_table = arange(B)[:,
    None]. Several query tokens of one sequence are several rows with the same table and rising
    seq_lens.
    """
    check_tensor("q", q, (None, None, None), FLOAT_DTYPES)
    rows, heads, width = q.shape
    check_tensor("kv_b", kv_b, (heads, None, None), (q.dtype,))
    found = backends.find("mla_decode", backend, q.device)
    rope_dim = _check_latents(found, pages.cache, rotation, kv_b.shape[2], rows, q.dtype)
    require(
        0 < width - rope_dim < kv_b.shape[1],
        f"kv_b: {kv_b.shape[1]} rows a head, expected more than the {width - rope_dim} of W_UK",
    )
    check_pages(pages, rows)
    result: Tensor = found.mla_decode(q, kv_b, rotation, pages, scale)
    return result


def _check_latents(
    found: ModuleType,
    cache: Latents,
    rotation: Rotation,
    kv_lora: int,
    tokens: int,
    dtype: torch.dtype,
) -> int:
    """The rotary width that cache and angles agree on."""
    if isinstance(cache, Tensor):
        rope_dim = check_rotation(rotation, tokens)
        check_tensor("cache", cache, (None, None, kv_lora + rope_dim), FLOAT_DTYPES)
        return rope_dim
    if isinstance(cache, CodedLatents):
        reason = getattr(found, "NO_CODES", None)
        require(reason is None, f"cache: {reason}")
        rope_dim = check_rotation(rotation, tokens)
        check_tensor("cache.codes", cache.codes, (None, None, kv_lora), tuple(LARGEST))
        check_tensor("cache.keys", cache.keys, (*cache.codes.shape[:2], rope_dim), FLOAT_DTYPES)
        check_tensor("cache.scales", cache.scales, tuple(cache.codes.shape[:2]), (torch.float32,))
        return rope_dim
    rope_dim = cache[1].shape[-1]
    if found.cache_layout(kv_lora, rope_dim, dtype).widths != (kv_lora, rope_dim):
        raise ValueError(
            f"cache: in two tensors, which {found.__name__.rpartition('.')[2]} does not read at "
            "these sizes"
        )
    check_tensor("cos", rotation.cos, (tokens, rope_dim), (dtype,))
    check_tensor("sin", rotation.sin, (tokens, rope_dim), (dtype,))
    for part, size in zip(cache, (kv_lora, rope_dim)):
        check_tensor("cache", part, (cache[0].shape[0], cache[0].shape[1], size), (dtype,))
    return rope_dim
